"""results.csv: one row per run, the only input of the statistics, from whatever code.

Read are the columns task, algorithm, seed and eval_return, and where there are such lag (else 0), status (else
"finished") and the rest of COLUMNS. Curves come from evals.csv and metrics.csv in the folder of the run, where they
are: runs.py says where. The rows of a folder with a suite.json are those of its runs; results.csv is written from them.

A row is a dict of COLUMNS and "folder", "score" (0 a random policy, 1 PPO without lag after as many steps), "curve"
({step: score}) and "metrics" ({column: {step: value}}); None where there is nothing, or no finite number.
"""

import csv
import itertools
import math
import shlex
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmark import runs
from benchmark.suites import SUITES, Refused, Suite

PACKAGES = ("python", "torch", "gymnasium", "mujoco", "numpy")
NUMBERS = ("train_return", "eval_return", "eval_std", "area_under_curve", "steps_to_half", "sps", "peak_rss_mb")
COLUMNS = ("suite", "task", "algorithm", "script", "lag", "seed", "final_step", "status", *NUMBERS)
COLUMNS += ("commit", *PACKAGES, "machine", "command")
STATES = ("finished", "failed", "unfinished", "missing")
FILTER = {"lag/tv_forward_mean": "forward TV", "lag/filtered_fraction": "filtered share"}  # of metrics.csv, drawn
PATH = Path(__file__).resolve().parent / "reference_scores.csv"
TOLERANCE = 0.01  # runs are rounded down to whole batches, so that their last steps differ a little


def load(out):
    """(name, Suite, rows) of a folder: of its suite's runs, or of its results.csv."""
    if (out / "suite.json").exists():
        name, suite = runs.recall_suite(out)
        rows = [read_run(name, run) for run in runs.expand(suite, out)]
    else:
        name, suite = suite_of(rows := read_results(out))
    add_scores(rows)
    return name, suite, rows


def key_of(row):
    return row["task"], row["algorithm"], row["lag"], row["seed"]


def spell_key(row):
    return f"{row['algorithm']}, {row['task']}, lag {row['lag']}, seed {row['seed']}"


def read_run(suite_name, run):
    row = dict.fromkeys((*COLUMNS, "curve")) | {"suite": suite_name, "status": runs.status(run), "metrics": {}}
    row |= {key: getattr(run, key) for key in ("task", "algorithm", "script", "lag", "seed", "folder")}
    row["command"] = shlex.join(["python", run.script, *runs.flag_list(run.flags)])
    if row["status"] != "finished":
        return row
    evals, metrics = read_curves(row)
    steps = next(iter(metrics.values()))
    row |= {"final_step": int(steps[-1]), "sps": finite(metrics.get("charts/SPS", [math.nan])[-1])}
    if row["curve"]:
        row |= {key: finite(x[-1]) for key, x in zip(("eval_return", "eval_std"), [*evals.values()][1:], strict=False)}
    trained = read_table(run.folder / "episodes.csv") or metrics  # a language model has no episodes
    rewards = trained.get("episodic_return") or trained.get("charts/reward") or []
    late = [x for step, x in zip(next(iter(trained.values())), rewards, strict=False) if step > 0.9 * steps[-1]]
    row["train_return"] = finite(float(np.mean(late))) if late else None
    x, y = list(row["curve"] or ()), list((row["curve"] or {}).values())
    if len(x) > 1 and np.isfinite(y).all():
        row["area_under_curve"] = float(np.trapezoid(y, x) / (x[-1] - x[0]))  # the mean height
    record = runs.read_record(run)
    starts = record.get("starts", [])  # more than one if it was resumed
    row |= {key: chain(start.get("versions", {}).get(key) for start in starts) for key in PACKAGES}
    row |= {key: chain(start.get(key) for start in starts) for key in ("commit", "machine")}
    return row | {"peak_rss_mb": record.get("peak_rss_mb")}


def read_curves(row):
    """Set "curve" and "metrics" of a row from the files in its folder, where these are. Returns the tables."""
    evals, metrics = (read_table(row["folder"] / f"{name}.csv") for name in ("evals", "metrics"))
    steps, *scores = evals.values() or [()]
    if steps and scores:
        row["curve"] = {x: y if math.isfinite(y) else math.nan for x, y in zip(steps, scores[0], strict=True)}
    for name in FILTER:
        if metrics.get(name):
            row["metrics"][name] = dict(zip(next(iter(metrics.values())), metrics[name], strict=True))
    return evals, metrics


def read_table(path):
    """{column: [number]} of a CSV file whose first column holds increasing steps; NaN where a cell is empty; {} without
    the file"""
    if not path.exists():
        return {}
    try:
        header, *lines = csv.reader(path.read_text().splitlines(), strict=True)
        columns = zip(*lines, strict=True) if lines else [()] * len(header)
        found = {name: [float(x or "nan") for x in column] for name, column in zip(header, columns, strict=True)}
    except (OSError, ValueError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    if not all(a <= b for a, b in itertools.pairwise(next(iter(found.values())))):
        raise Refused(f"{path} cannot be read: its first column holds no increasing steps")
    return found


def chain(values):
    """The value if all are the same, else "a, then b"; None where none is known."""
    found = list(dict.fromkeys(values))
    return ", then ".join(value or "unknown" for value in found) if any(found) else None


def finite(value):  # and with a square that is finite
    return value if abs(value) <= 1e30 else None


def read_results(out):
    """The rows of DIR/results.csv. Raises Refused, with the line that is wrong."""
    path, rows = out / "results.csv", {}
    lines = csv.DictReader(path.read_text().splitlines(), strict=True)
    try:
        for cells in lines:
            row = parse_row(cells)
            row["folder"] = runs.run_folder(out, *key_of(row))
            if rows.setdefault(key_of(row), row) is not row:
                raise ValueError(f"{spell_key(row)} is there twice")
            read_curves(row)
    except KeyError as error:
        raise Refused(f"{path} has no column {error}") from None
    except (AttributeError, TypeError, ValueError, csv.Error) as error:
        raise Refused(f"{path}, line {lines.line_num}: {error}") from None
    if not rows:
        raise Refused(f"{path} has no rows")
    return list(rows.values())


def parse_row(cells):
    """{column: text} -> a row without its folder. Raises KeyError, ValueError or the like for what is none."""
    if None in cells or None in cells.values():
        raise ValueError("not as many cells as the header has")
    row = dict.fromkeys((*COLUMNS, "curve")) | {key: text or None for key, text in cells.items() if key in COLUMNS}
    row |= {key: finite(float(row[key])) for key in (*NUMBERS, "final_step") if row[key]}
    row |= {"task": cells["task"], "algorithm": cells["algorithm"], "seed": int(cells["seed"]), "metrics": {}}
    row |= {"lag": int(row["lag"] or 0), "status": row["status"] or "finished"}
    if row["status"] not in STATES or min(row["seed"], row["lag"]) < 0:
        raise ValueError(f"status must be one of {', '.join(STATES)}, seed and lag 0 or more")
    if row["status"] != "finished" or not cells["eval_return"]:
        row["eval_return"] = None  # never averaged in
    return row


def suite_of(rows):
    """(name, Suite) as far as rows alone tell. A known name lends how its scores are called."""
    names = list(dict.fromkeys(row["suite"] for row in rows if row["suite"])) or ["results"]
    parts = {key: dict.fromkeys(row[key] for row in rows) for key in ("task", "lag", "seed")}
    algorithms = {row["algorithm"]: (row["script"] or "", {}) for row in rows}
    text, lags, seeds = "results read from results.csv", tuple(sorted(parts["lag"])), tuple(sorted(parts["seed"]))
    suite = Suite(text, algorithms, tuple(parts["task"]), lags, seeds, {}, step_name="steps", score_name="score")
    if len(names) == 1 and (known := SUITES.get(names[0])):
        pairs = [pair for pair in known.comparisons if set(pair) <= algorithms.keys()]
        new = [name for name in algorithms if name not in known.algorithms]  # compared with each of the others
        pairs += [(x, y) for x in new for y in algorithms if y not in new]
        words = {key: getattr(known, key) for key in ("step_name", "score_name", "decimals")}
        suite = replace(suite, pairs=tuple(pairs), **words, description=text if new else known.description)
    return " and ".join(names), suite


def add_scores(rows):
    """Set "score" of each row, and "steps_to_half" of each that has a curve, by reference_scores.csv."""
    lines, keys = csv.DictReader(PATH.read_text().splitlines()), ("final_step", "random", "ppo")
    ends = [(line["task"], *(float(line[key]) for key in keys)) for line in lines]
    for row in rows:
        row["score"] = None
        for task, steps, random, ppo in ends:
            if task == row["task"] and row["eval_return"] is not None and same_steps(steps, row["final_step"]):
                row["score"] = (row["eval_return"] - random) / (ppo - random)
                if row["curve"]:
                    reached = (step for step, x in row["curve"].items() if x >= (random + ppo) / 2)
                    row["steps_to_half"] = next(reached, None)


def same_steps(a, b):
    """Whether two last steps count as one."""
    return a is not None and b is not None and abs(a - b) <= TOLERANCE * max(a, b)


def by_cell(suite, rows, key):
    """{(task, lag, algorithm): values (seeds,)} of the finished rows, NaN where a seed has none; cells without any
    are left out"""
    cells = defaultdict(lambda: np.full(len(suite.seeds), np.nan))
    for row in rows:
        if row["status"] == "finished" and row[key] is not None:
            cells[row["task"], row["lag"], row["algorithm"]][suite.seeds.index(row["seed"])] = row[key]
    return dict(cells)


def aligned(suite, rows, lag):
    """What is compared over tasks at one lag: (tasks, {algorithm: scores (seeds, tasks)}, [what is left out]).

    Of each task, the seeds of which every algorithm has a score, so that all are averaged over the same; NaN elsewhere.
    An algorithm without any score at this lag is not compared.
    """
    cells, columns = by_cell(suite, [row for row in rows if row["lag"] == lag], "score"), {}
    found = [a for a in suite.algorithms if any(a == algorithm for _, _, algorithm in cells)]
    notes = [f"{a}: no run has a score" for a in suite.algorithms if a not in found]
    for task in suite.tasks if found else ():
        scores = np.stack([cells.get((task, lag, a), np.full(len(suite.seeds), np.nan)) for a in found])
        asked = [row["seed"] for row in rows if (row["task"], row["lag"]) == (task, lag)]
        complete = np.isfinite(scores).all(axis=0)
        lost = np.isin(suite.seeds, asked) & ~complete
        if lost.any():
            lacking = ", ".join(a for a, x in zip(found, scores, strict=True) if np.isnan(x[lost]).any())
            notes.append(f"{task}, seed {', '.join(map(str, np.array(suite.seeds)[lost]))}: no score of {lacking}")
        if complete.any():
            columns[task] = np.where(complete, scores, np.nan)
    matrices = np.stack([*columns.values()], axis=-1) if columns else ()
    return tuple(columns), dict(zip(found, matrices, strict=False)), notes
