"""One run of a suite: its command, its folder, and what the folder says about it.

DIR/suite.json                                   the suite this folder holds
DIR/<task>/<algorithm>/lag<L>/seed<S>/           written by the script (config.json, evals.csv, result.json, ...)
DIR/<task>/<algorithm>/lag<L>/seed<S>.log        its stdout and stderr
Characters of a task or algorithm name other than letters, digits, "_", "." and "-" become "-" in the path.
"""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass
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
    runs = []
    for seed in suite.seeds:
        for task in suite.tasks:
            for lag in suite.lags:
                for algorithm, (script, extra) in suite.algorithms.items():
                    folder = Path(out).resolve() / slug(task) / slug(algorithm) / f"lag{lag}" / f"seed{seed}"
                    flags = {suite.task_flag: task, "lag": lag, "seed": seed} | suite.settings | extra
                    runs.append(Run(task, algorithm, script, lag, seed, flags, folder))
    folders = [str(run.folder).lower() for run in runs]  # lower: some file systems ignore case
    for run, folder in zip(runs, folders, strict=True):
        if folders.count(folder) > 1:
            raise Refused(f"the suite has two runs for one folder: {run.name}")
    return runs


def slug(name):
    return re.sub(r"[^\w.-]+", "-", name)


def status(run):
    """ "missing", "unfinished", "failed" or "finished". A finished run which is not the one asked for is refused."""
    if not run.folder.exists():
        return "missing"
    if not (run.folder / "result.json").exists():  # the script writes it last
        return "unfinished"
    result = read_json(run.folder / "result.json")
    if result.get("status") != "finished":
        return "failed"
    args = read_json(run.folder / "config.json").get("args") or {}
    asked = {flag.replace("-", "_"): value for flag, value in run.flags.items()}
    other = [f"{key} {args.get(key)}, not {value}" for key, value in asked.items() if args.get(key) != value]
    if other:
        raise Refused(f"{run.folder} holds another configuration ({'; '.join(other)}): move it or choose another --out")
    try:
        last_step = final_step(args)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        raise Refused(f"{run.folder}/config.json does not say how many steps the run has: move it") from None
    if result.get("global_step") != last_step or result.get("seed") != run.seed:
        found = f"seed {result.get('seed')}, step {result.get('global_step')}"
        raise Refused(f"{run.folder} says finished with {found}, not seed {run.seed}, step {last_step}: move it")
    return "finished"


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


def remember_suite(out, name, suite):
    """Write DIR/suite.json, or compare with it: one folder never mixes two suites."""
    refuse_foreign(out)
    path = out / "suite.json"
    asked = json.loads(json.dumps({"name": name, **asdict(suite)}))  # as JSON gives it back: tuples are lists
    if path.exists():
        held = read_json(path)
        if {**held, "description": ""} != {**asked, "description": ""}:
            other = f"the suite {held.get('name')}" if held.get("name") != name else f"{name} with other settings"
            raise Refused(f"{out} holds {other}: choose another --out")
        return
    temporary = out / ".suite.json"
    temporary.write_text(json.dumps(asked, indent=1) + "\n")
    os.replace(temporary, path)


def refuse_foreign(out):
    """Raises Refused for a folder with something in it that is not a suite's."""
    if out.exists() and not (out / "suite.json").exists() and any(entry.name != ".lock" for entry in out.iterdir()):
        raise Refused(f"{out} is not empty and holds no suite.json: choose another --out")


def recall_suite(out):
    """The (name, Suite) that a folder holds: a report needs no entry in SUITES, which may have changed since."""
    if not (out / "suite.json").exists():
        raise Refused(f"{out} holds no suite.json: no suite was run there")
    content = read_json(out / "suite.json")
    try:
        name, suite = content.pop("name"), Suite(**content)
        if not expand(suite, out):
            raise ValueError("no runs")
        return name, suite
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{out}/suite.json is not a suite: {error!r}") from None
