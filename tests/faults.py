"""Faults done to runs of the scripts, and the comparison of what is left. For test_resume.py and fault_report.py.

Every run is a process of its own, which can be killed. It is forked from a server that has imported torch already: that
saves seconds a run. A `fault` is called in the process before it starts, with the script's module.
"""

import csv
import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from helpers import CONTROL, ROOT, SMALL, flags, load, read_json, read_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LLM = ("grpo_llm", "vaco_llm")
SCRIPTS = (*CONTROL, *LLM)
UPDATES = 6
TINY = {"num_terms": 2, "ops": "+", "n_layer": 1, "n_head": 2, "n_embd": 32, "warm_start_steps": 100}
TINY |= {"warm_start_learning_rate": 0.01, "learning_rate": 1e-3, "num_prompts": 4, "num_generations": 4}
TINY |= {"num_minibatches": 2, "eval_problems": 16, "pass_k": 2, "kl_coef": 0.1, "warm_start_dir": "warm"}
TIMING = ("SPS", "seconds", "tokens_per_second")  # how the names of the columns that measure time end

logging.getLogger("tensorboard").setLevel(logging.ERROR)  # its reader tells of every purge

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["faults", "toy_envs", "torch._dynamo", "torch.utils.tensorboard", *SCRIPTS])


def small(name: str, updates: int = UPDATES, **changes) -> list[str]:
    """Flags of a run of less than a second, but for its folder. Under lag, a checkpoint after every update; episodes
    end within a rollout and go on into the next."""
    args = SMALL | {"env_id": "toy_envs:Noise-v0"} if name in CONTROL else TINY
    args = args | {"lag": 3, "checkpoint_every": 1, "num_evals": 2, "seed": 5} | changes
    if name in LLM:
        return flags(num_updates=updates, **args)
    return flags(total_timesteps=updates * args["num_envs"] * args["num_steps"], **args)


# ------------------------------------------------------------------------------------------------------- processes


@dataclass
class Ended:
    """A process that has ended. A negative code is the signal that killed it."""

    code: int
    out: str
    err: str


class Process:
    """NAME.py WORDS in the folder cwd, forked."""

    def __init__(self, name: str, words: list, cwd: Path, fault: Callable | None = None):
        logs = cwd / "logs"
        logs.mkdir(exist_ok=True)
        number = len(list(logs.iterdir())) // 2
        self.logs = [logs / f"{number}.{stream}" for stream in ("out", "err")]
        for path in self.logs:
            path.touch()
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))  # of the server, once
        words = [str(x) for x in words]
        self.process = SERVER.Process(target=run_main, args=(name, words, cwd, self.logs, fault))
        self.process.start()

    def alive(self) -> bool:
        return self.process.is_alive()

    def send(self, number: int) -> None:
        if self.alive():
            os.kill(self.process.pid, number)

    def end(self, timeout: float = 120) -> Ended:
        """Waits for the end. A run that hangs is killed, and that is an error."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"no end after {timeout} s: {self.logs[1].read_text()}")
        return Ended(self.process.exitcode, *(path.read_text() for path in self.logs))


def run_main(name: str, words: list[str], cwd: Path, logs: list[Path], fault: Callable | None) -> None:
    for stream, path in zip((1, 2), logs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    os.chdir(cwd)
    sys.argv = [str(ROOT / f"{name}.py"), *words]
    wait_for_order(words)
    script = load(name)
    if fault:
        fault(script)
    sys.exit(script.main())


def wait_for_order(words: list[str]) -> None:
    """TensorBoard reads the files of a run by name: second of the start, host, process number as text. A forked process
    resumes within the second in which the one before began, which no other can; it waits until its name comes last."""
    folder = Path(words[words.index("--resume") + 1]) if "--resume" in words else Path("none")
    last = max((path.name for path in folder.glob("events.out.tfevents.*")), default="")
    while f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}." < last:
        time.sleep(0.02)


def run(name: str, *words, cwd: Path, fault: Callable | None = None) -> Ended:
    return Process(name, words, cwd, fault).end()


# ---------------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class After:
    """After so many updates of the process, before the checkpoint that is due: what(folder of the run)."""

    updates: int
    what: Callable

    def __call__(self, script) -> None:
        log, rows = script.RunFiles.log, []

        def counting(files, *args, **more):
            log(files, *args, **more)
            rows.append(None)
            if len(rows) == self.updates:
                self.what(files.dir)

        script.RunFiles.log = counting


def signal_itself(numbers: tuple[int, ...], run_dir: Path) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


KILL, TERMINATE, INTERRUPT = (partial(signal_itself, (x,)) for x in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
TERMINATE_TWICE = partial(signal_itself, (signal.SIGTERM, signal.SIGTERM))


def fill_disk(run_dir: Path) -> None:
    """Another program takes all the room that is left."""
    with open(run_dir.parent / "filler", "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def limit_files(run_dir: Path) -> None:
    """No file of the process may grow beyond 16 KiB, which every checkpoint does: any user may set that."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))


class SmallDisk:
    """A disk of its own, of 8 MiB, at the path. None where this user may not mount one."""

    def __init__(self, path: Path, *options: str):
        path.mkdir()
        options = ",".join(("size=8m", *options))
        self.path, command = path, ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        self.mounted = subprocess.run(command, capture_output=True).returncode == 0 if shutil.which("mount") else False

    def __enter__(self):
        return self if self.mounted else None

    def __exit__(self, *error):
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def overwrite(path: Path, rng: random.Random) -> None:
    """A block of zeros, as after a power cut."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data)


class Trap:
    """What a pickle of it does when it is loaded without care: make a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def set_trap(checkpoint: Path, path: Path) -> None:
    """The checkpoint as it is, with a line of code in it that makes the file `path`."""
    saved = torch.load(checkpoint, weights_only=True)
    torch.save(saved | {"trap": Trap(path)}, checkpoint)


# ------------------------------------------------------------------------------------------------ killed and resumed


@dataclass
class Kills:
    """What a series of kills met."""

    done: int = 0
    too_early: int = 0  # before the first checkpoint: the run had to start again
    in_write: int = 0  # while a checkpoint was being written
    finished: int = 0  # runs brought to their end


def kill_and_resume(name: str, cwd: Path, words: list, times: int, moment: Callable, check: Callable) -> Kills:
    """Kills and resumes a run until it has been killed so many times and has finished; a run that finishes before is
    checked by check(folder) and another one is begun. moment(process, folder) waits for the time to kill."""
    kills, number, folder = Kills(), 0, None
    while folder is not None or kills.done < times or not kills.finished:
        if folder is None:
            number += 1
            folder, start = cwd / f"run{number}", [*words, "--run-dir", cwd / f"run{number}"]
        process = Process(name, start, cwd)
        if kills.done < times:
            moment(process, folder)
            process.send(signal.SIGKILL)
        ended = process.end()
        if ended.code == -signal.SIGKILL:
            kills.done += 1
            kills.in_write += (folder / "checkpoint.partial").exists()
            start = ["--resume", folder]
        elif ended.code == 2 and "no checkpoint" in ended.err:
            assert not list(folder.glob("checkpoint*.pt"))
            kills.too_early += 1
            folder = None
        else:
            assert ended.code == 0, ended
            check(folder)
            kills.finished += 1
            folder = None
    return kills


def at_random(rng: random.Random, longest: float, process: Process, folder: Path) -> None:
    while process.alive() and not folder.exists():  # a warm start comes first
        time.sleep(0.001)
    time.sleep(rng.uniform(0, longest))


def in_a_write(rng: random.Random, process: Process, folder: Path) -> None:
    """While checkpoint.partial exists, of one of the next ten checkpoints."""
    writes, before, path = rng.randrange(1, 11), False, folder / "checkpoint.partial"
    while writes and process.alive():
        now = path.exists()
        writes -= now and not before
        before = now


# ------------------------------------------------------------------------------------------------------ comparison


def same(a, b) -> bool:
    """Bit for bit, of nested dicts and lists of tensors, numbers and strings."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: x for name, x in row.items() if not name.endswith(TIMING)} for row in rows]


def read_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves as its own reader shows them: {tag: [(step, value)]}."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(TIMING)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def read_checkpoint(run_dir: Path) -> dict:
    """The last checkpoint without what it says of time, names and sizes of files."""
    saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    for name in ("name", "sizes", "seconds", "eval_seconds"):
        saved["files"].pop(name)
    saved["args"].pop("run_dir")
    for batch, _ in saved.get("queue", ()):
        batch.pop("seconds")
    return saved


def read_result(run_dir: Path) -> dict:
    result = read_json(run_dir / "result.json")
    return {name: x for name, x in result.items() if name not in ("sps", "peak_rss_mb")}


def differences(a: Path, b: Path) -> list[str]:
    """The files of two finished runs that differ in more than time. Checkpoints only where both are of one update."""
    found = [name for name in ("model.pt",) if not same(read_model(a), read_model(b))]
    tables = {path.name for folder in (a, b) for path in folder.glob("*.csv")}
    found += [name for name in sorted(tables) if read_table(a / name) != read_table(b / name)]
    if (a / "samples.jsonl").exists() and (a / "samples.jsonl").read_bytes() != (b / "samples.jsonl").read_bytes():
        found.append("samples.jsonl")
    found += [] if read_result(a) == read_result(b) else ["result.json"]
    found += [] if read_curves(a) == read_curves(b) else ["TensorBoard"]
    checkpoints = read_checkpoint(a), read_checkpoint(b)
    if checkpoints[0]["iteration"] == checkpoints[1]["iteration"] and not same(*checkpoints):
        found.append("checkpoint.pt")
    return found
