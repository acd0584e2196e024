"""Command line: python -m benchmark COMMAND; each of list, run, status, report, compare, reference, speed has --help"""

import ast
import re
import shlex
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction
from tyro.extras import subcommand_cli_from_dict

from benchmark.references import write_references
from benchmark.report import compare, write_report
from benchmark.runner import check, run_suite, slurm_executor, state, typed
from benchmark.runs import ROOT, Refused, expand, recall_suite, remember_suite, widen
from benchmark.speed import Speed
from benchmark.suites import SUITES, short

Words = Annotated[tuple[tuple[str, ...], ...], UseAppendAction]  # of an option that may be there several times


def list_suites():
    """Show the suites. The commands of one: run SUITE --dry-run"""
    return "\n".join(f"{name:12}{len(expand(x, '.')):5} runs  {x.description}" for name, x in SUITES.items())


@dataclass
class Run:
    """Run what is missing of a suite, then report."""

    suite: Positional[str]  # a name that `list` shows
    out: Path | None = None  # folder of the runs and the report
    tasks: tuple[str, ...] = ()  # run these alone; new ones extend the suite
    algorithms: tuple[str, ...] = ()  # run these of the suite alone
    lags: tuple[str, ...] = ()  # run these alone, as 0,15; new ones extend the suite
    seeds: tuple[str, ...] = ()  # run these alone, as 1:5 or 1,2,7; new ones extend the suite
    set: Words = ()  # FLAG=VALUE of the scripts; FLAG=VALUE,VALUE makes an algorithm of each value
    workers: int | None = None  # runs at once; None: one per core
    dry_run: bool = False  # print every command, run nothing
    executor: Literal["local", "slurm"] = "local"  # where; on Slurm --workers is the number of tasks at once
    minutes: int = 720  # Slurm: time limit of a task
    memory: float = 4  # Slurm: GB of a task
    cpus: int = 1  # Slurm: of a task; a run has one thread
    slurm: Words = ()  # Slurm: KEY=VALUE flags of sbatch, such as partition=cpu

    def do(self):
        if self.suite not in SUITES:
            raise Refused(f"unknown suite {self.suite}: choose one of {', '.join(SUITES)}")
        suite = with_settings(SUITES[self.suite], sum(self.set, ()))
        if unknown := [name for name in self.algorithms if name not in suite.algorithms]:
            raise Refused(f"--algorithms: the suite has no {unknown[0]!r} but {', '.join(suite.algorithms)}")
        part = replace(
            suite,
            tasks=tuple(dict.fromkeys(self.tasks)) or suite.tasks,
            lags=numbers("--lags", self.lags) or suite.lags,
            seeds=numbers("--seeds", self.seeds) or suite.seeds,
            algorithms={name: suite.algorithms[name] for name in self.algorithms or suite.algorithms},
        )
        whole, out = widen(suite, part), self.out or Path("runs", self.suite)
        if self.dry_run:
            remember_suite(out, self.suite, whole, write=False)
            check(runs := expand(part, out))
            print("\n".join(shlex.join(["python", *run.command[1:]]) for run in runs), f"\n\n{len(runs)} runs")
            return 0
        if self.out is None:
            raise Refused(f"--out is missing: name a folder for the runs, such as {out}")
        if min(self.minutes, self.cpus, self.memory, 1 if self.workers is None else self.workers) <= 0:
            raise Refused("--workers, --minutes, --cpus and --memory must be positive")
        execute, slurm = None, sum(self.slurm, ())
        if self.executor == "slurm":
            execute = slurm_executor(out, self.minutes, self.memory, self.cpus, self.workers or 100, slurm)
        code = run_suite(self.suite, part, out, typed(), self.workers, execute, whole)
        if code < 2:
            print(write_report(out))
        return code


def show_status(out: Positional[Path]):
    """Show which runs of a folder are finished, running, failed or missing."""
    name, suite = recall_suite(out)
    runs = [(state(run), run) for run in expand(suite, out)]
    counts = ", ".join(f"{n} {found}" for found, n in Counter(found for found, _ in runs).most_common())
    notable = [(found, run) for found, run in runs if found not in ("finished", "missing")]
    lines = [f"{found}: {run.name} (log: {run.beside('.log')})" for found, run in notable]
    return "\n".join([f"{name}: {len(runs)} runs, {counts}", *lines])


def numbers(option, words):
    """("1:3", "7,9") -> (1, 2, 3, 7, 9)"""
    found = []
    for word in ",".join(words).split(",") if words else ():
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + 10_000:
            raise Refused(f"{option} {word}: give numbers from 0 such as 1,2,5 or a range such as 1:5")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def with_settings(suite, words):
    """The suite with FLAG=VALUE for the algorithms whose script has the flag, unless it is set for them already;
    FLAG=VALUE,VALUE makes one algorithm of each value: "VACO delta .1", "VACO delta .2"."""
    for word in words:
        flag, _, text = word.removeprefix("--").partition("=")
        flag, values = flag.replace("_", "-"), list(dict.fromkeys(map(parse, text.split(","))))
        if not flag or "" in values:
            raise Refused(f"--set {word}: give FLAG=VALUE, or FLAG=VALUE,VALUE to sweep")
        if flag in (suite.task_flag, "lag", "seed", "run-dir", "resume"):
            raise Refused(f"--set {flag}: this is what --tasks, --lags, --seeds and --out are for")
        scripts = {script: script_flags(script) for script, _ in suite.algorithms.values()}
        having = [name for name, (script, _) in suite.algorithms.items() if flag in scripts[script]]
        setting = [name for name in having if flag not in suite.algorithms[name][1]]
        if not setting:
            why = f"it is set already for {having[0]}" if having else f"no such flag of {', '.join(scripts)}"
            raise Refused(f"--set {flag}: {why}")
        names, algorithms, pairs = {}, {}, {}
        for name, (script, extra) in suite.algorithms.items():
            for x in values:
                names[name, x] = f"{name} {flag} {short(x)}" if name in setting and len(values) > 1 else name
                algorithms[names[name, x]] = script, extra | ({flag: x} if name in setting else {})
        for x in values:
            pairs |= {(names[a, x], names[b, x]): None for a, b in suite.comparisons}
        suite = replace(suite, algorithms=algorithms, pairs=tuple(pairs))
    return replace(suite, options=shlex.join(["--set", *words]) if words else "")


def parse(text):
    """ "3e4" -> 30000, ".5" -> .5, "false" -> False; else the text, which the script has to judge"""
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    with suppress(ValueError):
        return int(float(text)) if float(text).is_integer() else float(text)
    return text


def script_flags(script):
    """The fields of the class Args of a script as flags, read without importing it."""
    tree = ast.parse((ROOT / script).read_text())
    fields = [field for node in tree.body if getattr(node, "name", "") == "Args" for field in node.body]
    return [field.target.id.replace("_", "-") for field in fields if isinstance(field, ast.AnnAssign)]


COMMANDS = {"list": list_suites, "run": Run, "status": show_status, "report": write_report, "compare": compare}
COMMANDS |= {"reference": write_references, "speed": Speed}


def main(argv=None):
    """Returns the exit code: 0, 1 if runs failed, 2 if refused, 128 + signal after Ctrl-C or SIGTERM."""
    if argv is not None:
        sys.argv[1:] = argv
    sys.stdout.reconfigure(errors="replace")  # names may have letters that a terminal lacks
    try:
        done = subcommand_cli_from_dict(COMMANDS, prog="python -m benchmark", description=__doc__)
        if isinstance(done, Run | Speed):
            return done.do()
        print(done)
        return 0
    except (Refused, OSError, re.error) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
