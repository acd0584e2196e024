"""Does every fault to real runs of the four scripts, and writes what became of them into docs/reliability.md.

python tests/fault_report.py [--times 5] [--out docs/reliability.md]

Each try is a process of its own; a resumed run is compared, file by file, with one that nothing happened to. The text
around the table is written by hand. Exits with 1 if any try ended in another way than it must.
"""

import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import tyro
from faults import FAULTS, SCRIPTS, Bench
from helpers import ROOT


def report(times: int, benches: list[Bench]) -> tuple[list[str], int, int]:
    """(rows of the table, number of tries, number of those that went wrong)"""
    rows, tries, failures = [], 0, 0
    for fault, how, function in FAULTS:
        outcomes = Counter()
        for bench in benches * times:
            try:
                outcomes[function(bench)] += 1
            except AssertionError as error:
                print(f"{fault}, {bench.name}: {error}", file=sys.stderr)
                outcomes["**another outcome**"] += 1
        outcomes.pop(None, None)
        print(fault, dict(outcomes), flush=True)
        tries += outcomes.total()
        failures += outcomes["**another outcome**"]
        told = "; ".join(f"{outcome}: {count}" if len(outcomes) > 1 else outcome for outcome, count in outcomes.items())
        rows.append(f"| {fault} | {how} | {outcomes.total()} | {told} |")
    return rows, tries, failures


def main(times: int = 5, out: Path = ROOT / "docs" / "reliability.md") -> None:
    """times: tries of every fault for each script"""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        benches = [Bench(name, Path(home) / name, random.Random(0)) for name in SCRIPTS]
        rows, tries, failures = report(times, benches)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "gymnasium", "tensorboard"))
    table = ["| fault | how it is done | times | outcome |", "|---|---|---|---|", *rows, ""]
    table += [f"{tries} tries, {failures} of them with another outcome than is due.", ""]
    minutes = (time.monotonic() - start) / 60
    table += [f"Made by `python tests/fault_report.py --times {times}` in {minutes:.0f} minutes, at commit {commit},"]
    table += [f"with Python {platform.python_version()}, {versions},", f"on {platform.platform()}.", ""]
    text = re.sub(r"^\| fault \|.*", "", out.read_text(), flags=re.DOTALL | re.MULTILINE)
    out.write_text(text + "\n".join(table))
    sys.exit(failures > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    tyro.cli(main, description=__doc__)
