"""A run that was killed goes on with --resume as if nothing had happened: its tables and its model are the same bit for
bit, but for the columns that measure time. Every script; environments of all kinds in test_second_round.py too."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import CONTROL, ENVIRONMENT, LLM, ROOT, SMALL, TINY, assert_same_runs, flags, load, tables
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """The warm starts of all runs with a language model."""
    return tmp_path_factory.mktemp("warm")


def arguments(name: str, warm: Path, updates: int, **changes) -> dict:
    """A run of less than a second or two under lag, with a checkpoint after every second update."""
    args = {"lag": 2, "checkpoint_every": 2, "num_evals": 2, "seed": 5} | changes
    if name in LLM:
        return TINY | args | {"num_updates": updates, "warm_start_dir": warm}
    args = SMALL | {"env_id": "toy_envs:Noise-v0"} | args
    return args | {"total_timesteps": args["num_envs"] * args["num_steps"] * updates}


def straight(name: str, run_dir: Path, args: dict) -> Path:
    run_dir.mkdir()
    load(name).train(load(name).Args(**args), run_dir)
    return run_dir


# in the update after so many, before its row is written
KILLS_ITSELF = """
import os, signal, sys, {name} as script
metrics, rows = script.metrics, []
def counted(*args):
    rows.append(None)
    if len(rows) > {updates}:
        os.kill(os.getpid(), signal.SIGKILL)
    return metrics(*args)
script.metrics = counted
script.main()
"""


@pytest.mark.parametrize("name", CONTROL + LLM)
def test_a_run_that_was_killed_goes_on_to_the_same_end(name, warm, main, tmp_path):
    """Killed in its sixth update: the fifth has rows but no checkpoint. Its tables then end in half a line, as after a
    full disk, and its folder is moved."""
    args = arguments(name, warm, updates=8)
    words = flags(**args, run_dir=tmp_path / "run")
    command = [sys.executable, "-c", KILLS_ITSELF.format(name=name, updates=5), *words]
    assert subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True).returncode == -signal.SIGKILL
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["iteration"] == 4
    for path in (tmp_path / "run").glob("*.csv"):
        with open(path, "a") as file:
            file.write("1,0.5")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert len(tables(tmp_path / "moved")["metrics.csv"]) == 6
    time.sleep(1)  # TensorBoard reads its files in the order of their names, which begin with the second
    code, _, err = main(load(name), "--resume", tmp_path / "moved")
    assert (code, err) == (0, "")
    assert_same_runs(straight(name, tmp_path / "straight", args), tmp_path / "moved")
    steps = [point.step for point in EventAccumulator(str(tmp_path / "moved")).Reload().Scalars("losses/policy_loss")]
    assert steps == [int(next(iter(row.values()))) for row in tables(tmp_path / "moved")["metrics.csv"]]


@pytest.mark.parametrize("task", ["ThreeStep", "Matrix", "DictCounter", "Walk", "Hopper-v5", "Ant-v5"])
def test_environments_go_on_where_they_were(vaco, task, stopped, main, tmp_path):
    """MuJoCo's too, in the midst of an episode: writing back their state would not be exact."""
    mujoco = {"env_id": task, "num_steps": 32, "eval_episodes": 0}
    changes = mujoco if task.endswith("-v5") else {"env_id": f"toy_envs:{task}-v0"}
    args = arguments("vaco_continuous", tmp_path, updates=6, **changes)
    stopped(vaco, 5, *flags(**args, run_dir=tmp_path / "run"))
    code, _, err = main(vaco, "--resume", tmp_path / "run")
    assert (code, err) == (0, "")
    assert_same_runs(straight("vaco_continuous", tmp_path / "straight", args), tmp_path / "run")


class Trap:
    """A checkpoint that runs code."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_what_cannot_be_resumed_is_refused_in_a_line(script, stopped, main, tmp_path):
    run_dir = tmp_path / "run"
    stopped(script, 3, *flags(**arguments(script.__name__, tmp_path, updates=4), run_dir=run_dir))

    def assert_refused(message: str, *words: str) -> None:
        code, out, err = main(script, "--resume", run_dir, *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err

    assert_refused("--resume takes no other flag", "--seed", "2")
    torch.save({"agent": Trap()}, run_dir / "checkpoint.pt")
    assert_refused("Weights only load failed")
    assert not (tmp_path / "cwd" / "trapped").exists()
    (run_dir / "checkpoint.pt").unlink()
    assert_refused("checkpoint.pt")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROL + LLM)
def test_killed_twenty_times_at_random_moments(name, warm, tmp_path):
    """Where there is no checkpoint yet, the run starts again."""
    rng, kills, run_dir, args = random.Random(1), 0, tmp_path / "run", arguments(name, warm, updates=60)
    reference = straight(name, tmp_path / "straight", args)
    while kills < 20:
        table, words = run_dir / "metrics.csv", ["--resume", run_dir]
        if not (run_dir / "checkpoint.pt").exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            words = flags(**args, run_dir=run_dir)
        size = table.stat().st_size if table.exists() else 0
        process = subprocess.Popen([sys.executable, ROOT / f"{name}.py", *words], cwd=tmp_path, env=ENVIRONMENT)
        while process.poll() is None and (table.stat().st_size if table.exists() else 0) == size:
            time.sleep(0.001)
        time.sleep(rng.random() / 4)
        process.kill()
        if process.wait() == 0:
            assert_same_runs(reference, run_dir)
            shutil.rmtree(run_dir)
        kills += process.returncode == -signal.SIGKILL
