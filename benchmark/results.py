"""results.csv: one row per run, the only input of the statistics, from whatever code.

Read are the columns task, algorithm, seed and eval_return, and where there are such lag (else 0), status (else
"finished") and the rest of COLUMNS. Curves come from evals.csv in the folder of the run, if there is one: runs.py
says where. The rows of a folder with a suite.json are those of its runs, and its results.csv is written anew from them.
"""

import csv
import io
import itertools
import json
import math
import re
import shlex
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
LARGEST = 1e30  # whose square is still a number
STATES = ("finished", "failed", "unfinished", "missing")


def load(out):
    """(name, Suite, rows) of a folder: of its suite's runs, or of its results.csv."""
    if (out / "suite.json").exists():
        name, suite = recall_suite(out)
        references = read_references()
        return name, suite, [read_run(name, run, references) for run in expand(suite, out)]
    if not (out / "results.csv").exists():
        raise Refused(f"{out} holds no suite.json and no results.csv: no suite was run there")
    return suite_of(read_results(out))


def write_results(out, rows):
    """Write the rows of a suite's runs into DIR/results.csv. Raises Refused where that has results of other runs."""
    path = out / "results.csv"
    finished = {key_of(row) for row in rows if row["status"] == "finished"}
    for row in read_results(out) if path.exists() else ():
        if row["status"] == "finished" and key_of(row) not in finished:
            text = f"{path} has a result of {spell_key(row)}, but the folder has no such run"
            raise Refused(f"{text}: move the file elsewhere, else it would be lost")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue())


def key_of(row):
    return row["task"], row["algorithm"], row["lag"], row["seed"]


def spell_key(row):
    return f"{row['algorithm']}, {row['task']}, lag {row['lag']}, seed {row['seed']}"


def read_run(suite_name, run, references):
    """A run as a row: a dict of COLUMNS and its "folder". None where there is nothing, or no finite number."""
    try:
        return parse_run(suite_name, run, references)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, csv.Error) as error:
        raise Refused(f"{run.folder} cannot be read: {error!r}") from None


def parse_run(suite_name, run, references):
    row = dict.fromkeys(COLUMNS) | {"suite": suite_name, "status": status(run), "folder": run.folder}
    row |= {key: getattr(run, key) for key in ("task", "algorithm", "script", "lag", "seed")}
    row["command"] = shlex.join(["python", run.script, *flag_list(run.flags)])
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
    return value if isinstance(value, int | float) and abs(value) <= LARGEST else None


def describe(value):
    """A value of config.json as one line: the machine may be a dict, a commit null."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "unknown" if value is None else value if isinstance(value, str) else json.dumps(value)


def read_evals(path):
    """{step: score}, the first two columns; NaN where the file has no number; empty without evaluations."""
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        header, *lines = list(csv.reader(file, strict=True)) or [[]]
    if header and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", header[0].strip().lower()):
        raise ValueError(f"{path.name} begins with a number: give it a header")
    points = [(int(float(step)), float(score or "nan")) for step, score, *_ in lines]
    if any(a >= b for (a, _), (b, _) in itertools.pairwise(points)):
        raise ValueError(f"the steps of {path.name} do not increase")
    return dict(points)


def read_results(out):
    """The rows of DIR/results.csv: numbers as numbers, None where there is none, and the "folder" of each run."""
    path = out / "results.csv"
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # with or without a byte order mark
            header, *lines = list(csv.reader(file, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    header = [name.strip() for name in header]
    if wrong := [key for key in COLUMNS if header.count(key) > 1 or (key in REQUIRED and key not in header)]:
        found = f"its columns, separated by commas, are {', '.join(header)}" if any(header) else "it is empty"
        raise Refused(f"{path} needs each of the columns {', '.join(REQUIRED)} once, here not {wrong[0]}: {found}")
    rows, seen, folders = [], set(), {}
    for number, cells in enumerate(lines, start=2):
        if not any(cells):
            continue
        try:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells under a header of {len(header)}")
            row = parse_row({key: cell.strip() for key, cell in zip(header, cells, strict=True) if key in COLUMNS})
            row["folder"] = run_folder(out, *key_of(row))
            if key_of(row) in seen:
                raise ValueError(f"{spell_key(row)} is there twice")
            other = folders.setdefault(row["folder"], row)
            if other is not row:
                raise ValueError(f"{spell_key(row)} has the same folder as {spell_key(other)}: choose other names")
        except (ValueError, Refused) as error:
            raise Refused(f"{path}, line {number}: {error}") from None
        seen.add(key_of(row))
        rows.append(row)
    if not rows:
        raise Refused(f"{path} has no rows")
    refuse_mixed_versions({row["task"]: None for row in rows})
    return rows


def parse_row(cells):
    """{column: text} -> a row without its folder. Raises ValueError, with what to change."""
    for key in ("task", "algorithm"):
        if not cells[key].isprintable():
            raise ValueError(f"{key} {cells[key]!r} has a line break or the like")
    row = dict.fromkeys(COLUMNS) | {key: cell or None for key, cell in cells.items()}
    row |= {"task": cells["task"], "algorithm": cells["algorithm"]}  # an empty name is refused as a folder
    row["seed"], row["lag"] = whole_number("seed", cells["seed"]), whole_number("lag", cells.get("lag") or "0")
    row["status"] = (cells.get("status") or "finished").lower()
    if row["status"] not in STATES:
        raise ValueError(f"status {cells['status']}: give one of {', '.join(STATES)}")
    for key in NUMBERS:
        try:
            number = float((cells.get(key) or "nan").replace("_", "?"))  # Python reads 5_0 as 50
        except ValueError:
            raise ValueError(f"{key} {cells[key]}: give a number, with a decimal point") from None
        if LARGEST < abs(number) < math.inf:
            raise ValueError(f"{key} {cells[key]}: it is too large")
        row[key] = finite(number) if row["status"] == "finished" else None  # nothing else is ever averaged in
    return row


def whole_number(key, text):
    if not (match := re.fullmatch(r"(\d{1,18})(\.0*)?", text)):
        raise ValueError(f"{key} {text}: give a whole number from 0")
    return int(match[1])


def suite_of(rows):
    """(name, Suite, rows) as far as rows alone tell. A known name lends how its scores are called."""
    names = list(dict.fromkeys(row["suite"] for row in rows if row["suite"])) or ["results"]
    known = SUITES.get(names[0]) if len(names) == 1 else None
    values = [abs(row["eval_return"]) for row in rows if row["eval_return"] is not None]
    suite = Suite(
        description="results read from results.csv",
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
        pairs = [pair for pair in known.comparisons if set(pair) <= suite.algorithms.keys()]
        new = [name for name in suite.algorithms if name not in known.algorithms]  # compared with each of the others
        pairs += [(x, y) for x in new for y in suite.algorithms if y not in new]
        words = {key: getattr(known, key) for key in ("step_name", "score_name", "decimals")}
        words |= {} if new else {"description": known.description}
        suite = replace(suite, pairs=tuple(pairs), **words)
    return " and ".join(names), suite, rows
