"""How far the runs are: the progress line of the runner, and the table of states."""

import fcntl
import math
import os
import time
from collections import Counter
from datetime import timedelta

from benchmark.document import markdown_table
from benchmark.runs import Refused, expand, recall_suite, status


def fraction(run):
    """How far a running run is, 0 to 1, from the tail of its metrics.csv, whose first column is global_step."""
    try:
        with open(run.folder / "metrics.csv", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 4096))
            last_line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]  # whole lines only
        total = run.flags.get("total-timesteps") or run.flags.get("num-updates") or math.inf
        return min(1.0, float(last_line.split(b",")[0]) / total)
    except (OSError, ValueError):  # not there yet, or only its header
        return 0.0


def progress(asked, total, waiting, fractions, started, failed, resumed_at=0.0):
    """The progress line. Time left from the share of this call's work done so far, runs taken as equally long;
    resumed_at is what resumed runs had done before, in runs."""
    ended = asked - waiting - len(fractions)
    done, elapsed = ended + sum(fractions), time.monotonic() - started
    now = done - resumed_at
    left = timedelta(seconds=round((asked - done) * elapsed / now)) if now > 0 else "unknown"
    share = (total - asked + done) / max(total, 1)
    line = f"[{'#' * int(20 * share):20}] {total - asked + ended}/{total} runs done"
    line += f", running {' '.join(f'{f:.0%}' for f in fractions)}" if fractions else ""
    line += f", {failed} failed" if failed else ""
    return f"{line}, elapsed {timedelta(seconds=round(elapsed))}, left {left}"


def state(run):
    """`status` of a run, or "running" while a process holds its lock, or "refused" for one of another configuration."""
    try:
        found = status(run)
    except Refused:
        return "refused"
    return "running" if found != "finished" and is_held(run.lock) else found


def refusal(run):
    try:
        status(run)
    except Refused as error:
        return str(error)


def is_held(path):
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file
        return False
    return False


def states(out):
    """The table of states of the folder `out`, and a line for each run that is neither finished nor waiting."""
    name, suite = recall_suite(out)
    runs = {(r.task, r.lag, r.algorithm, r.seed): (r, state(r)) for r in expand(suite, out)}
    lines = [["task", "lag", *suite.algorithms]]
    for task in suite.tasks:
        for lag in suite.lags:
            cells = []
            for algorithm in suite.algorithms:
                counts = Counter(runs[task, lag, algorithm, seed][1] for seed in suite.seeds)
                others = [f"{n} {kind}" for kind, n in counts.items() if kind not in ("finished", "missing")]
                cell = f"{counts['finished']}/{len(suite.seeds)}"
                cells.append(f"{cell} ({', '.join(others)})" if others else cell)
            lines.append([task, str(lag), *cells])
    counts = Counter(kind for _, kind in runs.values())
    notes = []
    for run, kind in runs.values():
        share = f" {fraction(run):.0%}" if kind in ("running", "unfinished") else ""
        if kind not in ("finished", "missing"):
            notes.append(f"{kind}{share}: {run.name} ({refusal(run) or f'log: {run.log}'})")
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return "\n".join(
        [f"{name}: {len(runs)} runs, {total}", "", markdown_table(lines), *([""] if notes else []), *notes]
    )
