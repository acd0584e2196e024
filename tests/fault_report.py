"""Does every fault to real runs of the four scripts, counts what became of them, and writes docs/reliability.md.

python tests/fault_report.py [--times 10] [--out docs/reliability.md]

Each try is a process of its own. Where a run can go on, it is resumed, and all its files are compared with those of a
run that nothing happened to. Exits with 1 if any try ended in another way than it must.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import faults
from faults import INTERRUPT, KILL, SCRIPTS, TERMINATE, TERMINATE_TWICE, After, Ended, differences, run, small
from helpers import CONTROL, ROOT, read_json

TEXT = """# Faults, and what becomes of a run

Every script writes `checkpoint.pt` before its first update and then every `--checkpoint-every` updates; the checkpoint
before it stays beside it as `checkpoint_previous.pt`. A run that was killed, interrupted or had no room goes on with

    python ppo_continuous.py --resume runs/the-folder-of-the-run

and takes no other flag: the checkpoint holds the settings. What is guaranteed, and tried below:

- A resumed run ends in the same files, bit for bit, as one that nothing happened to: parameters, tables, TensorBoard
  curves without gaps or doubled points, random streams. Only the columns that measure time differ. This holds on one
  machine with one version of everything; where that changed, the run says so.
- A checkpoint is there whole or not at all. A damaged one is noticed by its checksums, and the one before is taken.
- `SIGINT` (Ctrl-C) and `SIGTERM` stop a run after its current update, with a checkpoint, and exit codes 130 and 143.
- Whatever cannot go on says why in one line: exit code 1 for a run that failed, 2 for one that was refused.
- Loading a checkpoint runs no code from it.

An environment is brought back by playing its episode again from its random state. One whose steps depend on anything
else, such as a clock, cannot be: the run says so and goes on from where the replay led.

Below, a run of {updates} updates under lag 3 with a checkpoint after every one, for the kills at random moments of
{long} updates. "The same end" means that all files were equal to those of an undisturbed run. The fault is done by the
system itself: real signals, a real disk of 8 MiB that fills up, real bytes changed.

| fault | how it is done | times | outcome |
|---|---|---|---|
{rows}

{total} tries, {wrong} of them with another outcome than is due.{listed}

Made by `{command}` in {minutes:.0f} minutes, at commit {commit},
with {versions},
on {machine}.
"""
LONG = 20  # updates of the runs that are killed at random moments


# Each fault is a function of a bench that returns what became of one try, and raises AssertionError where it is wrong.


@dataclass
class Bench:
    """One script, and an empty folder for each try."""

    name: str
    home: Path
    rng: random.Random
    tries: int = 0
    made: dict = field(default_factory=dict)

    def folder(self) -> Path:
        self.tries += 1
        folder = self.home / str(self.tries)
        folder.mkdir()
        if (self.home / "warm").exists():  # so that the language models start at once
            shutil.copytree(self.home / "warm", folder / "warm")
        return folder

    def straight(self, **changes) -> Path:
        """The undisturbed run of these settings, made once."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self.made:
            folder = self.folder()
            assert run(self.name, *small(self.name, **changes), "--run-dir", folder / "run", cwd=folder).code == 0
            self.made[key] = folder / "run"
            if (folder / "warm").exists() and not (self.home / "warm").exists():
                shutil.copytree(folder / "warm", self.home / "warm")
        return self.made[key]

    def start(self, fault: Callable | None = None, run_dir: Path | None = None, **changes) -> tuple[Ended, Path]:
        self.straight()
        folder = self.folder()
        run_dir = run_dir or folder / "run"
        words = [*small(self.name, **changes), "--run-dir", run_dir]
        return run(self.name, *words, cwd=folder, fault=fault), run_dir

    def resume(self, run_dir: Path) -> Ended:
        return run(self.name, "--resume", run_dir, cwd=self.home)

    def same_end(self, run_dir: Path, **changes) -> str:
        """Resumes, and compares with the undisturbed run."""
        ended = self.resume(run_dir)
        assert ended.code == 0, ended
        assert "Traceback" not in ended.err, ended
        found = differences(self.straight(**changes), run_dir)
        assert found == [], f"other {', '.join(found)}"
        notice = "damage named, " if "is damaged" in ended.err else ""
        return f"{notice}resumed to the same end"


def one_line(ended: Ended, code: int, *words: str) -> None:
    lines = [line for line in ended.err.splitlines() if "Warning" not in line and "astype" not in line]
    assert ended.code == code, ended
    assert len(lines) == 1, ended.err
    assert all(word in lines[0] for word in words), lines


def stopped(what: Callable, code: int, bench: Bench) -> str:
    ended, run_dir = bench.start(After(bench.rng.randrange(1, faults.UPDATES), what))
    assert ended.code == code, ended
    assert "Traceback" not in ended.err, ended
    return f"exit code {code}, {bench.same_end(run_dir)}" if code > 0 else bench.same_end(run_dir)


def killed_often(moment: Callable, times: int, bench: Bench) -> dict[str, int]:
    reference, folder, wrong = bench.straight(updates=LONG), bench.folder(), []

    def check(run_dir):
        wrong.extend(differences(reference, run_dir))

    words = small(bench.name, updates=LONG)
    kills = faults.kill_and_resume(bench.name, folder, words, times, partial(moment, bench.rng), check)
    assert not wrong, f"other {', '.join(wrong)}"
    found = {"resumed to the same end": kills.done - kills.too_early}
    found |= {"before the first checkpoint: refused in a line": kills.too_early}
    return {name: count for name, count in found.items() if count}


def damaged(damage: Callable, both: bool, bench: Bench) -> str:
    ended, run_dir = bench.start(After(3, KILL))
    names = ["checkpoint.pt", "checkpoint_previous.pt"] if both else ["checkpoint.pt"]
    for name in names:
        damage(run_dir / name, bench.rng)
    if not both:
        return bench.same_end(run_dir)
    ended = bench.resume(run_dir)
    if ended.code == 0:  # the change was in bytes that mean nothing
        assert differences(bench.straight(), run_dir) == []
        return "resumed to the same end"
    assert ended.code == 2, ended
    assert "no checkpoint in it can be read" in ended.err.splitlines()[-1], ended
    return "refused, both named"


def trapped(bench: Bench) -> str:
    _, run_dir = bench.start(After(3, KILL))
    for path in run_dir.glob("checkpoint*.pt"):
        faults.set_trap(path, run_dir.parent / "trap")
    ended = bench.resume(run_dir)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err, ended
    assert not (run_dir.parent / "trap").exists(), "code of the checkpoint ran"
    return "refused, no code ran"


def full_disk(fault: Callable, every: int, bench: Bench) -> str:
    folder = bench.folder()
    with faults.SmallDisk(folder / "disk") as disk:
        if fault is faults.fill_disk and not disk:
            return "not tried: this user may not mount a disk"
        settings = {"updates": LONG, "checkpoint_every": every}
        ended, run_dir = bench.start(After(3, fault), folder / "disk" / "run", **settings)
        one_line(ended, 1, "failed: update", "make room, then --resume")
        (folder / "disk" / "filler").unlink(missing_ok=True)
        return f"exit code 1, one line; with room again {bench.same_end(run_dir, **settings)}"


def not_finite(env_id: str, bench: Bench) -> str:
    ended, run_dir = bench.start(env_id=f"toy_envs:{env_id}-v0")
    one_line(ended, 1, "failed: update", "not finite")
    assert read_json(run_dir / "result.json")["status"] == "failed"
    assert not (run_dir / "model.pt").exists()
    return "exit code 1, one line that names the quantity, result.json says failed"


def raising(bench: Bench) -> str:
    ended, run_dir = bench.start(env_id="toy_envs:RaisesInStep-v0", num_evals=0)
    assert ended.code == 1, ended
    assert "RuntimeError: a fault of the environment" in ended.err
    assert read_json(run_dir / "result.json")["status"] == "failed"
    return "exit code 1, its own traceback, result.json says failed"


def diverging(bench: Bench) -> str:
    changes = {"learning_rate": 1e30} if bench.name in CONTROL else {"learning_rate": 1e38, "updates": 20}
    ended, run_dir = bench.start(**changes)
    one_line(ended, 1, "failed: update", "not finite")
    assert read_json(run_dir / "result.json")["status"] == "failed"
    return "exit code 1, one line that names the quantity, result.json says failed"


def unseeded(bench: Bench) -> str:
    _, run_dir = bench.start(After(3, KILL), env_id="toy_envs:Unseeded-v0")
    ended = bench.resume(run_dir)
    assert ended.code == 0, ended
    assert "does not replay" in ended.err, ended
    return "said for each environment, the run goes on"


def unwritable(bench: Bench) -> str:
    folder = bench.folder()
    with faults.SmallDisk(folder / "disk", "ro") as disk:
        if not disk:
            os.chmod(folder / "disk", 0o555)
        ended, _ = bench.start(run_dir=folder / "disk" / "run")
    one_line(ended, 2, "cannot be used")
    return "refused in a line"


def moved(bench: Bench) -> str:
    _, run_dir = bench.start(After(3, KILL))
    elsewhere = run_dir.rename(run_dir.parent / "elsewhere")
    return bench.same_end(elsewhere)


def refused(what: str, bench: Bench) -> str:
    if what == "finished":
        run_dir = bench.straight()
    elif what == "none":
        run_dir = bench.folder()
    else:
        _, run_dir = bench.start(After(3, KILL))
    name = SCRIPTS[SCRIPTS.index(bench.name) - 1] if what == "other" else bench.name
    one_line(run(name, "--resume", run_dir, cwd=bench.folder()), 2, "--resume")
    return "refused in a line"


FAULTS = [  # fault, how it is done, function of a bench; those in SERIES count their own tries
    (
        "`kill -9` at a random moment",
        "up to 0.6 s after the folder appears, then resumed and killed again",
        faults.at_random,
    ),
    ("`kill -9` while a checkpoint is written", "while its unfinished file exists", faults.in_a_write),
    ("`kill -9` after an update", "before its checkpoint", partial(stopped, KILL, -9)),
    ("SIGTERM", "after a random update", partial(stopped, TERMINATE, 143)),
    ("SIGINT", "after a random update", partial(stopped, INTERRUPT, 130)),
    ("SIGTERM twice", "after a random update", partial(stopped, TERMINATE_TWICE, 143)),
    ("a bit of the checkpoint flips", "a random one", partial(damaged, faults.flip_bit, False)),
    (
        "a block of the checkpoint is lost",
        "512 bytes of zeros at a random place",
        partial(damaged, faults.overwrite, False),
    ),
    ("the checkpoint is cut", "at a random byte", partial(damaged, faults.truncate, False)),
    ("the checkpoint is lost", "removed", partial(damaged, faults.remove, False)),
    ("both checkpoints are damaged", "cut at random bytes", partial(damaged, faults.truncate, True)),
    ("a checkpoint with code in it", "a pickle that would make a file", trapped),
    ("the folder is moved", "renamed before the resume", moved),
    ("the disk fills up", "a disk of 8 MiB, during update 3", partial(full_disk, faults.fill_disk, 1)),
    (
        "the disk fills up between checkpoints",
        "the same, without further checkpoints",
        partial(full_disk, faults.fill_disk, 0),
    ),
    ("files may not grow", "RLIMIT_FSIZE of 16 KiB, during update 3", partial(full_disk, faults.limit_files, 1)),
    ("the folder is not writable", "a disk mounted read-only, or no permission", unwritable),
    ("a finished run is resumed", "--resume", partial(refused, "finished")),
    ("a folder without a run is resumed", "--resume", partial(refused, "none")),
    ("another script's run is resumed", "--resume", partial(refused, "other")),
    ("training diverges", "a learning rate of 1e30 or more", diverging),
]
OF_ENVIRONMENTS = [
    ("a reward is NaN", "an environment's 11th step", partial(not_finite, "NanReward")),
    ("a reward is infinite", "1e39, beyond float32", partial(not_finite, "HugeReward")),
    ("an observation is NaN", "an environment's 11th step", partial(not_finite, "NanObservation")),
    ("the environment raises", "RuntimeError in its 11th step", raising),
    ("the environment does not replay", "unseeded observations", unseeded),
]
SERIES = (faults.at_random, faults.in_a_write)


def try_fault(how: Callable, times: int, bench: Bench) -> tuple[dict[str, int], list[str]]:
    """({outcome: how often}, what went wrong)."""
    outcomes, wrong = {}, []
    if how in SERIES:
        moment = (lambda rng, *rest: faults.at_random(rng, 0.6, *rest)) if how is faults.at_random else how
        try:
            outcomes = killed_often(moment, times, bench)
        except AssertionError as error:
            wrong = [str(error).splitlines()[0]] * times
        return outcomes, wrong
    for _ in range(times):
        try:
            outcome = how(bench)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        except (AssertionError, TimeoutError) as error:
            wrong.append(str(error).splitlines()[0] if str(error) else "another outcome")
    return outcomes, wrong


def report(times: int, scripts: list[str], command: str) -> tuple[str, int]:
    """The page, and how many tries went wrong."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    start, rows, tries, failures = time.monotonic(), [], 0, []
    with tempfile.TemporaryDirectory() as home:
        benches = [Bench(name, Path(home) / name, random.Random(0)) for name in scripts]
        for bench in benches:
            bench.home.mkdir()
        for fault, how, function in FAULTS + OF_ENVIRONMENTS:
            total, count = {}, 0
            for bench in benches:
                if (fault, how, function) in OF_ENVIRONMENTS and bench.name not in CONTROL:
                    continue
                outcomes, wrong = try_fault(function, times, bench)
                count += sum(outcomes.values()) + len(wrong)
                for name, x in outcomes.items():
                    total[name] = total.get(name, 0) + x
                failures += [f"{fault}, {bench.name}: {x}" for x in wrong]
                if wrong:
                    total["**wrong**"] = total.get("**wrong**", 0) + len(wrong)
                print(f"{fault:45} {bench.name:16} {outcomes} {wrong}", flush=True)
            tries += count
            told = "; ".join(f"{name}: {x}" if len(total) > 1 else name for name, x in total.items())
            rows.append(f"| {fault} | {how} | {count} | {told} |")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "gymnasium", "tensorboard"))
    facts = {"rows": "\n".join(rows), "updates": faults.UPDATES, "long": LONG, "total": tries, "wrong": len(failures)}
    facts |= {"listed": "".join(f"\n- {x:.300}" for x in sorted({*failures})), "command": command, "commit": commit}
    facts |= {"versions": f"Python {platform.python_version()}, {packages}", "machine": platform.platform()}
    return TEXT.format(**facts, minutes=(time.monotonic() - start) / 60), len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10, help="tries of every fault for each script")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability.md")
    args = parser.parse_args()
    command = " ".join(["python tests/fault_report.py", *sys.argv[1:]])
    page, failed = report(args.times, args.scripts, command)
    args.out.write_text(page)
    print(f"{args.out}: {failed} tries went wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
