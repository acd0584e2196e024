"""Run what is missing of a suite: each run a process of its own, a few at once or as job arrays of Slurm, safe to
interrupt and to repeat. Where the runner is killed by `kill -9` its runs go on, and the next runner waits for them.
On Slurm all nodes must see runs, repository and virtual environment under the same paths, and locks (flock) must hold
between nodes, as they do on NFS 4 and Lustre mounted with -o flock.
"""

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque, namedtuple
from contextlib import suppress
from datetime import datetime, timedelta
from importlib.metadata import distributions
from itertools import takewhile
from pathlib import Path

from benchmark.runs import ROOT, Refused, expand, read_record, remember_suite, resumable, status, write_record

PACKAGES = ("torch", "numpy", "gymnasium", "mujoco")
POLL_SECONDS, SLURM_POLL_SECONDS = 0.2, 5
ARRAY_SIZE = 500  # tasks of a job array; Slurm's own limit, MaxArraySize, is 1001 by default
CHECK = """
import importlib, json, sys, tyro
for number, (script, words) in enumerate(json.load(sys.stdin)):
    print(number, flush=True)
    tyro.cli(importlib.import_module(script).Args, args=words)
"""


def run_suite(name, suite, out, command, workers=None, execute=None, whole=None):
    """Run what is missing in the folder `out`. Returns 0, 1 if runs failed, or 128 + the signal that stopped it.

    `command` is what the user typed. `execute` is where to run: by default here, `workers` runs at once. DIR/suite.json
    is to say `whole`, where `suite` is only the part of it that is run now.
    """
    runs, workers, whole = expand(suite, out), workers or os.cpu_count() or 1, whole or suite
    remember_suite(out, name, whole, write=False)
    missing = [run for run in runs if status(run) != "finished"]
    check(missing)
    out.mkdir(parents=True, exist_ok=True)
    if not (lock := hold(out / ".lock")):
        raise Refused(f"{out} is in use by another runner")
    with lock:
        remember_suite(out, name, whole)
        where = "on Slurm" if execute else f"{workers} at once"
        print(f"{name}: {len(runs)} runs, {len(runs) - len(missing)} finished before, {where}, in {out}", flush=True)
        failures, signum = execute(missing) if execute and missing else execute_here(missing, workers)
    if signum is not None:
        print(f"\nstopped; finished runs are kept, go on with: {command}")
        return 128 + signum
    for run, reason in failures:
        print(f"failed: {run.name}: {reason} (log: {run.beside('.log')})")
    if failures:
        print(f"{len(failures)} runs failed; repeat them with: {command}")
    return 1 if failures else 0


def typed():
    return f"python -m benchmark {shlex.join(sys.argv[1:])}"


def check(runs):
    """Raises Refused where a script does not take the flags of a run. Each distinct set of flags is tried once, without
    its seed, in one process for all scripts: they say what is wrong in their own words."""
    asked = {}
    for run in runs:
        asked.setdefault((run.script, json.dumps(run.flags | {"seed": 0})), run)
    asked = list(asked.values())
    if absent := [run.script for run in asked if not (ROOT / run.script).is_file()]:
        raise Refused(f"no script {absent[0]} in {ROOT}")
    paths = os.pathsep.join(dict.fromkeys(str((ROOT / run.script).parent) for run in asked))
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps([(Path(run.script).stem, run.command[2:-2]) for run in asked]),
        env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        run = asked[int(done.stdout.split()[-1])]
        raise Refused(f"{run.script} refuses the flags of {run.name}: {last_words(done.stderr)}")


def last_words(text):
    """The last line of a log, or the top of a box that tyro has drawn at its end."""
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    if not lines or not lines[-1].startswith("╰"):
        return lines[-1] if lines else "the log is empty"
    box = lines[max(i for i, line in enumerate(lines) if line.startswith("╭")) + 1 : -1]
    return " ".join(takewhile(lambda line: line.strip("─"), (line.strip("│ ") for line in box)))


# ------------------------------------------------------------------------------------------------------------- one run

Job = namedtuple("Job", "run process lock")  # under way; the process inherits the lock, held as long as it lives


def start(run):
    """Start a run as a Job, or resume it from its checkpoint; what else an earlier one left is removed. None where
    another process is at it."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if not (lock := hold(run.beside(".lock"))):
        return None
    resumed = resumable(run)
    command = [*run.command[:2], "--resume", str(run.folder)] if resumed else run.command
    if run.folder.exists() and not resumed:
        shutil.rmtree(run.folder)
    old = read_record(run) if resumed else {}
    record = {"status": "running", "exit_code": None, "peak_rss_mb": old.get("peak_rss_mb")}
    write_record(run, record | {"starts": [*old.get("starts", []), {"command": shlex.join(command)} | origin()]})
    with open(run.beside(".log"), "a" if resumed else "w") as log:
        return Job(run, launch(command, log, pass_fds=[lock.fileno()]), lock)


def origin():
    """Where a run is made: commit, versions, machine and time."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions = {d.name: d.version for d in distributions() if d.name in PACKAGES}
    versions = {"python": platform.python_version()} | versions
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    model = re.search(r"model name\s*: (.+)|$", cpu)[1] or platform.machine()
    machine = f"{model}, {os.cpu_count()} cores, {platform.platform()}"
    return {"commit": commit or None, "versions": versions, "machine": machine, "time": f"{datetime.now():%FT%T}"}


def launch(command, log, env=None, **more):
    """A process with one thread, since the cores are used by runs side by side, and a session of its own: a Ctrl-C at
    the terminal reaches the runner alone, which kills the whole group."""
    more |= {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}), **more)


def wait(process, options=0):
    """The resources that a process of `launch` has used, when it has ended; None while it runs if options say so."""
    pid, code, usage = os.wait4(process.pid, options)
    if pid:
        process.returncode = os.waitstatus_to_exitcode(code)
        return usage


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return wait(process)


def peak_mb(usage):
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def end(job, usage, stopped=False):
    """Write how a run has ended into its record. Returns None for a finished run, else the reason in one line."""
    record = read_record(job.run)
    record |= {"exit_code": job.process.returncode, "peak_rss_mb": max(peak_mb(usage), record["peak_rss_mb"] or 0)}
    reason = failure(job.run, record)
    write_record(job.run, record | {"status": "finished" if not reason else "running" if stopped else "failed"})
    job.lock.close()
    return reason


def failure(run, record):
    """None for a finished run, else why it is not, in one line."""
    try:
        if status(run) == "finished":
            return None
    except Refused as error:
        return str(error)
    log = run.beside(".log")
    words = last_words(log.read_text(errors="replace") if log.exists() else "")
    reason = f"exit code {record.get('exit_code')}: {words}"
    if len(record.get("starts", ())) > 1:
        reason += f"; it was resumed: if its checkpoint cannot be loaded, delete {run.folder}"
    return reason


def hold(path):
    """The file, locked, or None where another process holds the lock. It falls with the last process that has it."""
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        file.close()


# ---------------------------------------------------------------------------------------------------- here or on Slurm


def execute_here(runs, workers):
    """Run all, `workers` at once. Returns ([(run, reason)] of the failed ones, the signal that stopped it or None)."""
    waiting, running, failures, signals, news, started = deque(runs), [], [], [], None, time.monotonic()
    # The handlers only take note: an exception raised between fork and append would lose track of a child.
    previous = {s: signal.signal(s, lambda signum, _: signals.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while (waiting or running) and not signals:
            for run in [waiting.popleft() for _ in range(min(len(waiting), workers - len(running)))]:
                if status(run) != "finished":  # else a process that a killed runner left has finished it
                    job = start(run)
                    (running if job else waiting).append(job or run)
            time.sleep(POLL_SECONDS)
            for job in list(running):
                if usage := wait(job.process, os.WNOHANG):
                    running.remove(job)
                    failures += [(job.run, reason)] if (reason := end(job, usage)) else []
            ended = len(runs) - len(waiting) - len(running)
            news = progress(ended, len(runs), len(running), len(failures), started, news)
    finally:
        for job in running:
            end(job, kill(job.process), stopped=True)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return failures, signals[0] if signals else None


def progress(ended, total, running, failed, started, old):
    """Print how far the runs are when that says something new. Returns what it says."""
    news, elapsed = (ended, running, failed), time.monotonic() - started
    if news != old:
        left = timedelta(seconds=round((total - ended) * elapsed / ended)) if ended else "unknown"
        took = timedelta(seconds=round(elapsed))
        print(f"{ended}/{total} runs done, {running} running, {failed} failed, elapsed {took}, left {left}", flush=True)
    return news


def execute_one(run):
    """Run one and wait: a task of a cluster."""
    while status(run) != "finished":
        if job := start(run):
            return end(job, wait(job.process))
        time.sleep(1)  # another task is at it


def slurm_executor(out, minutes, memory, cpus, parallel, more):
    """A function like execute_here that submits the runs, one task each, and waits. minutes, memory (GB) and cpus are
    of a task, `parallel` how many run at once, `more` KEY=VALUE flags of sbatch."""
    try:
        import submitit

        executor = submitit.AutoExecutor(folder=str(out / ".slurm"), cluster="slurm")
    except ImportError:
        raise Refused("--executor slurm needs submitit: python -m pip install submitit") from None
    except RuntimeError as error:  # no sbatch here
        raise Refused(f"--executor slurm needs a machine that can submit jobs: {error}") from None
    if wrong := [word for word in more if not re.match("[^=]+=", word)]:
        raise Refused(f"--slurm {wrong[0]}: give KEY=VALUE, a long flag of sbatch such as account=abc")
    setup = [f"export PYTHONPATH={shlex.quote(str(ROOT))}"]  # tasks start in whatever folder
    flags = dict(word.split("=", 1) for word in more)
    executor.update_parameters(timeout_min=minutes, mem_gb=memory, cpus_per_task=cpus, slurm_job_name="benchmark")
    executor.update_parameters(slurm_setup=setup, slurm_array_parallelism=parallel, slurm_additional_parameters=flags)
    return lambda runs: submit_and_wait(executor, runs)


def submit_and_wait(executor, runs):
    arrays, news, started = [], None, time.monotonic()
    try:
        for first in range(0, len(runs), ARRAY_SIZE):
            jobs = executor.map_array(execute_one, runs[first : first + ARRAY_SIZE])
            arrays.append(jobs[0].job_id.split("_")[0])
            print(f"submitted job {arrays[-1]}: {len(jobs)} tasks, logs in {executor.folder}", flush=True)
    except Exception as error:  # whatever sbatch says
        raise Refused(f"Slurm took no job: {last_words(str(error))} (jobs before: {arrays})") from None
    queue = ["squeue", "--noheader", "--format=%i", f"--jobs={','.join(arrays)}"]
    try:
        while True:
            listed = subprocess.run(queue, capture_output=True, text=True)
            counts = Counter(map(state, runs))
            news = progress(counts["finished"], len(runs), counts["running"], counts["failed"], started, news)
            # an old job is forgotten; other errors, such as a controller that restarts, pass
            if not listed.stdout.strip() and (not listed.returncode or "Invalid job id" in listed.stderr):
                return [(run, reason) for run in runs if (reason := failure(run, read_record(run)))], None
            time.sleep(SLURM_POLL_SECONDS)
    except KeyboardInterrupt:
        print(f"no longer waiting; the tasks go on, end them with: scancel {' '.join(arrays)}")
        return [], signal.SIGINT


def state(run):
    """`status` of a run, or "running" while a process holds its lock"""
    found = status(run)
    held = found != "finished" and run.beside(".lock").exists() and hold(run.beside(".lock"))
    if held:
        held.close()
    return "running" if held is None else found
