"""How fast the scripts are beside other implementations, as ratios measured in one go: `python -m benchmark speed`.

Each contestant is a process of its own, one at a time, with one thread. A repeat goes through all of them once, so that
whatever else the machine does hits all alike; a ratio is taken within a repeat, and its median over repeats reported.
"""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

from benchmark.results import describe
from benchmark.runner import LIBC, die_with_runner
from benchmark.runs import ROOT, Refused, flag_list, read_json, slug
from benchmark.speed_report import BARE, CLEANRL, SB3, SBX, TITLES, TRL, describe_origin, report, write_files

BATCH, COMPLETIONS = 16 * 128, 16 * 8
CONTROL = {"env-id": "HalfCheetah-v5", "num-envs": 16, "num-steps": 128, "num-minibatches": 32, "update-epochs": 10}
CONTROL |= {"eval-episodes": 0}
# Few gradient steps, since only memory is asked for; lag 63 has all its policies after 64 iterations.
MEMORY = CONTROL | {"num-minibatches": 4, "update-epochs": 1, "total-timesteps": 70 * BATCH}
# Five terms, whose worked solutions are 16 tokens at most.
LLM = {
    "num-terms": 5,
    "max-new-tokens": 16,
    "num-prompts": 16,
    "num-generations": 8,
    "eval-problems": 0,
    "num-evals": 0,
}
# Hardly a warm start, so that completions are as long as those of a random model, and no longer skipped for lack of
# any reward; and hardly a step, so that they stay so.
LLM |= {"learning-rate": 1e-5, "warm-start-steps": 25, "warm-start-dir": "../warm_start"}

WARMUP = {"control": 3, "llm": 10, "memory": 3}  # iterations before the measured ones
FACTOR = {
    "llm": 4,
    "environment": 5,
    "async_environment": 5,
    "physics": 5,
}  # measured iterations of these, short ones, per --iterations

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
ENVIRONMENT |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
ALONE = ("environment", "async_environment", "physics")  # of speed_peers.py, what needs no peer
HINT = "without --peers only our scripts, the bare environment and physics are measured; to have the others: "
HINT += "python3 -m venv DIR, DIR/bin/pip install -r benchmark/speed_requirements.txt, then --peers DIR/bin/python"


class Failed(Exception):
    """A contestant gave no measurement; the message is its last line."""


@dataclass(frozen=True)
class Contestant:
    table: str
    name: str
    script: str
    """relative to this repository"""
    words: list
    python: str = sys.executable
    unit: int | None = None
    """steps or completions per global_step of metrics.csv; None: it is no script of ours and prints its result"""
    lag_0: str | None = None
    """name of the same contestant without lag"""


def add_parser(commands):
    parser = commands.add_parser("speed", help="measure the speed of the scripts beside other implementations")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of speed.csv and speed.md")
    parser.add_argument("--only", choices=TITLES, help="one table (default: all)")
    parser.add_argument("--match", metavar="REGEX", help="only contestants whose name matches, as 'PPO|bare'")
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="times all are measured (default: 3)")
    parser.add_argument("--iterations", type=int, default=8, metavar="I", help="measured iterations (default: 8)")
    parser.add_argument("--peers", type=Path, metavar="PYTHON", help="python that has speed_requirements.txt")
    parser.add_argument("--cleanrl", type=Path, metavar="PATH", help="a copy of CleanRL's ppo_continuous_action.py")
    parser.set_defaults(do=run_speed)


def run_speed(args):
    """Measure all, writing speed.csv and speed.md after each. Returns 0, or 1 if something failed."""
    refuse(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows, failures, origin, started = [], {}, describe_origin(), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        if args.cleanrl:
            shutil.copy(args.cleanrl, scratch / "cleanrl.py")
        contestants = [c for c in enlist(args) if re.search(args.match or "", c.name)]
        contestants = [c for c in contestants if "--compile" not in c.words or has_compile(c.script)]
        if not contestants:
            raise Refused(f"--match {args.match} matches the name of no contestant")
        args.out.mkdir(parents=True, exist_ok=True)
        if not args.peers:
            print(HINT, flush=True)
        turns = [(r, c) for r in range(1, args.repeats + 1) for c in contestants if r == 1 or c.table != "memory"]
        if any(c.table == "llm" for c in contestants):
            with suppress(Failed):  # makes the warm start which all use; else the first to be measured would
                flags = LLM | {"num-updates": 1}
                run_alone(Contestant("llm", "warm start", "grpo_llm.py", flag_list(flags), unit=1), scratch)
        for turn, (repeat, contestant) in enumerate(turns, 1):
            try:
                row = {"table": contestant.table, "contestant": contestant.name, "repeat": repeat}
                rows.append(row | measure(contestant, scratch) | origin)
                said = "{steps_per_second:,.0f} per s, warm-up {warmup_seconds:.0f} s, {peak_rss_mb:.0f} MB"
                said = said.format(**rows[-1])
            except Failed as failure:
                failures[contestant.name], said = str(failure), f"failed: {failure}"
                shutil.copy(scratch / "log", args.out / f"{slug(contestant.name)}.log")
            write_files(args, contestants, rows, failures)
            left = timedelta(seconds=round((time.perf_counter() - started) / turn * (len(turns) - turn)))
            print(f"{turn}/{len(turns)} {contestant.name}, repeat {repeat}: {said}; {left} left", flush=True)
    results = report(contestants, rows, failures)
    print("\n\n".join(["", *results, f"written: {args.out}/speed.md, {args.out}/speed.csv"]))
    return 1 if failures else 0


def refuse(args):
    for name in ("repeats", "iterations"):
        if getattr(args, name) < 1:
            raise Refused(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.peers and not (args.peers.is_file() and os.access(args.peers, os.X_OK)):
        raise Refused(f"--peers {args.peers} is no program: give the python of the environment that has the peers")
    try:
        re.compile(args.match or "")
    except re.error as error:
        raise Refused(f"--match {args.match} is no regular expression: {error}") from None
    if args.cleanrl and not args.peers:
        raise Refused("--cleanrl needs --peers PYTHON, whose environment runs it")
    if args.cleanrl and not args.cleanrl.is_file():
        raise Refused(f"--cleanrl {args.cleanrl} is no file: give a copy of CleanRL's ppo_continuous_action.py")
    if (args.out / "speed.csv").exists():
        raise Refused(f"{args.out} holds a speed.csv already: move it or choose another --out")


# -------------------------------------------------------------------------------------------------------- contestants


def enlist(args):
    """The contestants, in the order in which a repeat measures them."""
    found = []
    if args.only in (None, "control"):
        flags = CONTROL | {"total-timesteps": (WARMUP["control"] + args.iterations) * BATCH}
        for name in ("PPO", "VACO"):
            found += ours("control", name, f"{name.lower()}_continuous.py", flags, lags=(0, 63), unit=1)
        found += [other("control", SB3, "sb3", args), other("control", SBX, "sbx", args)] if args.peers else []
        found += [other("control", CLEANRL, "cleanrl", args)] if args.cleanrl else []
        alone = {BARE: "environment", "AsyncVectorEnv": "async_environment", "physics alone": "physics"}
        found += [other("control", name, which, args) for name, which in alone.items()]
    if args.only in (None, "llm"):
        flags = LLM | {"num-updates": WARMUP["llm"] + FACTOR["llm"] * args.iterations}
        for name in ("GRPO", "VACO"):
            found += ours("llm", f"{name} LLM", f"{name.lower()}_llm.py", flags, lags=(0,), unit=COMPLETIONS)
        found += [other("llm", TRL, "trl", args)] if args.peers else []
    if args.only in (None, "memory"):
        for env_id, lag in (("HalfCheetah-v5", 0), ("Humanoid-v5", 63)):
            words = flag_list(MEMORY | {"env-id": env_id, "lag": lag})
            found.append(Contestant("memory", f"VACO {env_id}, lag {lag}", "vaco_continuous.py", words, unit=1))
    return found


def ours(table, name, script, flags, lags, unit):
    """A script at each lag, without --compile and with it."""
    found = []
    for suffix, words in (("", []), (", --compile", ["--compile"])):
        for lag in lags:
            lag_0 = f"{name}, lag 0{suffix}" if lag else None
            command = [*flag_list(flags | {"lag": lag}), *words]
            found.append(Contestant(table, f"{name}, lag {lag}{suffix}", script, command, unit=unit, lag_0=lag_0))
    return found


@cache
def has_compile(script):
    shown = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True)
    return "--compile" in shown.stdout


def other(table, name, which, args):
    """One of speed_peers.py, in the peers' environment unless it needs nothing that ours lacks."""
    iterations = FACTOR.get(which, FACTOR.get(table, 1)) * args.iterations
    words = [which, "--warmup", str(WARMUP[table]), "--iterations", str(iterations)]
    words += ["--cleanrl", "../cleanrl.py"] if which == "cleanrl" else []
    python = sys.executable if which in ALONE else str(args.peers.absolute())
    return Contestant(table, name, "benchmark/speed_peers.py", words, python)


# -------------------------------------------------------------------------------------------------------- measurement


def measure(contestant, scratch):
    """Run a contestant once. Returns the columns of speed.csv that it decides; raises Failed."""
    output, wall, usage = run_alone(contestant, scratch)
    try:
        if contestant.unit:
            result = read_run(contestant, scratch / "run")
        else:
            result = json.loads([line for line in output.splitlines() if line.startswith('{"steps"')][-1])
        return {
            "steps_per_second": result["steps"] / result["seconds"],
            "warmup_seconds": wall - result["seconds"],  # start, imports, compilation, the first iterations
            "sampling_share": result["sampling_share"],
            "cpu_share": (usage.ru_utime + usage.ru_stime) / wall,
            "peak_rss_mb": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
            "versions": describe(result["versions"]),
            "command": shlex.join(["python", contestant.script, *contestant.words]),
        }
    except (Refused, OSError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Failed(f"its result cannot be read: {error!r}") from None


def run_alone(contestant, scratch):
    """Run it to its end. Returns (output, wall seconds, resource usage); raises Failed with its last line."""
    shutil.rmtree(scratch / "run", ignore_errors=True)
    shutil.rmtree(scratch / "cwd", ignore_errors=True)
    (scratch / "cwd").mkdir()
    command = [contestant.python, str(ROOT / contestant.script), *contestant.words]
    command += ["--run-dir", str(scratch / "run")] if contestant.unit else []
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / f"compiled-{slug(contestant.name)}")}  # empty at first
    started = time.perf_counter()
    with open(scratch / "log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=scratch / "cwd",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | compiled,
            start_new_session=True,
            preexec_fn=die_with_runner if LIBC else None,
        )
    try:
        _, status, usage = os.wait4(process.pid, 0)  # of this process, where getrusage has the largest one so far
    except BaseException:  # Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    wall, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    output = (scratch / "log").read_text(errors="replace").strip()
    if process.returncode != 0:
        lines = [line.strip(" │") for line in re.split(r"[\r\n]", output)]
        said = [line for line in lines if re.search(r"\w", line) and "full helptext" not in line]  # no frame of a box
        raise Failed(f"exit code {process.returncode}: {said[-1] if said else 'it said nothing'}")
    return output, wall, usage


def read_run(contestant, folder):
    """Steps and seconds of one of our runs from the end of the warm-up on, and the share of sampling if it has one."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    measured = rows[WARMUP[contestant.table] :]
    first, last = rows[-len(measured) - 1], rows[-1]
    seconds = last["charts/seconds"] - first["charts/seconds"]
    steps = (last["global_step"] - first["global_step"]) * contestant.unit
    skipped = sum(row.get("charts/skipped_steps", 0) for row in measured)
    if skipped > 0.1 * len(measured):
        raise Failed(f"{skipped:.0f} of {len(measured)} updates had no reward to learn from, so its speed says nothing")
    sampling = sum(row.get("charts/sampling_seconds", 0) for row in measured)
    training = sum(row.get("charts/training_seconds", 0) for row in measured)
    share = sampling / (sampling + training) if training else None
    versions = read_json(folder / "config.json")["versions"]
    return {"steps": steps, "seconds": seconds, "sampling_share": share, "versions": versions}
