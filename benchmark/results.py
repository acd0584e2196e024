"""results.csv: one row per run, the only input of the statistics, from whatever code.

Read are the columns task, algorithm, seed and eval_return, and where there are such lag (else 0), status (else
"finished") and the rest of COLUMNS. Curves come from evals.csv in the folder of the run, if there is one: runs.py
says where. A folder with a suite.json has its results.csv written anew from its runs.
"""

import csv
import io
import itertools
import json
import math
from dataclasses import replace

import numpy as np

from benchmark.runs import (
    Refused,
    expand,
    final_step,
    flag_list,
    read_json,
    recall_suite,
    refuse_mixed_versions,
    replace_file,
    run_folder,
    status,
)
from benchmark.scores import half_way, read_references
from benchmark.stats import area_under_curve, steps_to_threshold
from benchmark.suites import SUITES, Suite

PACKAGES = ("python", "torch", "gymnasium", "mujoco", "numpy")
COLUMNS = ("suite", "task", "algorithm", "script", "lag", "seed", "final_step", "status", "train_return")
COLUMNS += ("eval_return", "eval_std", "area_under_curve", "steps_to_half", "sps", "commit", *PACKAGES)
COLUMNS += ("machine", "command")
REQUIRED = ("task", "algorithm", "seed", "eval_return")
NUMBERS = ("train_return", "eval_return", "eval_std", "area_under_curve", "steps_to_half", "sps", "final_step")


def load(out):
    """(name, Suite, rows) of a folder; its results.csv is brought up to date first where it holds a suite."""
    if not (out / "suite.json").exists():
        if not (out / "results.csv").exists():
            raise Refused(f"{out} holds no suite.json and no results.csv: no suite was run there")
        rows = read_results(out)
        return suite_of(rows)
    name, suite = recall_suite(out)
    references = read_references()
    rows = [read_run(name, run, references) for run in expand(suite, out)]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(out / "results.csv", text.getvalue())
    return name, suite, read_results(out)


def read_run(suite_name, run, references):
    """A run as a row: a dict of COLUMNS. None where there is nothing, or no finite number."""
    try:
        return parse_run(suite_name, run, references)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, csv.Error) as error:
        raise Refused(f"{run.folder} cannot be read: {error!r}") from None


def parse_run(suite_name, run, references):
    row = dict.fromkeys(COLUMNS) | {"suite": suite_name, "status": status(run)}
    row |= {key: getattr(run, key) for key in ("task", "algorithm", "script", "lag", "seed")}
    row["command"] = " ".join(["python", run.script, *flag_list(run.flags)])
    if row["status"] != "finished":
        return row
    config, result = read_json(run.folder / "config.json"), read_json(run.folder / "result.json")
    row |= {key: finite(result.get(key)) for key in ("train_return", "eval_return", "eval_std", "sps")}
    parts = [config, *config.get("resumed", [])]  # a resumed run tells where each of its parts was made
    row |= {"commit": chain(part.get("commit") for part in parts)}
    row |= {"machine": chain(describe(part.get("machine")) for part in parts)}
    row |= {key: chain(part.get("versions", {}).get(key) for part in parts) for key in PACKAGES}
    row["final_step"] = final_step(config["args"])
    evals = read_evals(run.folder / "evals.csv")
    steps, returns = list(evals), list(evals.values())
    if len(steps) > 1 and np.isfinite(returns).all():
        row["area_under_curve"] = area_under_curve(steps, returns)
        half = half_way(references, run.task, row["final_step"])
        row["steps_to_half"] = None if half is None else steps_to_threshold(steps, returns, half)
    return row


def chain(values):
    """The value if all are the same, else "a, then b"; None where it is not known."""
    found = list(dict.fromkeys(values))
    return found[0] if len(found) == 1 else ", then ".join(value or "unknown" for value in found)


def finite(value):
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def describe(value):
    """A value of config.json as one line: the machine may be a dict, a commit null."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "unknown" if value is None else value if isinstance(value, str) else json.dumps(value)


def read_evals(path):
    """{step: score}, the first two columns; NaN where the file has no number; empty without evaluations."""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        points = [(int(float(step)), float(score or "nan")) for step, score, *_ in list(csv.reader(file))[1:]]
    if any(a >= b for (a, _), (b, _) in itertools.pairwise(points)):
        raise ValueError(f"the steps of {path.name} do not increase")
    return dict(points)


def read_results(out):
    """The rows of DIR/results.csv: numbers as numbers, None where there is none, and the "folder" of each run."""
    path = out / "results.csv"
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, restval=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    absent = [column for column in REQUIRED if not lines or column not in lines[0]]
    if absent:
        raise Refused(
            f"{path} has no {'rows' if not lines else 'column ' + absent[0]}; needed are {', '.join(REQUIRED)}"
        )
    rows, seen = [], set()
    for number, line in enumerate(lines, start=2):
        try:
            row = dict.fromkeys(COLUMNS) | {key: value or None for key, value in line.items() if key in COLUMNS}
            row |= {key: finite(float(line[key])) for key in NUMBERS if line.get(key)}
            row |= {"seed": int(line["seed"]), "lag": int(line.get("lag") or 0)}
            row |= {"status": line.get("status") or "finished", "task": line["task"], "algorithm": line["algorithm"]}
            row["folder"] = run_folder(out, row["task"], row["algorithm"], row["lag"], row["seed"])
        except (TypeError, ValueError) as error:
            raise Refused(f"{path}, line {number}: {error}") from None
        if row["status"] != "finished":  # what is not finished is never averaged in
            row |= dict.fromkeys(NUMBERS)
        key = (row["task"], row["algorithm"], row["lag"], row["seed"])
        if key in seen:
            task, algorithm, lag, seed = key
            raise Refused(f"{path}, line {number}: {algorithm}, {task}, lag {lag}, seed {seed} is there twice")
        seen.add(key)
        rows.append(row)
    refuse_mixed_versions({row["task"]: None for row in rows})
    return rows


def suite_of(rows):
    """(name, Suite, rows) as far as rows alone tell. A known name lends how its scores are called."""
    names = list(dict.fromkeys(row["suite"] for row in rows))
    known = SUITES.get(names[0]) if len(names) == 1 else None
    values = [abs(row["eval_return"]) for row in rows if row["eval_return"] is not None]
    suite = Suite(
        description=known.description if known else "results read from results.csv",
        algorithms={row["algorithm"]: (row["script"] or "", {}) for row in rows},
        tasks=tuple(dict.fromkeys(row["task"] for row in rows)),
        lags=tuple(sorted({row["lag"] for row in rows})),
        seeds=tuple(sorted({row["seed"] for row in rows})),
        settings={},
        step_name="steps",
        score_name="score",
        decimals=3 if max(values, default=2) <= 1 else 1,
    )
    if known:
        pairs = tuple(pair for pair in known.pairs if set(pair) <= suite.algorithms.keys())
        words = {key: getattr(known, key) for key in ("step_name", "score_name", "decimals")}
        suite = replace(suite, pairs=pairs, **words)
    return " and ".join(name or "results" for name in names), suite, rows
