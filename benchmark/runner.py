"""Run what is missing of a suite: each run a process of its own, a few at once, safe to interrupt and to repeat."""

import ctypes
import fcntl
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from benchmark.progress import fraction, progress
from benchmark.report import write_report
from benchmark.runs import (
    ROOT,
    Refused,
    Run,
    differences,
    expand,
    read_json,
    refuse_foreign,
    remember_suite,
    status,
)

POLL_SECONDS = 0.2
LINE_SECONDS = 60  # between progress lines when stdout is not a terminal
GRACE_SECONDS = 10  # for an interrupted run to end by itself
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def run_suite(name, suite, out, command, workers=None, execute=None):
    """Run what is missing in the folder `out`, then report. Returns 0, 1 if runs failed, or 128 + the signal.

    `command` is what the user typed. `execute` is where to run: by default here, `workers` runs at once.
    """
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
        where = "on Slurm" if execute else f"{at_once} at once"
        print(f"{name}: {len(runs)} runs, {len(runs) - len(missing)} finished before, {where}, in {out}", flush=True)
        if execute:
            failures, signum = execute(missing, len(runs))
        else:
            failures, signum = execute_here(missing, len(runs), at_once, lock)
        if signum is not None:
            print(f"stopped; finished runs are kept, go on with: {command}")
            return 128 + signum
        print(write_report(out))
    for run, reason in failures:
        print(f"failed: {run.name}: {reason} (log: {run.log})")
    if failures:
        print(f"{len(failures)} runs failed; repeat them with: {command}")
    return 1 if failures else 0


def default_workers():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def locked(out):
    """Hold the lock on DIR/.lock: one runner per folder. It falls with the file, also when the process is killed."""
    for _ in range(20):  # runs of a runner that was just killed need a moment to die
        if lock := hold(out / ".lock"):
            break
        time.sleep(0.1)
    else:
        raise Refused(f"{out} is in use by another runner, or by runs which a killed one left behind")
    with lock:
        yield lock


@dataclass
class Job:
    """A run that is under way."""

    run: Run
    process: subprocess.Popen
    lock: IO
    resumed: bool


def execute_here(runs, total, workers, lock):
    """Run all, `workers` at once. Returns ([(run, reason)] of the failed ones, the signal that stopped it or None)."""
    waiting, running, failures = deque((run, False) for run in runs), [], []
    started, printed, resumed_at = time.monotonic(), -math.inf, 0.0
    # The handlers only take note: an exception raised between fork and append would lose track of a child.
    signals = []
    previous = {s: signal.signal(s, lambda signum, _: signals.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < workers:
                run, fresh = waiting.popleft()
                if job := start(run, fresh, lock):
                    running.append(job)
                    resumed_at += fraction(run) if job.resumed else 0.0
                else:
                    failures.append((run, "another runner is at it"))
            time.sleep(POLL_SECONDS)
            ended = [job for job in running if job.process.poll() is not None]
            running = [job for job in running if job not in ended]
            for job in ended:
                job.lock.close()
                reason = failure(job.run, job.process.returncode)
                if reason and job.resumed and not signals:
                    waiting.appendleft((job.run, True))
                elif reason:
                    failures.append((job.run, reason))

            fractions = [fraction(job.run) for job in running]
            line = progress(len(runs), total, len(waiting), fractions, started, len(failures), resumed_at)
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be rewritten
                print(f"\r{line[:width]}\x1b[K", end="", flush=True)
            elif ended or time.monotonic() - printed > LINE_SECONDS:
                print(line, flush=True)
                printed = time.monotonic()
    finally:
        if runs and sys.stdout.isatty():
            print()
        stop([job.process for job in running], signals)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return failures, signals[0] if signals else None


def execute_one(run):
    """Run one and wait: a task of a cluster. Returns None, or why it failed."""
    for fresh in (False, True):
        if status(run) == "finished":
            return None
        if not (job := start(run, fresh)):
            return "another runner is at it"
        returncode = job.process.wait()
        job.lock.close()
        reason = failure(run, returncode)
        if not job.resumed:
            break
    return reason


def start(run, fresh, *locks):
    """Start a run, or resume it from its checkpoint unless `fresh`. What else an earlier one left is removed.

    Returns a Job, None where another runner is at this run. The locks stay held while the run lives.
    """
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if not (lock := hold(run.lock)):
        return None
    resumed = not fresh and resumable(run)
    command = [*run.command[:2], "--resume", str(run.folder)] if resumed else run.command
    if run.folder.exists() and not resumed:
        shutil.rmtree(run.folder)
    with open(run.log, "a" if resumed else "w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # the cores are used by runs side by side
            start_new_session=True,  # a Ctrl-C at the terminal reaches the runner alone
            # A run must not outlive its runner: it would write into a folder that the next runner clears. Linux kills
            # it; elsewhere it keeps the locks by inheritance, and the next runner is refused until it is gone.
            preexec_fn=die_with_runner if LIBC else None,
            pass_fds=[held.fileno() for held in (lock, *locks)],
        )
    return Job(run, process, lock, resumed)


def resumable(run):
    """Whether the folder holds a checkpoint of this very run from which its script can go on. One that failed may do so
    too: what it failed of, a full disk say, may be over."""
    if not (run.folder / "checkpoint.pt").exists():
        return False
    try:
        args = read_json(run.folder / "config.json").get("args") or {}
    except Refused:
        return False
    return not differences(run, args) and knows_resume(run.script)


@functools.cache
def knows_resume(script):
    done = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True)
    return "--resume" in done.stdout


def hold(path):
    """The file, locked, or None where another process holds the lock. It falls with the last process that has it."""
    file = open(path, "a")  # noqa: SIM115 (as long as the run)
    for _ in range(3):  # `status` holds a lock for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.05)
    file.close()
    return None


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


def failure(run, returncode=None):
    """None for a finished run, else the reason in one line."""
    try:
        state = status(run)
    except Refused as error:
        return str(error)
    if state == "finished" and not returncode:
        return None
    text = run.log.read_text(errors="replace") if run.log.exists() else ""
    lines = [line.strip(" │") for line in re.split(r"[\r\n]", text)]
    # not the frame of a box, nor what stands beneath it
    said = [line for line in lines if re.search(r"\w", line) and not line.startswith("For full helptext")]
    return f"{f'exit code {returncode}' if returncode else state}: {said[-1] if said else 'the log is empty'}"
