"""Faults done to runs of the scripts, and what must become of them. For test_resume.py and fault_report.py.

Every run is a process of its own, which can be killed. It is forked from a server that has imported torch already: that
saves seconds a run. FAULTS lists (fault, how it is done, function); a function takes a Bench, does the fault to one run
and returns the outcome in words (None: not for this script), or raises AssertionError where it is another than due.
"""

import csv
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from helpers import CONTROL, ROOT, SMALL, flags, load, read_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LLM = ("grpo_llm", "vaco_llm")
SCRIPTS = (*CONTROL, *LLM)
UPDATES, LONG = 6, 20  # of a run, and of one that is killed at random moments
TINY = {"num_terms": 2, "ops": "+", "n_embd": 32, "warm_start_steps": 100, "learning_rate": 1e-3, "num_prompts": 4}
TINY |= {"num_generations": 4, "num_minibatches": 2, "eval_problems": 16, "pass_k": 2, "kl_coef": 0.1}
TIMING = ("SPS", "seconds", "tokens_per_second")  # how the names of the columns that measure time end

logging.getLogger("tensorboard").setLevel(logging.ERROR)  # its reader tells of every purge
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["faults", "toy_envs", "torch._dynamo", "torch.utils.tensorboard", *SCRIPTS])


class Process:
    """NAME.py WORDS in the folder cwd, forked. `fault` is called in it before it starts, with the script's module."""

    def __init__(self, name: str, words: list, cwd: Path, fault: Callable | None = None):
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))  # of the server, once
        self.log = cwd / "log.txt"
        self.log.touch()
        self.process = SERVER.Process(target=run_main, args=(name, [str(x) for x in words], cwd, fault))
        self.process.start()

    def end(self, timeout: float = 120) -> tuple[int, str]:
        """Waits for the end: (exit code, stderr). A negative code is the signal that killed it."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"no end after {timeout} s: {self.log.read_text()}")
        return self.process.exitcode, self.log.read_text()


def run_main(name: str, words: list[str], cwd: Path, fault: Callable | None) -> None:
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open("log.txt", os.O_WRONLY | os.O_TRUNC), 2)
    sys.argv = [str(ROOT / f"{name}.py"), *words]
    # TensorBoard reads the files of a run by name: second of the start, host, process number as text. A forked process
    # resumes within the second in which the one before began, which no other can; it waits until its name comes last
    folder = Path(words[words.index("--resume") + 1]) if "--resume" in words else Path("none")
    last = max((path.name for path in folder.glob("events.out.tfevents.*")), default="")
    while f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}." < last:
        time.sleep(0.02)
    script = load(name)
    if fault:
        fault(script)
    script.main()


@dataclass(frozen=True)
class After:
    """After so many updates of the process, before the checkpoint that is due: what(folder of the run)."""

    updates: int
    what: Callable

    def __call__(self, script) -> None:
        write, rows = script.Log.write, []

        def counting(log, table, row):
            write(log, table, row)
            rows.extend([None] * (table == "metrics"))
            if len(rows) == self.updates:
                self.what(log.run_dir)

        script.Log.write = counting


def send_itself(number: int, run_dir: Path) -> None:
    os.kill(os.getpid(), number)


KILL = partial(send_itself, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------ comparison


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [{name: x for name, x in row.items() if not name.endswith(TIMING)} for row in csv.DictReader(file)]


def read_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves as its own reader shows them: {tag: [(step, value)]}."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(TIMING)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def differences(a: Path, b: Path) -> list[str]:
    """The files of two finished runs that differ, bit by bit, in more than time."""
    models = read_model(a), read_model(b)
    same = models[0].keys() == models[1].keys() and all(
        torch.equal(x, models[1][name]) for name, x in models[0].items()
    )
    found = [] if same else ["model.pt"]
    tables = {path.name for folder in (a, b) for path in folder.glob("*.csv")}
    found += [name for name in sorted(tables) if read_table(a / name) != read_table(b / name)]
    return found + ([] if read_curves(a) == read_curves(b) else ["TensorBoard"])


# ---------------------------------------------------------------------------------------------------------- faults


class Bench:
    """One script, and an empty folder for each of its runs."""

    def __init__(self, name: str, home: Path, rng: random.Random):
        self.name, self.home, self.rng = name, home, rng
        self.made = {}

    def folder(self) -> Path:
        folder = self.home / str(len(list(self.home.iterdir())))
        folder.mkdir(parents=True)
        return folder

    def words(self, updates: int = UPDATES, **changes) -> list[str]:
        """Flags of a run of less than a second. Under lag, a checkpoint after every update; episodes end within a
        rollout and go on into the next."""
        args = {"lag": 3, "checkpoint_every": 1, "num_evals": 2, "seed": 5}
        if self.name in LLM:
            args |= TINY | {"warm_start_dir": self.home / "warm", "num_updates": updates} | changes
        else:
            args |= SMALL | {"env_id": "toy_envs:Noise-v0"} | changes
            args["total_timesteps"] = updates * args["num_envs"] * args["num_steps"]
        return flags(**args)

    def begin(self, fault: Callable | None = None, **changes) -> tuple[int, str, Path]:
        """(exit code, stderr, folder of the run)"""
        folder = self.folder()
        return *Process(self.name, [*self.words(**changes), "--run-dir", "run"], folder, fault).end(), folder / "run"

    def straight(self, **changes) -> Path:
        """The undisturbed run of these settings, made once."""
        key = str(changes)
        if key not in self.made:
            code, err, self.made[key] = self.begin(**changes)
            assert code == 0, err
        return self.made[key]

    def resume(self, run_dir: Path) -> tuple[int, str]:
        return Process(self.name, ["--resume", run_dir], self.folder()).end()

    def same_end(self, run_dir: Path, **changes) -> str:
        """Resumes, and compares with the undisturbed run."""
        code, err = self.resume(run_dir)
        assert (code, err) == (0, "")
        assert differences(self.straight(**changes), run_dir) == []
        return "resumed to the same end"


def killed_often(moment: Callable, bench: Bench) -> str:
    """Killed and resumed three times, then resumed to its end. Without a checkpoint it is started again."""
    folder = bench.folder()
    for _ in range(3):
        resumed = (folder / "run" / "checkpoint.pt").exists()
        if not resumed:
            shutil.rmtree(folder / "run", ignore_errors=True)
        words = ["--resume", "run"] if resumed else [*bench.words(LONG), "--run-dir", "run"]
        process = Process(bench.name, words, folder)
        moment(bench.rng, process.process, folder / "run")
        process.process.kill()
        assert process.end()[0] in (0, -signal.SIGKILL)
    if (folder / "run" / "checkpoint.pt").exists():
        return bench.same_end(folder / "run", updates=LONG)
    return "killed before the first checkpoint"


def at_random(rng: random.Random, process, run_dir: Path) -> None:
    while process.is_alive() and not list(run_dir.glob("*.csv")):  # a warm start comes first
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.6))


def in_a_write(rng: random.Random, process, run_dir: Path) -> None:
    """While the unfinished file of one of the next ten checkpoints exists."""
    writes, before = rng.randrange(1, 11), False
    while writes and process.is_alive():
        now = any(run_dir.glob("*.partial"))
        writes -= now and not before
        before = now


def stopped(number: int, bench: Bench) -> str:
    code, _, run_dir = bench.begin(After(bench.rng.randrange(2, UPDATES), partial(send_itself, number)))
    assert code == -number
    return bench.same_end(run_dir)


def half_lines(bench: Bench) -> str:
    """Each table ends in a part of a line, of a later update."""
    _, _, run_dir = bench.begin(After(3, KILL))
    for path in run_dir.glob("*.csv"):
        lines = (bench.straight() / path.name).read_text().splitlines()
        with open(path, "a") as file:
            file.write(lines[-1][: bench.rng.randrange(1, len(lines[-1]))])
    return bench.same_end(run_dir)


def limit_files(run_dir: Path) -> None:
    """No file of the process may grow beyond metrics.csv and a part of its next row. Any user may set that."""
    size = (run_dir / "metrics.csv").stat().st_size + 100
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def no_room(bench: Bench) -> str:
    code, _, run_dir = bench.begin(After(3, limit_files))
    run_dir = run_dir.rename(run_dir.parent / "elsewhere")
    assert code == 1
    return f"exit code 1; moved to where room is {bench.same_end(run_dir)}"


def finished(bench: Bench) -> str:
    return bench.same_end(Path(shutil.copytree(bench.straight(), bench.folder() / "run")))


class Trap:
    """What a pickle of it does when it is loaded without care: make a file."""

    def __reduce__(self):
        return Path.touch, (Path("trap"),)


def bad_checkpoint(what: str, bench: Bench) -> str:
    _, _, run_dir = bench.begin(After(3, KILL))
    path = run_dir / "checkpoint.pt"
    if what == "code":
        torch.save(torch.load(path, weights_only=True) | {"trap": Trap()}, path)
    elif what == "cut":
        os.truncate(path, bench.rng.randrange(path.stat().st_size))
    else:
        path.unlink()
    code, err = bench.resume(run_dir)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert not list(bench.home.rglob("trap"))
    return "refused in a line" + ", no code ran" * (what == "code")


def does_not_replay(bench: Bench) -> str | None:
    if bench.name in LLM:
        return None
    _, _, run_dir = bench.begin(After(3, KILL), env_id="toy_envs:Unseeded-v0")
    code, err = bench.resume(run_dir)
    assert (code, err) == (0, "an environment does not replay: from here the run is another than before\n")
    return "said in a line, the run goes on"


FAULTS = [
    ("`kill -9` three times", "up to 0.6 s after the first row of a table", partial(killed_often, at_random)),
    ("`kill -9` three times", "while a checkpoint is written", partial(killed_often, in_a_write)),
    ("`kill -9`", "after an update, before its checkpoint", partial(stopped, signal.SIGKILL)),
    ("SIGTERM", "after an update, before its checkpoint", partial(stopped, signal.SIGTERM)),
    ("tables end in half a line", "written behind what a killed run left", half_lines),
    ("there is no room", "RLIMIT_FSIZE, in the middle of a row of metrics.csv", no_room),
    ("a finished run is resumed", "--resume", finished),
    ("the checkpoint is cut", "at a random byte", partial(bad_checkpoint, "cut")),
    ("the checkpoint is lost", "removed", partial(bad_checkpoint, "lost")),
    ("a checkpoint with code in it", "a pickle that would make a file", partial(bad_checkpoint, "code")),
    ("the environment does not replay", "unseeded observations (control)", does_not_replay),
]
