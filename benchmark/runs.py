"""One run of a suite: its command, its folder, and its record.

DIR/suite.json                                   the suite this folder holds
DIR/<task>/<algorithm>/lag<L>/seed<S>/           written by the script (config.json, evals.csv, model.pt, ...)
DIR/<task>/<algorithm>/lag<L>/seed<S>.log        its stdout and stderr
DIR/<task>/<algorithm>/lag<L>/seed<S>.lock       held while it runs
DIR/<task>/<algorithm>/lag<L>/seed<S>.json       the record: status, exit code, peak memory, and of each start the
                                                 command, commit, versions, machine and time
"""

import csv
import io
import json
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from benchmark.suites import Refused, Suite

ROOT = Path(__file__).resolve().parent.parent  # the scripts lie beside the package
PARTS = ("tasks", "lags", "seeds")  # of a suite, which may grow


@dataclass(frozen=True)
class Run:
    task: str
    algorithm: str
    script: str
    lag: int
    seed: int
    flags: dict  # all but --run-dir, in the order of the command
    folder: Path

    @property
    def name(self):
        return f"{self.algorithm}, {self.task}, lag {self.lag}, seed {self.seed}"

    @property
    def command(self):
        return [sys.executable, str(ROOT / self.script), *flag_list(self.flags), "--run-dir", str(self.folder)]

    def beside(self, suffix):
        """seed<S>.log, seed<S>.lock or the record seed<S>.json"""
        return self.folder.with_name(self.folder.name + suffix)


def flag_list(flags):
    """{"num-envs": 16, "anneal-lr": False} -> ["--num-envs", "16", "--no-anneal-lr"]"""
    words = []
    for flag, value in flags.items():
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def expand(suite, out):
    """All runs of a suite. Seeds outermost and algorithms innermost, so that a partial result is already paired."""
    runs = []
    for seed, task, lag, algorithm in product(suite.seeds, suite.tasks, suite.lags, suite.algorithms):
        script, extra = suite.algorithms[algorithm]
        flags = {suite.task_flag: task, "lag": lag, "seed": seed} | suite.settings | extra
        runs.append(Run(task, algorithm, script, lag, seed, flags, run_folder(out, task, algorithm, lag, seed)))
    folders = Counter(str(run.folder).lower() for run in runs)  # lower: some file systems ignore case
    if twice := [run for run in runs if folders[str(run.folder).lower()] > 1]:
        raise Refused(f"the suite has two runs for one folder: {twice[0].name}")
    return runs


def run_folder(out, task, algorithm, lag, seed):
    return Path(out).resolve() / slug(task) / slug(algorithm) / f"lag{int(lag)}" / f"seed{int(seed)}"


def slug(name):
    """A name as a folder. Raises Refused for one that would lead elsewhere, or be hidden."""
    folder = re.sub(r"[^\w.-]+", "-", name)
    if not folder.strip("-") or folder.startswith(".") or len(folder) > 100:
        raise Refused(f"the name {name!r} cannot be a folder: use letters and digits, 100 at most, no dot in front")
    return folder


def status(run):
    """ "finished", "failed", "unfinished" or "missing". A finished run which is not the one asked for is refused."""
    if (run.folder / "model.pt").exists():  # the script writes it last
        args = read_json(run.folder / "config.json")["args"]
        if other := differences(run, args):
            raise Refused(f"{run.folder} holds another configuration ({'; '.join(other)}): move it")
        return "finished"
    if read_record(run).get("status") == "failed":
        return "failed"
    return "unfinished" if run.folder.exists() else "missing"


def differences(run, args):
    """What the args of a config.json say otherwise than the flags of a run, as texts."""
    asked = {flag.replace("-", "_"): value for flag, value in run.flags.items()}
    return [f"{key} {args.get(key)}, not {value}" for key, value in asked.items() if args.get(key) != value]


def read_record(run):
    return read_json(run.beside(".json")) if run.beside(".json").exists() else {}


def write_record(run, record):
    replace_file(run.beside(".json"), json.dumps(record, indent=1) + "\n")


def resumable(run):
    """Whether the folder holds a checkpoint of this very run."""
    with suppress(Refused, KeyError):
        same = not differences(run, read_json(run.folder / "config.json")["args"])
        return same and (run.folder / "checkpoint.pt").exists()
    return False


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None


def csv_text(columns, rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def replace_file(path, content):
    """The file (text or bytes) appears whole or not at all: a full disk leaves the old one as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes may write a report at once
    partial.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(partial, path)


def remember_suite(out, name, suite, write=True):
    """DIR/suite.json: what the folder holds, with the tasks, lags and seeds which it held before. Raises Refused where
    it holds something else, or the same with other settings."""
    if (out / "suite.json").exists():
        held_name, held = recall_suite(out)
        if held_name != name:
            raise Refused(f"{out} holds the suite {held_name}: choose another --out")
        if (held.algorithms, held.settings) != (suite.algorithms, suite.settings):
            raise Refused(f"{out} holds {name} with other settings: choose another --out")
        suite = widen(held, suite)
    elif out.exists() and any(not entry.name.startswith(".") for entry in out.iterdir()):
        raise Refused(f"{out} is not empty and holds no suite.json: choose another --out")
    if write:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "suite.json", json.dumps({"name": name, **asdict(suite)}, indent=1) + "\n")


def widen(suite, other):
    """The suite with the tasks, lags and seeds of another one as well."""
    tasks, lags, seeds = (dict.fromkeys(getattr(suite, key) + getattr(other, key)) for key in PARTS)
    return replace(suite, tasks=tuple(tasks), lags=tuple(sorted(lags)), seeds=tuple(sorted(seeds)))


def recall_suite(out):
    """The (name, Suite) that a folder holds: a report needs no entry in SUITES, which may have changed since."""
    if not (out / "suite.json").exists():
        raise Refused(f"{out} holds no suite.json: no suite was run there")
    content = read_json(out / "suite.json")
    name, suite = content.pop("name"), Suite(**content)
    algorithms = {key: (script, flags) for key, (script, flags) in suite.algorithms.items()}
    pairs, parts = tuple(map(tuple, suite.pairs)), {key: tuple(getattr(suite, key)) for key in PARTS}
    return name, replace(suite, algorithms=algorithms, pairs=pairs, **parts)
