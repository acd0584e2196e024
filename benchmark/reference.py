"""Measure the ends of the scale on which scores are averaged over tasks, and put them into reference_scores.csv.

0 is a random policy: actions uniform within their bounds. 1 is PPO without lag after so many steps, the mean of the
final evaluations of all seeds. Its runs are those of a suite, in a folder of their own.
"""

import contextlib
import csv
import io
import math

import numpy as np

from benchmark.results import PACKAGES, load
from benchmark.runner import run_suite
from benchmark.runs import Refused, replace_file
from benchmark.stats import MIN_RUNS
from benchmark.suites import CHEAP, MUJOCO, PPO, Suite

COLUMNS = (
    "task",
    "steps",
    "final_step",
    "random",
    "ppo",
    "ppo_std",
    "episodes",
    "seeds",
    "commit",
    *PACKAGES,
    "command",
)
EPISODES, SEED = 100, 0  # of the random policy
LONGEST_EPISODE = 100_000


def reference_suite(tasks, steps, seeds):
    return Suite(
        description=f"PPO without lag after {steps:,} steps, the score of 1",
        algorithms={"PPO": PPO},
        tasks=tuple(tasks or MUJOCO),
        lags=(0,),
        seeds=tuple(seeds),
        settings=CHEAP | {"total-timesteps": steps, "num-evals": 10, "eval-episodes": 20},
    )


def measure(path, out, tasks, steps, seeds, command, workers=None):
    """Run what is missing in `out`, then merge the finished tasks into the CSV at `path`. Returns the exit code."""
    suite, old = reference_suite(tasks, steps, seeds), read_rows(path)
    code = run_suite("reference", suite, out, command, workers)
    if code > 1:
        return code
    _, _, rows = load(out)
    for task in suite.tasks:
        runs = [r for r in rows if r["task"] == task and r["seed"] in suite.seeds and r["eval_return"] is not None]
        if len(runs) < len(suite.seeds):
            print(f"{task}: no reference, {len(suite.seeds) - len(runs)} of {len(suite.seeds)} runs are not finished")
            continue
        random, ppo = random_return(task), [r["eval_return"] for r in runs]
        if not random < np.mean(ppo):
            print(f"{task}: no reference, PPO with {np.mean(ppo):.1f} is not above a random policy with {random:.1f}")
            continue
        origins = {k: " and ".join(dict.fromkeys(r[k] or "unknown" for r in runs)) for k in ("commit", *PACKAGES)}
        row = {"task": task, "steps": steps, "final_step": int(runs[0]["final_step"]), "random": random, **origins}
        row |= {"ppo": float(np.mean(ppo)), "ppo_std": float(np.std(ppo, ddof=1)) if len(ppo) > 1 else ""}
        row |= {"episodes": EPISODES, "seeds": " ".join(map(str, suite.seeds)), "command": command}
        old[task, str(steps)] = row
        few = f" (fewer than {MIN_RUNS} seeds)" if len(ppo) < MIN_RUNS else ""
        print(f"{task}, {steps:,} steps: random {random:.1f}, PPO {np.mean(ppo):.1f}{few}")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(old[key] for key in sorted(old, key=lambda key: (key[0], int(key[1]))))
    replace_file(path, text.getvalue())
    print(f"written: {path}")
    return code


def read_rows(path):
    """{(task, steps): row} of the CSV, all as text; empty without a file"""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not all(row.keys() == set(COLUMNS) and row["steps"].isdigit() for row in rows):
        raise Refused(f"{path} is not a file of reference scores; its columns are {', '.join(COLUMNS)}")
    return {(row["task"], row["steps"]): row for row in rows}


def random_return(task, episodes=EPISODES, seed=SEED):
    """Mean return of episodes with actions drawn uniformly within their bounds, which must be finite."""
    import gymnasium as gym

    with contextlib.suppress(ImportError):  # an environment from elsewhere
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None)  # else it writes MUJOCO_LOG.TXT into the working directory
    try:
        env = gym.make(task)
    except gym.error.Error as error:
        raise Refused(f"{task}: {error}") from None
    if not np.isfinite([env.action_space.low, env.action_space.high]).all():
        raise Refused(f"{task}: a random policy needs actions with bounds, not {env.action_space}")
    env.action_space.seed(seed)
    returns = np.zeros(episodes)
    for episode, start in enumerate(np.random.SeedSequence(seed).generate_state(episodes).tolist()):
        env.reset(seed=start)
        for _ in range(LONGEST_EPISODE):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns[episode] += reward
            if terminated or truncated:
                break
        else:
            raise Refused(f"{task}: an episode of the random policy did not end after {LONGEST_EPISODE:,} steps")
    env.close()
    mean = float(returns.mean())
    if not math.isfinite(mean):
        raise Refused(f"{task}: the return of the random policy is {mean}")
    return mean
