"""Command line: python -m benchmark run SUITE --out DIR [--workers W] | report DIR | list | speed --out DIR"""

import argparse
import sys
from pathlib import Path

from benchmark.report import write_report
from benchmark.runner import run_suite
from benchmark.runs import Refused
from benchmark.speed import add_parser, run_speed
from benchmark.suites import SUITES


def main(argv=None):
    """Returns the exit code: 0, 1 if runs failed, 2 if refused, 130 after Ctrl-C, 143 after SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmark", description="Compare the algorithms seed by seed.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is missing of a suite, then report")
    run.add_argument("suite", help="a name that `list` shows")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the runs and the report")
    run.add_argument("--workers", type=int, metavar="W", help="runs at once (default: one per core)")
    report = commands.add_parser("report", help="write report.md, results.csv and curves.png of the finished runs")
    report.add_argument("out", type=Path, metavar="DIR")
    commands.add_parser("list", help="show the suites")
    add_parser(commands)
    args = parser.parse_args(argv)

    try:
        if args.command == "list":
            for name, suite in SUITES.items():
                count = len(suite.algorithms) * len(suite.tasks) * len(suite.lags) * len(suite.seeds)
                print(f"{name:12} {count:3} runs  {suite.description}")
            return 0
        if args.command == "report":
            print(write_report(args.out))
            return 0
        if args.command == "speed":
            return run_speed(args)
        if args.suite not in SUITES:
            raise Refused(f"unknown suite {args.suite}: choose one of {', '.join(SUITES)}")
        if args.workers is not None and args.workers < 1:
            raise Refused(f"--workers must be at least 1, not {args.workers}")
        return run_suite(args.suite, SUITES[args.suite], args.out, args.workers)
    except (Refused, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
