"""Run what is missing of a suite: each run a process of its own, a few at once, safe to interrupt and to repeat."""

import ctypes
import fcntl
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta

from benchmark.report import write_report
from benchmark.runs import ROOT, Refused, expand, refuse_foreign, remember_suite, status

POLL_SECONDS = 0.2
LINE_SECONDS = 60  # between progress lines when stdout is not a terminal
GRACE_SECONDS = 10  # for an interrupted run to end by itself
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def run_suite(name, suite, out, workers=None):
    """Run what is missing in the folder `out`, then report. Returns 0, 1 if runs failed, or 128 + the signal."""
    runs = expand(suite, out)
    for run in runs:
        if not (ROOT / run.script).is_file():
            raise Refused(f"no script {run.script} in {ROOT}")
    refuse_foreign(out)  # before the lock file is put there
    out.mkdir(parents=True, exist_ok=True)
    with locked(out) as lock:
        remember_suite(out, name, suite)
        missing = [run for run in runs if status(run) != "finished"]
        at_once = workers or default_workers()
        print(f"{name}: {len(runs)} runs, {len(runs) - len(missing)} finished before, {at_once} at once, in {out}")
        failures, signum = execute(missing, len(runs), at_once, lock)
        if signum is not None:
            command = f"python -m benchmark run {name} --out {shlex.quote(str(out))}"
            command += f" --workers {workers}" if workers else ""
            print(f"stopped; finished runs are kept, go on with: {command}")
            return 128 + signum
        print(write_report(out))
    for run, reason in failures:
        print(f"failed: {run.name}: {reason} (log: {run.log})")
    return 1 if failures else 0


def default_workers():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def locked(out):
    """Hold the lock on DIR/.lock: one runner per folder. It falls with the file, also when the process is killed."""
    with open(out / ".lock", "a") as lock:
        for _ in range(20):  # runs of a runner that was just killed need a moment to die
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise Refused(f"{out} is in use by another runner, or by runs which a killed one left behind")
        yield lock


def execute(runs, total, workers, lock):
    """Run all, `workers` at once. Returns ([(run, reason)] of the failed ones, the signal that stopped it or None)."""
    waiting, running, failures = deque(runs), [], []
    started, printed = time.monotonic(), -math.inf
    # The handlers only take note: an exception raised between fork and append would lose track of a child.
    signals = []
    previous = {s: signal.signal(s, lambda signum, _: signals.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < workers:
                run = waiting.popleft()
                running.append((run, start(run, lock)))
            time.sleep(POLL_SECONDS)
            ended = [(run, process) for run, process in running if process.poll() is not None]
            running = [pair for pair in running if pair not in ended]
            failures += [(run, reason) for run, process in ended if (reason := failure(run, process.returncode))]

            line = progress(
                len(runs), total, len(waiting), [fraction(run) for run, _ in running], started, len(failures)
            )
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be rewritten
                print(f"\r{line[:width]}\x1b[K", end="", flush=True)
            elif ended or time.monotonic() - printed > LINE_SECONDS:
                print(line, flush=True)
                printed = time.monotonic()
    finally:
        if runs and sys.stdout.isatty():
            print()
        stop([process for _, process in running], signals)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return failures, signals[0] if signals else None


def start(run, lock):
    """Start a run from scratch. What an earlier, unfinished one left is removed."""
    if run.folder.exists():
        shutil.rmtree(run.folder)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "w") as log:
        return subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # the cores are used by runs side by side
            start_new_session=True,  # a Ctrl-C at the terminal reaches the runner alone
            # A run must not outlive its runner: it would write into a folder that the next runner clears. Linux kills
            # it; elsewhere it keeps the lock of DIR by inheritance, and the next runner is refused until it is gone.
            preexec_fn=die_with_runner if LIBC else None,
            pass_fds=[lock.fileno()],
        )


def die_with_runner():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop(processes, signals):
    """End the processes and wait for them; after GRACE_SECONDS or a second signal they are killed."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in processes):
        if len(signals) > 1 or time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)


def failure(run, returncode):
    """None for a finished run, else the reason in one line."""
    try:
        state = status(run)
    except Refused as error:
        return str(error)
    if state == "finished" and returncode == 0:
        return None
    lines = [line.strip(" │") for line in re.split(r"[\r\n]", run.log.read_text(errors="replace"))]
    said = [line for line in lines if any(character.isalnum() for character in line)]  # not the frame of a box
    return f"exit code {returncode}, {state}: {said[-1] if said else 'the log is empty'}"


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


def progress(asked, total, waiting, fractions, started, failed):
    """The progress line; time left from the share of this call's work done so far, runs taken as equally long."""
    ended = asked - waiting - len(fractions)
    done, elapsed = ended + sum(fractions), time.monotonic() - started
    left = timedelta(seconds=round((asked - done) * elapsed / done)) if done > 0 else "unknown"
    line = f"{total - asked + ended}/{total} runs done"
    line += f", running {' '.join(f'{f:.0%}' for f in fractions)}" if fractions else ""
    line += f", {failed} failed" if failed else ""
    return f"{line}, elapsed {timedelta(seconds=round(elapsed))}, left {left}"
