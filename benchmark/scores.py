"""Scores that can be averaged over tasks: 0 is a random policy, 1 our PPO without lag after as many steps.

Both ends are measured and stand in reference_scores.csv, keyed by task and steps. So no algorithm of a comparison
changes the score of another.
"""

import csv
from pathlib import Path

import numpy as np

from benchmark.runs import Refused

PATH = Path(__file__).resolve().parent / "reference_scores.csv"
TOLERANCE = 0.01  # runs are rounded down to whole batches, so that their last steps differ a little


def read_references(path=None):
    """[{"task", "steps", "random", "ppo"}], empty without a file. `steps` is the last step of the runs of PPO."""
    path = path or PATH
    if not path.exists():
        return []
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        numbers = [{key: float(row[key]) for key in ("random", "ppo")} for row in rows]
        return [{"task": r["task"], "steps": int(r["final_step"]), **n} for r, n in zip(rows, numbers, strict=True)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error!r}") from None


def reference(references, task, steps):
    """(random, PPO) of the task at that many steps; None if they were not measured or do not differ upwards."""
    if steps is None:
        return None
    rows = [row for row in references if row["task"] == task and row["ppo"] > row["random"]]
    row = min(rows, key=lambda row: abs(row["steps"] - steps), default=None)
    return (row["random"], row["ppo"]) if row and same_steps(row["steps"], steps) else None


def same_steps(a, b):
    """Whether two last steps count as one."""
    return abs(a - b) <= TOLERANCE * max(a, b)


def half_way(references, task, steps):
    """The return half way from random to PPO, None without a reference."""
    ends = reference(references, task, steps)
    return None if ends is None else sum(ends) / 2


def add_scores(rows, references):
    """Sets row["score"] of each row: (return - random) / (PPO - random), None without a return or a reference."""
    for row in rows:
        ends = reference(references, row["task"], row["final_step"])
        known = ends is not None and row["eval_return"] is not None
        row["score"] = (row["eval_return"] - ends[0]) / (ends[1] - ends[0]) if known else None


def scored_tasks(rows):
    """The tasks over which scores are averaged: those of the first algorithm that has any, so that one which is added
    behind it changes nothing. A task of which it has no run that ended counts if another algorithm has a score there.
    """
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        found = []
        for task in dict.fromkeys(row["task"] for row in rows if row["algorithm"] == algorithm):
            ended = [row for row in rows if row["task"] == task and row["eval_return"] is not None]
            own = [row for row in ended if row["algorithm"] == algorithm] or ended
            if own and all(row["score"] is not None for row in own):
                found.append(task)
        if found:
            return tuple(found)
    return ()


def score_matrix(rows, algorithm, lag, tasks, key="score"):
    """((seeds, tasks) array, seeds) of the seeds that one algorithm has finished in every one of the tasks."""
    values = {
        (r["task"], r["seed"]): r[key]
        for r in rows
        if (r["algorithm"], r["lag"]) == (algorithm, lag) and r[key] is not None
    }
    seeds = sorted({seed for _, seed in values})
    seeds = [seed for seed in seeds if all((task, seed) in values for task in tasks)]
    return np.array([[values[task, seed] for task in tasks] for seed in seeds]).reshape(len(seeds), len(tasks)), seeds
