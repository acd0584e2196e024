"""One run of a suite: its command, its folder, and what the folder says about it.

DIR/suite.json                                   the suite this folder holds
DIR/<task>/<algorithm>/lag<L>/seed<S>/           written by the script (config.json, evals.csv, result.json, ...)
DIR/<task>/<algorithm>/lag<L>/seed<S>.log        its stdout and stderr
DIR/<task>/<algorithm>/lag<L>/seed<S>.lock       held by whoever runs it
Characters of a task or algorithm name other than letters, digits, "_", "." and "-" become "-" in the path.
"""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmark.suites import Suite

ROOT = Path(__file__).resolve().parent.parent  # the scripts lie beside the package


class Refused(Exception):
    """What was asked for cannot be done; the message says why in one line (exit code 2)."""


@dataclass(frozen=True)
class Run:
    task: str
    algorithm: str
    script: str
    lag: int
    seed: int
    flags: dict
    """all flags but --run-dir, in the order of the command"""
    folder: Path

    @property
    def name(self):
        return f"{self.algorithm}, {self.task}, lag {self.lag}, seed {self.seed}"

    @property
    def log(self):
        return self.folder.with_name(self.folder.name + ".log")

    @property
    def lock(self):
        return self.folder.with_name(self.folder.name + ".lock")

    @property
    def command(self):
        return [sys.executable, str(ROOT / self.script), *flag_list(self.flags), "--run-dir", str(self.folder)]


def flag_list(flags):
    """{"num-envs": 16, "anneal-lr": False} -> ["--num-envs", "16", "--no-anneal-lr"]"""
    words = []
    for flag, value in flags.items():
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def expand(suite, out):
    """All runs of a suite. Seeds outermost and algorithms innermost, so that a partial result is already paired."""
    refuse_mixed_versions(suite.tasks)
    runs = []
    for seed in suite.seeds:
        for task in suite.tasks:
            for lag in suite.lags:
                for algorithm, (script, extra) in suite.algorithms.items():
                    folder = run_folder(out, task, algorithm, lag, seed)
                    flags = {suite.task_flag: task, "lag": lag, "seed": seed} | suite.settings | extra
                    runs.append(Run(task, algorithm, script, lag, seed, flags, folder))
    folders = Counter(str(run.folder).lower() for run in runs)  # lower: some file systems ignore case
    for run in runs:
        if folders[str(run.folder).lower()] > 1:
            raise Refused(f"the suite has two runs for one folder: {run.name}")
    return runs


def run_folder(out, task, algorithm, lag, seed):
    return Path(out).resolve() / slug(task) / slug(algorithm) / f"lag{int(lag)}" / f"seed{int(seed)}"


def slug(name):
    """A name as a folder. Raises Refused for one that would lead elsewhere, or be hidden."""
    folder = re.sub(r"[^\w.-]+", "-", name)
    if not folder.strip("-") or folder.startswith(".") or len(folder) > 100:
        raise Refused(f"the name {name!r} cannot be a folder: use letters and digits, 100 at most, no dot in front")
    return folder


def refuse_mixed_versions(tasks):
    """Returns of two versions of an environment do not compare."""
    versions = {}
    for task in tasks:
        name, _, version = task.rpartition(":")[2].rpartition("-v")  # "module:Id-v5" is Id-v5 as well
        if name and version.isdigit() and versions.setdefault(name, task) != task:
            raise Refused(f"{versions[name]} and {task} are two versions of one environment: choose one")


def status(run):
    """ "missing", "unfinished", "failed" or "finished". A finished run which is not the one asked for is refused."""
    if not run.folder.exists():
        return "missing"
    if not (run.folder / "result.json").exists():  # the script writes it last
        return "unfinished"
    try:
        result = read_json(run.folder / "result.json")
    except Refused:  # damaged: such a run is repeated like one that failed
        return "failed"
    if result.get("status") != "finished":
        return "failed"
    args = read_json(run.folder / "config.json").get("args") or {}
    if other := differences(run, args):
        raise Refused(f"{run.folder} holds another configuration ({'; '.join(other)}): move it or choose another --out")
    try:
        last_step = final_step(args)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        raise Refused(f"{run.folder}/config.json does not say how many steps the run has: move it") from None
    if result.get("global_step") != last_step or result.get("seed") != run.seed:
        found = f"seed {result.get('seed')}, step {result.get('global_step')}"
        raise Refused(f"{run.folder} says finished with {found}, not seed {run.seed}, step {last_step}: move it")
    return "finished"


def differences(run, args):
    """What the args of a config.json say otherwise than the flags of a run, as texts."""
    asked = {flag.replace("-", "_"): value for flag, value in run.flags.items()}
    return [f"{key} {args.get(key)}, not {value}" for key, value in asked.items() if args.get(key) != value]


def final_step(args):
    """The last global_step of a finished run: environment steps in whole batches, or updates of a language model."""
    if "num_updates" in args:
        return args["num_updates"]
    batch_size = args["num_envs"] * args["num_steps"]
    return args["total_timesteps"] // batch_size * batch_size


def read_json(path):
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise Refused(f"{path} does not hold a JSON object")
    return content


def agree(out, name, suite):
    """The suite that a folder is to hold; raises Refused where it holds another: one folder never mixes two.

    The suite asked for may be a part of the one the folder holds, or that one a part of it: the wider is returned. One
    of which no run was begun does not count.
    """
    refuse_foreign(out)
    if not (out / "suite.json").exists():
        return suite
    held_name, held = recall_suite(out)
    if not any(run.folder.exists() for run in expand(held, out)):
        return suite
    if held_name != name:
        raise Refused(f"{out} holds the suite {held_name}: choose another --out")
    same = (held.settings, held.task_flag) == (suite.settings, suite.task_flag)
    if not same or any(held.algorithms.get(key, value) != value for key, value in suite.algorithms.items()):
        raise Refused(f"{out} holds {name} with other settings: choose another --out")
    if contains(held, suite):
        return held
    if contains(suite, held):
        return suite
    raise Refused(f"{out} holds runs of {name} that are left out here: ask for these as well, or choose another --out")


def remember_suite(out, name, suite):
    """Write into DIR/suite.json what the folder holds from now on."""
    if agree(out, name, suite) is suite:
        replace_file(out / "suite.json", json.dumps({"name": name, **asdict(suite)}, indent=1) + "\n")


def contains(wide, part):
    """Whether every run of the suite `part` is one of `wide`, settings aside."""
    if not part.algorithms.items() <= wide.algorithms.items():
        return False
    return all(set(getattr(part, key)) <= set(getattr(wide, key)) for key in ("tasks", "lags", "seeds"))


def replace_file(path, content):
    """The file (text or bytes) appears whole or not at all: a full disk leaves the old one as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes may write a report at once
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_foreign(out):
    """Raises Refused for a folder with something in it that is not a suite's."""
    if out.exists() and not (out / "suite.json").exists():
        begun = re.compile(r"\.lock|\.suite\.json\.\d+\.partial")  # what a runner leaves that was killed as it began
        if not all(begun.fullmatch(entry.name) for entry in out.iterdir()):
            raise Refused(f"{out} is not empty and holds no suite.json: choose another --out")


def recall_suite(out):
    """The (name, Suite) that a folder holds: a report needs no entry in SUITES, which may have changed since."""
    if not (out / "suite.json").exists():
        raise Refused(f"{out} holds no suite.json: no suite was run there")
    content = read_json(out / "suite.json")
    try:
        name, suite = content.pop("name"), Suite(**content)
        algorithms = {key: (script, dict(flags)) for key, (script, flags) in suite.algorithms.items()}
        parts = {key: tuple(getattr(suite, key)) for key in ("tasks", "lags", "seeds")}
        suite = replace(suite, algorithms=algorithms, pairs=tuple(map(tuple, suite.pairs)), **parts)
        if not expand(suite, out):
            raise ValueError("no runs")
        return name, suite
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{out}/suite.json is not a suite: {error!r}") from None
