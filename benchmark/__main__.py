"""Command line: python -m benchmark COMMAND; each of list, run, status, report, compare, reference, speed has --help"""

import argparse
import math
import os
import shlex
import signal
import sys
from pathlib import Path

from benchmark.choose import choose, numbers
from benchmark.compare import compare
from benchmark.estimate import RATES, duration, estimate, stated_seconds
from benchmark.progress import states
from benchmark.reference import measure
from benchmark.report import write_report
from benchmark.runner import default_workers, run_suite
from benchmark.runs import Refused, agree, expand
from benchmark.scores import PATH
from benchmark.speed import add_parser as add_speed
from benchmark.suites import SUITES


def main(argv=None):
    """Returns the exit code: 0, 1 if runs failed, 2 if refused, 128 + signal after Ctrl-C, SIGTERM or a closed pipe."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmark", description="Compare the algorithms seed by seed.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_list(commands)
    add_run(commands)
    add_status(commands)
    add_report(commands)
    add_compare(commands)
    add_reference(commands)
    add_speed(commands)
    args = parser.parse_args(argv)
    args.typed = f"python -m benchmark {shlex.join(argv)}"
    sys.stdout.reconfigure(errors="replace")  # names may have letters that a terminal lacks
    try:
        code = args.do(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (Refused, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# ---------------------------------------------------------------------------------------------------------------- list


def add_list(commands):
    parser = commands.add_parser("list", help="show the suites, or every command of one")
    add_choices(parser)
    parser.set_defaults(do=do_list)


def add_choices(parser):
    parser.add_argument("suite", nargs="?" if "list" in parser.prog else None, help="a name that `list` shows")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks and algorithms of the suite alone")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="these tasks instead of the suite's")
    parser.add_argument("--lags", nargs="+", metavar="L", help="these lags instead of the suite's: 0,15")
    parser.add_argument("--seeds", nargs="+", metavar="S", help="these seeds instead of the suite's: 1:5 or 1,2,7")
    text = "a flag of the scripts; several values make one algorithm each: --set total-timesteps=300000 delta=.1,.2"
    parser.add_argument("--set", nargs="+", action="extend", metavar="FLAG=VALUE", help=text)


def chosen(args):
    if args.suite not in SUITES:
        raise Refused(f"unknown suite {args.suite}: choose one of {', '.join(SUITES)}")
    return choose(SUITES[args.suite], args.only, args.tasks, args.lags, args.seeds, args.set)


def do_list(args):
    if args.suite is not None:
        print_commands(expand(chosen(args), Path("runs") / args.suite))
        return 0
    if args.only or args.tasks or args.lags or args.seeds or args.set:
        raise Refused("name the suite that is to be changed")
    for name, suite in SUITES.items():
        runs = expand(suite, "runs")
        print(f"{name:13} {len(runs):5} runs {hours(map(stated_seconds, runs)):>9}  {suite.description}")
    print(f"\nHours of one core, {RATES}; evaluation comes on top.")
    return 0


def hours(seconds):
    known = [x for x in seconds if x is not None]
    return f"{sum(known) / 3600:,.1f} h" if known else "unknown"


def print_commands(runs, workers=None):
    """Every command that is to be run, with its estimated time, and the sum."""
    seconds, basis = estimate(runs)
    for run in runs:
        if run.name in seconds:
            print(f"{duration(seconds[run.name]):>9}  {shlex.join(['python', *run.command[1:]])}")
    workers = workers or default_workers()
    known = [x for x in seconds.values() if x is not None]
    print(f"\n{len(seconds)} of {len(runs)} runs to do, {sum(known) / 3600:,.1f} hours of one core, {basis};")
    wall = max([sum(known) / workers, *known])  # no run is divided
    print(f"with --workers {workers} about {duration(wall)}, without evaluation.")


# ----------------------------------------------------------------------------------------------------------------- run


def add_run(commands):
    parser = commands.add_parser("run", help="run what is missing of a suite, then report")
    add_choices(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs and the report")
    parser.add_argument("--workers", type=int, metavar="W", help="runs at once (default: one per core)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print every command and the estimated time, run nothing"
    )
    parser.add_argument("--executor", choices=("local", "slurm"), default="local", help="where (default: local)")
    slurm = parser.add_argument_group("with --executor slurm, where --workers is the number of tasks at once")
    slurm.add_argument("--minutes", type=int, default=720, help="time limit of a task (default: 720)")
    slurm.add_argument("--memory", type=float, default=4, metavar="GB", help="of a task (default: 4)")
    slurm.add_argument("--cpus", type=int, default=1, help="of a task (default: 1; a run has one thread)")
    slurm.add_argument(
        "--slurm", nargs="+", action="extend", metavar="KEY=VALUE", help="flags of sbatch: partition=cpu"
    )
    parser.set_defaults(do=do_run)


def checked_workers(args):
    if args.workers is not None and args.workers < 1:
        raise Refused(f"--workers must be at least 1, not {args.workers}")
    return args.workers


def do_run(args):
    suite, workers = chosen(args), checked_workers(args)
    if args.dry_run:
        if args.out is not None:
            agree(args.out, args.suite, suite)
        print_commands(expand(suite, args.out or Path("runs") / args.suite), workers)
        return 0
    if args.out is None:
        raise Refused(f"--out is missing: name a folder for the runs, such as runs/{args.suite}")
    execute = None
    if args.executor == "slurm":
        from benchmark.slurm import slurm_executor

        if min(args.minutes, args.cpus, args.memory) <= 0:
            raise Refused("--minutes, --cpus and --memory must be positive")
        execute = slurm_executor(args.out, args.minutes, args.memory, args.cpus, workers or 100, args.slurm)
    return run_suite(args.suite, suite, args.out, args.typed, workers, execute)


# -------------------------------------------------------------------------------------------------- status and reports


def add_status(commands):
    parser = commands.add_parser("status", help="show which runs of a folder are finished, running, failed or missing")
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.set_defaults(do=lambda args: print(states(args.out)) or 0)


def add_report(commands):
    text = "write report.html, report.md, results.csv and pictures of the finished runs, or of any results.csv"
    parser = commands.add_parser("report", help=text)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.set_defaults(do=lambda args: print(write_report(args.out)) or 0)


def add_compare(commands):
    text = "what changed between two folders of results, run by run"
    parser = commands.add_parser("compare", help=text)
    parser.add_argument("before", type=Path, metavar="DIR1")
    parser.add_argument("after", type=Path, metavar="DIR2")
    text = "exit code 1 if the mean of DIR2 - DIR1 over all pairs is below X, or DIR2 lacks a run of DIR1 or has it "
    text += "with another number of steps"
    parser.add_argument("--fail-below", type=float, metavar="X", help=text)
    parser.set_defaults(do=do_compare)


def do_compare(args):
    if args.fail_below is not None and not math.isfinite(args.fail_below):
        raise Refused(f"--fail-below must be a number, not {args.fail_below}")
    text, code = compare(args.before, args.after, args.fail_below)
    print(text)
    return code


def add_reference(commands):
    text = "measure a random policy and PPO without lag, the 0 and 1 of normalised scores"
    parser = commands.add_parser("reference", help=text)
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="environment steps of PPO")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="default: the ten of mujoco10")
    parser.add_argument("--seeds", nargs="+", default=["1:5"], metavar="S", help="default: 1:5")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    parser.add_argument(
        "--csv", type=Path, default=PATH, metavar="FILE", help="default: benchmark/reference_scores.csv"
    )
    parser.add_argument("--workers", type=int, metavar="W", help="runs at once (default: one per core)")
    parser.set_defaults(do=do_reference)


def do_reference(args):
    if args.steps < 1:
        raise Refused(f"--steps must be at least 1, not {args.steps}")
    seeds = numbers("--seeds", args.seeds)
    return measure(args.csv, args.out, args.tasks, args.steps, seeds, args.typed, checked_workers(args))


if __name__ == "__main__":
    sys.exit(main())
