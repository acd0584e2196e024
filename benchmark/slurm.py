"""Runs as tasks of Slurm job arrays, through submitit. The folder is the same as with local workers.

The folder of the runs, this repository and the virtual environment must be seen by all nodes under the same paths, and
locks (flock) must hold between nodes, as they do on NFS 4 and Lustre mounted with -o flock.
"""

import shlex
import signal
import subprocess
import time

from benchmark.progress import fraction, progress, state
from benchmark.runner import execute_one, failure
from benchmark.runs import ROOT, Refused

POLL_SECONDS = 5
LINE_SECONDS = 60
ARRAY_SIZE = 500  # tasks; Slurm's own limit, MaxArraySize, is 1001 by default


def slurm_executor(out, minutes, memory, cpus, parallel, more):
    """A function (runs, total) -> (failures, signal), like runner.execute_here, that submits the runs and waits.

    minutes, memory (GB) and cpus are of a task, `parallel` how many run at once, `more` KEY=VALUE flags of sbatch.
    Raises Refused without submitit or Slurm.
    """
    try:
        import submitit
    except ImportError:
        raise Refused("--executor slurm needs submitit: python -m pip install submitit") from None
    try:
        executor = submitit.AutoExecutor(folder=str(out / ".slurm"), cluster="slurm")
    except RuntimeError as error:  # no sbatch here
        raise Refused(f"--executor slurm needs a machine that can submit jobs: {error}") from None
    flags = {}
    for word in more or ():
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise Refused(f"--slurm {word}: give KEY=VALUE, a long flag of sbatch such as account=abc")
        flags[key] = value
    executor.update_parameters(
        timeout_min=minutes,
        mem_gb=memory,
        cpus_per_task=cpus,
        slurm_job_name="benchmark",
        slurm_array_parallelism=parallel,
        slurm_setup=[f"export PYTHONPATH={shlex.quote(str(ROOT))}"],  # tasks start in whatever folder
        slurm_additional_parameters=flags,
    )
    return lambda runs, total: submit_and_wait(executor, runs, total)


def submit_and_wait(executor, runs, total):
    """Returns ([(run, reason)] of the runs that did not finish, the signal that ended the waiting or None)."""
    arrays = []
    try:
        for start in range(0, len(runs), ARRAY_SIZE):
            jobs = executor.map_array(execute_one, runs[start : start + ARRAY_SIZE])
            arrays.append(jobs[0].job_id.split("_")[0])
            print(f"submitted job {arrays[-1]}: {len(jobs)} tasks, logs in {executor.folder}", flush=True)
    except Exception as error:  # whatever sbatch says
        lines = str(error).strip().splitlines() or [repr(error)]
        cancel = f" (submitted before: {' '.join(arrays)})" if arrays else ""
        raise Refused(f"Slurm took no job: {lines[-1]}{cancel}") from None
    started, printed = time.monotonic(), 0.0
    waiting = set(arrays)
    try:
        while waiting:
            waiting -= {array for array in waiting if has_ended(array)}
            if time.monotonic() - printed > LINE_SECONDS or not waiting:
                states = [state(run) for run in runs]
                fractions = [fraction(run) for run, found in zip(runs, states, strict=True) if found == "running"]
                ended = states.count("finished")
                rest = len(runs) - ended - len(fractions)
                print(progress(len(runs), total, rest, fractions, started, 0), flush=True)
                printed = time.monotonic()
            if waiting:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print(f"no longer waiting; the tasks go on, end them with: scancel {' '.join(sorted(waiting))}")
        return [], signal.SIGINT
    return [(run, reason) for run in runs if (reason := failure(run))], None


def has_ended(array):
    """Whether Slurm knows no more waiting or running task of a job array."""
    command = ["squeue", "--noheader", "--format=%i", f"--jobs={array}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:  # an old job is forgotten; other errors, such as a controller that restarts, pass
        return "Invalid job id" in done.stderr
    return not done.stdout.strip()
