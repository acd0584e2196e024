"""speed.csv and speed.md of `python -m benchmark speed`: the measurements, and their medians and ratios."""

import csv
import os
import platform
import re
import shlex
import statistics
import subprocess
from pathlib import Path

from benchmark.document import markdown_table
from benchmark.results import describe
from benchmark.runner import default_workers
from benchmark.runs import ROOT, flag_list

TITLES = {
    "control": "HalfCheetah-v5: 10 epochs of minibatches of 64 per 2048 steps, nets 64-64",
    "llm": "language model of 0.23 M parameters: 16 prompts x 8 completions, up to 16 tokens, one gradient step each",
    "memory": "peak memory: 70 iterations of 2048 steps, 16 environments",
}
UNITS = {"control": "steps/s", "llm": "completions/s", "memory": "steps/s"}
SB3, SBX, CLEANRL, TRL, BARE = "SB3 PPO", "sbx PPO", "CleanRL PPO", "TRL GRPO", "bare environment"
REFERENCES = {"control": (SB3, SBX, CLEANRL, BARE), "llm": (TRL,), "memory": ()}
COLUMNS = ("table", "contestant", "repeat", "steps_per_second", "warmup_seconds", "sampling_share", "cpu_share")
COLUMNS += ("peak_rss_mb", "versions", "machine", "commit", "command")


def describe_origin():
    """The machine and the commit, as columns of speed.csv."""
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):  # not Linux, or a CPU that is not named there
        model = platform.processor() or platform.machine()
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # no git, or a copy outside a repository
    machine = f"{model}, {default_workers()} cores, 1 thread per process, {platform.platform()}"
    return {"machine": machine, "commit": describe(commit)}


def write_files(args, contestants, rows, failures):
    """speed.csv and speed.md of what is measured so far, each whole or not at all."""
    for name, write in (("speed.csv", write_rows), ("speed.md", write_report)):
        partial = args.out / f".{name}"
        with open(partial, "w", newline="") as file:
            write(file, args, contestants, rows, failures)
        os.replace(partial, args.out / name)


def write_rows(file, args, contestants, rows, failures):
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)


def write_report(file, args, contestants, rows, failures):
    flags = {
        name: getattr(args, name) for name in ("out", "only", "match", "repeats", "iterations", "peers", "cleanrl")
    }
    words = flag_list({name: x for name, x in flags.items() if x is not None})
    lines = [f"command: `{shlex.join(['python', '-m', 'benchmark', 'speed', *words])}`"]
    lines += [
        f"{key}: {' and '.join(dict.fromkeys(describe(row[key]) for row in rows))}" for key in ("commit", "machine")
    ]
    for versions in dict.fromkeys(row["versions"] for row in rows):
        names = dict.fromkeys(row["contestant"] for row in rows if row["versions"] == versions)
        lines.append(f"{'; '.join(names)}: {versions}")
    lines.append("x NAME: speed as a multiple of NAME's, within a repeat; the median over repeats")
    lines.append("CPU: processor time of the process over its wall time; well below 100 % other work kept it waiting")
    lines.append("warm-up: seconds outside the measurement (start, imports, compilation, first iterations), repeat 1")
    lines.append("peak memory: resident, of the process or of the largest that it started")
    header = "\n".join(f"- {line}" for line in lines)
    file.write("\n\n".join(["# Speed", header, *report(contestants, rows, failures)]) + "\n")


def report(contestants, rows, failures):
    """The tables, and a warning if something is missing from them."""
    parts = [table(name, [c for c in contestants if c.table == name], rows) for name in TITLES]
    warning = "\n".join(f"- {name}: {reason}" for name, reason in failures.items())
    return [part for part in parts if part] + ([f"**Failed:**\n\n{warning}"] if failures else [])


def table(name, contestants, rows):
    if not contestants:
        return None
    by_name = {
        c.name: {r["repeat"]: r for r in rows if (r["table"], r["contestant"]) == (name, c.name)} for c in contestants
    }
    references = [x for x in REFERENCES[name] if x in by_name]
    lags, shares = any(c.lag_0 for c in contestants), name == "llm"
    lines = [["", f"{UNITS[name]}, median", "min to max", *(f"x {x}" for x in references)]]
    lines[0] += ["x lag 0"] * lags + ["sampling"] * shares + ["CPU", "warm-up, s", "peak memory, MB"]
    for contestant in contestants:
        mine = by_name[contestant.name]
        speeds = [row["steps_per_second"] for row in mine.values()]
        line = [contestant.name, median(speeds, ",.0f"), f"{min(speeds):,.0f} to {max(speeds):,.0f}" if speeds else ""]
        for reference in [*references, *[contestant.lag_0] * lags]:
            others = by_name.get(reference, {})
            both = [mine[r]["steps_per_second"] / others[r]["steps_per_second"] for r in mine.keys() & others.keys()]
            line.append(median(both, ".2f"))
        if shares:
            line.append(median([row["sampling_share"] for row in mine.values()], ".0%"))
        line.append(median([row["cpu_share"] for row in mine.values()], ".0%"))
        line.append(median([row["warmup_seconds"] for row in mine.values()][:1], ",.0f"))  # later ones find it compiled
        line.append(median([row["peak_rss_mb"] for row in mine.values()], ",.0f"))
        lines.append(line)
    return f"## {TITLES[name]}\n\n{markdown_table(lines)}"


def median(values, form):
    return format(statistics.median(values), form) if values else ""
