"""Where a training of a control script spends its time: python -m benchmark.speed_profile SCRIPT.py [--compile]

Runs HalfCheetah-v5 at CleanRL's settings (16 x 128, 10 epochs of minibatches of 64) with a clock around the parts of an
iteration, and prints the milliseconds per iteration of each, without the first iterations. A part contains those that
are indented below it.
"""

import argparse
import functools
import importlib.util
import tempfile
import time
from pathlib import Path

import gymnasium as gym

WARMUP, ITERATIONS = 4, 24
PARTS = {  # name in the table -> where it is
    "rollout": ("rollout",),
    "  environments": (gym.vector.SyncVectorEnv, "step"),
    "  policies of all environments": ("stacked_action_mean",),
    "advantages": ("vtrace", "gae"),
    "gradient steps, with the shuffling": ("update",),
    "statistics, snapshots": (("Agent", "update_obs_stats"), ("RewardScaler", "update"), ("PolicyLag", "push")),
    "metrics, files": (("RunFiles", "log"), ("RunFiles", "checkpoint")),
}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmark.speed_profile")
    parser.add_argument("script", type=Path)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("script", args.script)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    spent, iterations = dict.fromkeys(PARTS, 0.0), []
    for part, places in PARTS.items():
        if isinstance(places[0], type):
            places = (places,)
        for place in places:
            owner, name = place if isinstance(place, tuple) else (script, place)
            owner = getattr(script, owner) if isinstance(owner, str) else owner
            if hasattr(owner, name):
                clock(owner, name, spent, part)

    draw = script.PolicyLag.draw  # begins an iteration

    @functools.wraps(draw)
    def mark(*args):
        if len(iterations) == WARMUP:
            spent.update(dict.fromkeys(PARTS, 0.0))
        iterations.append(time.perf_counter())
        return draw(*args)

    script.PolicyLag.draw = mark
    flags = {"compile": True} if args.compile else {}
    with tempfile.TemporaryDirectory() as folder:
        total_timesteps = 2048 * (WARMUP + ITERATIONS)
        settings = {"total_timesteps": total_timesteps, "num_minibatches": 32, "eval_episodes": 0}
        script.train(script.Args(run_dir=Path(folder) / "run", **settings, **flags))
    total = (time.perf_counter() - iterations[WARMUP]) / ITERATIONS
    rows = {part: seconds / ITERATIONS for part, seconds in spent.items()}
    rows["everything else"] = total - sum(seconds for part, seconds in rows.items() if not part.startswith(" "))
    title = args.script.name + " --compile" * args.compile
    print(f"\n| {title} | ms per iteration | share |\n| :--- | ---: | ---: |")
    for part, seconds in (rows | {"iteration": total}).items():
        print(f"| {part.replace('  ', '&nbsp;&nbsp;')} | {seconds * 1e3:.1f} | {seconds / total:.0%} |")


def clock(owner, name: str, spent: dict, part: str):
    function = getattr(owner, name)

    @functools.wraps(function)
    def timed(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    setattr(owner, name, timed)


if __name__ == "__main__":
    main()
