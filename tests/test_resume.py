"""A run that was killed, stopped, damaged or out of room goes on as if nothing had happened, or says why it cannot.

"The same" is always bit for bit, in every file of a run, but for the columns that measure time (faults.differences)."""

import errno
import functools
import json
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import faults
import pytest
import torch
from faults import INTERRUPT, KILL, SCRIPTS, TERMINATE, TERMINATE_TWICE, After, Process, differences, run, small
from helpers import CONTROL, load, read_csv, read_json, read_model, same_tensors

EVERY = pytest.mark.parametrize("name", SCRIPTS)
ONE_OF_EACH = pytest.mark.parametrize("name", ["vaco_continuous", "vaco_llm"])  # what is asked of, a pair has in common


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """straight(name, **changes) -> the folder of that run, undisturbed. Each is made once."""

    @functools.cache
    def straight(name: str, updates: int = faults.UPDATES, **changes) -> Path:
        folder = tmp_path_factory.mktemp("straight")
        ended = run(name, *small(name, updates, **changes), "--run-dir", folder / "run", cwd=folder)
        assert ended.code == 0, ended
        return folder / "run"

    return straight


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """halfway(name) -> the folder of a run that was killed after its third update; two checkpoints are in it."""

    @functools.cache
    def halfway(name: str) -> Path:
        folder = tmp_path_factory.mktemp("halfway")
        words = [*small(name), "--run-dir", folder / "run"]
        assert run(name, *words, cwd=folder, fault=After(3, KILL)).code == -signal.SIGKILL
        return folder / "run"

    return halfway


@pytest.fixture
def killed(halfway, tmp_path):
    """A copy of `halfway` to do harm to."""
    return lambda name: shutil.copytree(halfway(name), tmp_path / "run")


@pytest.fixture
def main(monkeypatch, capfd, tmp_path):
    """main(name, *words) -> (exit code, stdout, stderr) of the script in an empty folder of this process."""

    def main(name: str, *words):
        (tmp_path / "cwd").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "cwd")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        old = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        capfd.readouterr()
        faults.wait_for_order([str(word) for word in words])
        try:
            code = load(name).main()
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), old, strict=True):
                signal.signal(number, handler)
        return code, *capfd.readouterr()

    return main


def resume(name: str, run_dir: Path, fault=None) -> faults.Ended:
    return run(name, "--resume", run_dir, cwd=run_dir.parent, fault=fault)


def assert_refused(outcome: tuple[int, str, str], *words: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


# -------------------------------------------------------------------------------------------- the same as undisturbed


@EVERY
@pytest.mark.parametrize(
    ("lag", "what", "code"), [(0, KILL, -signal.SIGKILL), (3, KILL, -signal.SIGKILL), (3, TERMINATE, 143)]
)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(name, lag, what, code, straight, tmp_path):
    ended = run(name, *small(name, lag=lag), "--run-dir", tmp_path / "run", cwd=tmp_path, fault=After(3, what))
    assert ended.code == code
    assert "Traceback" not in ended.err
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["iteration"] == (2 if what is KILL else 3)  # a signal waits for the checkpoint of its update
    ended = resume(name, tmp_path / "run")
    assert (ended.code, ended.err) == (0, "")
    assert differences(straight(name, lag=lag), tmp_path / "run") == []


@ONE_OF_EACH
def test_the_comparison_sees_a_difference(name, straight):
    """Else the tests of this file would show nothing."""
    found = differences(straight(name), straight(name, lag=0))
    assert {"model.pt", "metrics.csv", "TensorBoard", "checkpoint.pt"} <= {*found}


ENVIRONMENTS = {
    "toy_envs:ThreeStep-v0": {},  # 8 steps a rollout: episodes end within it
    "toy_envs:Matrix-v0": {},  # float64
    "toy_envs:DictCounter-v0": {},
    "toy_envs:Walk-v0": {},
    "Hopper-v5": {"num_steps": 32},
    "Ant-v5": {"num_steps": 32, "eval_episodes": 0},  # 192 steps of one episode; writing back its state is not exact
}


@pytest.mark.parametrize("name", CONTROL)
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_environments_go_on_where_they_were(name, env_id, straight, tmp_path):
    changes = {"env_id": env_id, "checkpoint_every": 2} | ENVIRONMENTS[env_id]
    words = [*small(name, **changes), "--run-dir", tmp_path / "run"]
    assert run(name, *words, cwd=tmp_path, fault=After(5, KILL)).code == -signal.SIGKILL
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["iteration"] == 4
    ended = resume(name, tmp_path / "run")
    assert (ended.code, ended.err) == (0, "")
    assert differences(straight(name, **changes), tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_compiled_run_goes_on_to_the_same_end(straight, tmp_path):
    words = [*small("vaco_continuous", compile=True), "--run-dir", tmp_path / "run"]
    assert run("vaco_continuous", *words, cwd=tmp_path, fault=After(3, KILL)).code == -signal.SIGKILL
    assert resume("vaco_continuous", tmp_path / "run").code == 0
    assert differences(straight("vaco_continuous", compile=True), tmp_path / "run") == []


@EVERY
def test_resumed_again_and_again(name, straight, tmp_path):
    """Stopped after updates 1, 2 and 4, each by another signal, with a checkpoint every third update only."""
    words = [*small(name, checkpoint_every=3), "--run-dir", tmp_path / "run"]
    assert run(name, *words, cwd=tmp_path, fault=After(1, TERMINATE)).code == 143
    assert resume(name, tmp_path / "run", After(1, INTERRUPT)).code == 130
    assert resume(name, tmp_path / "run", After(2, KILL)).code == -signal.SIGKILL
    ended = resume(name, tmp_path / "run")
    assert (ended.code, ended.err) == (0, "")
    assert differences(straight(name, checkpoint_every=3), tmp_path / "run") == []
    assert len(read_json(tmp_path / "run" / "config.json")["resumed"]) == 3


@ONE_OF_EACH
def test_a_second_signal_stops_at_once(name, straight, tmp_path):
    ended = run(name, *small(name), "--run-dir", tmp_path / "run", cwd=tmp_path, fault=After(3, TERMINATE_TWICE))
    assert ended.code == 143
    assert "Traceback" not in ended.err
    assert "--resume goes on from the last checkpoint" in ended.err
    assert resume(name, tmp_path / "run").code == 0
    assert differences(straight(name), tmp_path / "run") == []


@ONE_OF_EACH
def test_tensorboard_has_every_point_once(name, killed, straight):
    run_dir = killed(name)
    before = faults.read_curves(run_dir)
    assert resume(name, run_dir).code == 0
    after = faults.read_curves(run_dir)
    assert after == faults.read_curves(straight(name))
    rows = [row.get("global_step") for row in read_csv(run_dir / "metrics.csv")]
    assert [step for step, _ in after["losses/policy_loss"]] == rows
    assert len(before["losses/policy_loss"]) <= 3


@ONE_OF_EACH
@pytest.mark.parametrize("every", [0, 4])
def test_checkpoints_change_nothing_in_training(name, every, straight):
    a, b = straight(name), straight(name, checkpoint_every=every)
    assert same_tensors(read_model(a), read_model(b))
    assert [x for x in differences(a, b) if x != "checkpoint.pt"] == []


@ONE_OF_EACH
def test_a_run_that_was_moved_goes_on(name, killed, straight, tmp_path):
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(killed(name), moved)
    ended = run(name, "--resume", "elsewhere/moved", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert differences(straight(name), moved) == []
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "logs"}  # nothing where it was before


# ------------------------------------------------------------------------------------------------------------ kill -9


def kill_often(name: str, tmp_path: Path, straight, times: int, moment) -> faults.Kills:
    reference = straight(name, 20)
    folders = []

    def check(folder):
        assert differences(reference, folder) == []
        folders.append(folder)

    kills = faults.kill_and_resume(name, tmp_path, small(name, 20), times, moment, check)
    assert len(folders) == kills.finished
    assert kills.done == times
    return kills


@EVERY
def test_killed_at_random_moments(name, straight, tmp_path):
    assert kill_often(name, tmp_path, straight, 5, partial(faults.at_random, random.Random(1), 0.6)).finished


@EVERY
def test_killed_while_a_checkpoint_is_written(name, straight, tmp_path):
    assert kill_often(name, tmp_path, straight, 3, partial(faults.in_a_write, random.Random(1))).finished


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("write", [False, True])
def test_killed_a_hundred_times(name, write, straight, tmp_path):
    rng = random.Random(2)
    moment = partial(faults.in_a_write, rng) if write else partial(faults.at_random, rng, 0.6)
    kills = kill_often(name, tmp_path, straight, 100, moment)
    assert not write or kills.in_write > 10


@EVERY
def test_killed_before_the_first_checkpoint(name, tmp_path, main):
    process = Process(name, [*small(name), "--run-dir", tmp_path / "run"], tmp_path)
    while process.alive() and not (tmp_path / "run").exists():
        time.sleep(0.0005)
    process.send(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL
    for path in (tmp_path / "run").glob("checkpoint*"):  # where the kill came late
        path.unlink()
    assert_refused(main(name, "--resume", tmp_path / "run"), "no checkpoint", "start again in a new folder")


# ------------------------------------------------------------------------------------------------ damaged checkpoints


@EVERY
@pytest.mark.parametrize("damage", [faults.truncate, faults.overwrite, faults.flip_bit])
def test_of_a_damaged_checkpoint_the_one_before_is_taken(name, damage, killed, straight, main):
    run_dir = killed(name)
    damage(run_dir / "checkpoint.pt", random.Random(0))
    code, _, err = main(name, "--resume", run_dir)
    assert code == 0
    assert err.startswith(f"{run_dir / 'checkpoint.pt'} is damaged")
    assert len(err.splitlines()) == 1
    assert differences(straight(name), run_dir) == []


@ONE_OF_EACH
def test_a_damaged_checkpoint_never_becomes_the_previous_one(name, killed, capsys):
    """Killed again between the two renames of the next checkpoint, the run would have none left."""
    run_dir = killed(name)
    faults.truncate(run_dir / "checkpoint.pt", random.Random(0))
    load(name).load_checkpoint(run_dir)
    assert not (run_dir / "checkpoint.pt").exists()
    assert (run_dir / "checkpoint_previous.pt").exists()


@EVERY
def test_a_flipped_bit_is_noticed_wherever_it_is(name, killed, capsys):
    """Or makes no difference: some bytes of the file mean nothing."""
    script, run_dir, rng, noticed = load(name), killed(name), random.Random(0), 0
    path, good = run_dir / "checkpoint.pt", faults.read_checkpoint(run_dir)
    intact = path.read_bytes()
    for _ in range(60):
        path.write_bytes(intact)
        faults.flip_bit(path, rng)
        _, saved = script.load_checkpoint(run_dir)
        if str(path) in capsys.readouterr().err:
            noticed += 1
        else:
            assert faults.same(faults.read_checkpoint(run_dir), good)
        assert saved["iteration"] in (1, 2)
    assert noticed > 40


@ONE_OF_EACH
def test_a_lost_checkpoint(name, killed, straight, main):
    """As when the process is killed between the two renames; a half-written one lies beside it."""
    run_dir = killed(name)
    (run_dir / "checkpoint.pt").unlink()
    (run_dir / "checkpoint.partial").write_bytes(b"half")
    code, _, err = main(name, "--resume", run_dir)
    assert (code, err) == (0, "")
    assert differences(straight(name), run_dir) == []
    assert not (run_dir / "checkpoint.partial").exists()


@ONE_OF_EACH
def test_both_checkpoints_damaged(name, killed, main):
    run_dir = killed(name)
    for path in run_dir.glob("checkpoint*.pt"):
        faults.truncate(path, random.Random(0))
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    code, out, err = main(name, "--resume", run_dir)
    assert (code, out) == (2, "")
    assert "no checkpoint in it can be read; start again in a new folder" in err.splitlines()[-1]
    assert [str(run_dir / x) in err for x in ("checkpoint.pt", "checkpoint_previous.pt")] == [True, True]
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


@ONE_OF_EACH
@pytest.mark.parametrize("table", ["metrics.csv", "evals.csv"])
def test_a_table_that_lost_rows(name, table, killed, straight, main):
    """The checkpoint before knew fewer rows; where it did not, there is nothing to go on from."""
    run_dir = killed(name)
    path, sizes = run_dir / table, torch.load(run_dir / "checkpoint_previous.pt", weights_only=True)["files"]["sizes"]
    path.write_bytes(path.read_bytes()[: sizes[table]])
    code, _, err = main(name, "--resume", run_dir)
    assert code == 0, err
    assert differences(straight(name), run_dir) == []
    (run_dir / "result.json").unlink()
    path.write_bytes(b"")
    code, _, err = main(name, "--resume", run_dir)
    assert code == 2
    assert "Traceback" not in err


@ONE_OF_EACH
def test_a_damaged_config_is_refused_in_a_line(name, killed, main):
    run_dir = killed(name)
    (run_dir / "config.json").write_text("{")
    assert_refused(main(name, "--resume", run_dir), "config.json")


@EVERY
def test_a_checkpoint_cannot_run_code(name, killed, tmp_path, main):
    run_dir = killed(name)
    for path in run_dir.glob("checkpoint*.pt"):
        faults.set_trap(path, tmp_path / "trapped")
    torch.load(run_dir / "checkpoint.pt", weights_only=False)
    (tmp_path / "trapped").unlink()  # the trap works
    code, _, err = main(name, "--resume", run_dir)
    assert code == 2
    assert "Traceback" not in err
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("name", faults.LLM)
def test_a_flipped_bit_of_a_warm_start_is_noticed(name, tmp_path, capsys):
    script = load(name)
    args = script.Args(**faults.TINY | {"warm_start_dir": str(tmp_path), "warm_start_steps": 0})
    task = script.make_task(args)
    make = partial(script.warm_start, args, task, script.CharTokenizer(task.alphabet), torch.device("cpu"))
    good, (path,), rng, noticed = make().state_dict(), tmp_path.iterdir(), random.Random(0), 0
    intact = path.read_bytes()
    for _ in range(60):
        path.write_bytes(intact)
        faults.flip_bit(path, rng)
        try:
            assert same_tensors(make().state_dict(), good)  # some bytes mean nothing
        except script.Refused:
            noticed += 1
    assert noticed > 40


# ---------------------------------------------------------------------------------------------------- what is refused


@EVERY
def test_what_cannot_be_resumed_is_refused(name, killed, straight, tmp_path, main):
    run_dir, finished = killed(name), straight(name)
    before = {path.name: path.read_bytes() for folder in (run_dir, finished) for path in folder.iterdir()}
    (tmp_path / "empty").mkdir()
    other = SCRIPTS[SCRIPTS.index(name) - 1]
    assert_refused(main(name, "--resume", finished), "this run is finished")
    assert_refused(main(name, "--resume", tmp_path / "empty"), "no checkpoint")
    assert_refused(main(name, "--resume", tmp_path / "none"), "no checkpoint")
    assert_refused(main(name, "--resume", Path(__file__)), "no checkpoint")
    assert_refused(main(other, "--resume", run_dir), f"{name}.py")
    code, _, err = main(name, "--resume", run_dir, "--seed", 2, "--no-norm-adv")
    assert code == 2
    assert "leave out seed, norm_adv" in " ".join(err.replace("│", " ").split())
    assert not (tmp_path / "none").exists()
    assert list((tmp_path / "cwd").iterdir()) == list((tmp_path / "empty").iterdir()) == []
    assert {path.name: path.read_bytes() for folder in (run_dir, finished) for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", CONTROL)
def test_an_environment_that_does_not_replay_is_named(name, tmp_path):
    words = [*small(name, env_id="toy_envs:Unseeded-v0"), "--run-dir", tmp_path / "run"]
    assert run(name, *words, cwd=tmp_path, fault=After(3, KILL)).code == -signal.SIGKILL
    ended = resume(name, tmp_path / "run")
    assert ended.code == 0
    lines = [f"environment {i} does not replay: from here the run is another than before" for i in range(2)]
    assert ended.err.splitlines() == lines
    assert len(read_csv(tmp_path / "run" / "metrics.csv")) == faults.UPDATES


@pytest.mark.parametrize("name", CONTROL)
def test_a_run_that_failed_fails_again_in_the_same_way(name, tmp_path):
    """And is recorded as before: result.json is that of the last try."""
    words = [*small(name, env_id="toy_envs:NanReward-v0"), "--run-dir", tmp_path / "run"]
    failed = run(name, *words, cwd=tmp_path)
    result = faults.read_result(tmp_path / "run")
    again = resume(name, tmp_path / "run")
    assert failed.code == again.code == 1
    assert failed.err == again.err == f"failed: {result['error']}\n"
    assert faults.read_result(tmp_path / "run") == result


def test_another_commit_is_said(killed, main):
    run_dir = killed("ppo_continuous")
    config = read_json(run_dir / "config.json")
    (run_dir / "config.json").write_text(json.dumps(config | {"commit": "another"}))
    code, _, err = main("ppo_continuous", "--resume", run_dir)
    assert code == 0
    assert err == "resumed with another commit, version or machine: not bit for bit\n"


# ---------------------------------------------------------------------------------------------------------- full disk


@ONE_OF_EACH
@pytest.mark.parametrize(
    ("fault", "every"),
    [(faults.fill_disk, 1), (faults.fill_disk, 0), (faults.limit_files, 1)],
    ids=["disk", "disk between checkpoints", "limit"],
)
def test_a_full_disk(name, fault, every, straight, tmp_path):
    """Ends in one line; with room again it goes on to the same end."""
    real, updates = fault is faults.fill_disk, 20
    with faults.SmallDisk(tmp_path / "disk") as disk:
        if real and not disk:
            pytest.skip("this user cannot mount a small disk")
        run_dir = tmp_path / "disk" / "run"
        words = [*small(name, updates, checkpoint_every=every), "--run-dir", run_dir]
        ended = run(name, *words, cwd=tmp_path, fault=After(3, fault))
        assert (ended.code, len(ended.err.splitlines())) == (1, 1), ended
        assert ended.err.startswith("failed: update ")
        assert os.strerror(errno.ENOSPC if real else errno.EFBIG) in ended.err
        assert f"make room, then --resume {run_dir} goes on" in ended.err
        assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 2 * every
        if real:
            again = run(name, "--resume", run_dir, cwd=tmp_path)  # still no room
            assert (again.code, len(again.err.splitlines())) == (2, 1), again
            (tmp_path / "disk" / "filler").unlink()
        ended = run(name, "--resume", run_dir, cwd=tmp_path)
        assert (ended.code, ended.err) == (0, "")
        assert differences(straight(name, updates, checkpoint_every=every), run_dir) == []


@pytest.mark.parametrize("name", faults.LLM)
def test_a_full_disk_during_the_warm_start(name, tmp_path):
    with faults.SmallDisk(tmp_path / "disk") as disk:
        if not disk:
            pytest.skip("this user cannot mount a small disk")
        (tmp_path / "disk" / "warm").mkdir()
        faults.fill_disk(tmp_path / "disk" / "warm")
        words = small(name, warm_start_dir=tmp_path / "disk" / "warm")
        ended = run(name, *words, "--run-dir", tmp_path / "run", cwd=tmp_path)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended
        assert "--warm-start-dir" in ended.err
        assert not (tmp_path / "run").exists()
