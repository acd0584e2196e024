"""What users of such scripts have met with, in environments and on the command line."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ENVIRONMENT, SMALL, assert_same_runs, flags, read_csv, read_json, read_model, spy, start, train

RUN = SMALL | {"lag": 1, "checkpoint_every": 2, "seed": 5, "total_timesteps": 6 * 16}


def words(env_id: str, run_dir: Path, **changes) -> list[str]:
    return flags(**RUN | {"env_id": f"toy_envs:{env_id}-v0", "run_dir": run_dir} | changes)


# ------------------------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize("env_id", ["OwnGenerator", "SpaceSample"])
def test_a_resumed_environment_has_its_own_random_numbers_back(script, env_id, stopped, main, monkeypatch, tmp_path):
    assert main(script, *words(env_id, tmp_path / "straight"))[0] == 0
    stopped(script, 5, *words(env_id, tmp_path / "run"))
    rollouts = spy(monkeypatch, script, "rollout")
    code, _, err = main(script, "--resume", tmp_path / "run")
    assert (code, err) == (0, "")
    assert_same_runs(tmp_path / "straight", tmp_path / "run")
    assert len(rollouts) == 2
    for _, (batch, _) in rollouts:
        assert not torch.equal(batch["rewards"][:, 0], batch["rewards"][:, 1]) or env_id == "SpaceSample"
        assert not torch.equal(batch["obs"][:, 0], batch["obs"][:, 1]) or env_id == "OwnGenerator"


@pytest.mark.parametrize("env_id", ["GlobalRandom", "EpisodeCounter", "Unseeded"])
def test_where_an_environment_does_not_replay_one_line_says_so(script, env_id, stopped, main, tmp_path):
    stopped(script, 5, *words(env_id, tmp_path / "run"))
    code, _, err = main(script, "--resume", tmp_path / "run")
    assert (code, err) == (0, "an environment does not replay: from here the run is another than before\n")
    assert len(read_csv(tmp_path / "run" / "metrics.csv")) == 6


def test_an_array_that_is_reused_is_copied(script):
    """Observed are -5, -4, -3, and -2 as the time limit ends the episode."""
    envs, agent = script.make_envs("toy_envs:ReusedArray-v0", 2), script.Agent(1, 1)
    lag = script.PolicyLag(0, np.random.default_rng(0))
    lag.push(agent)
    batch, _ = script.rollout(envs, start(script, envs, seed=1), lag.draw(2)[0], torch.zeros(4, 2, 1))
    for i in range(2):
        assert batch["obs"][:, i, 0].tolist() == [-5, -4, -3, -5]
        assert batch["next_obs"][:, i, 0].tolist() == [-4, -3, -2, -4]
    assert not batch["terminated"].any()


@pytest.mark.parametrize("env_id", ["RewardInArray", "RewardOfNumpy", "OddInfos"])
def test_rewards_are_numbers_and_infos_are_left_out(script, env_id, tmp_path):
    train(script, tmp_path / "run", updates=2, env_id=f"toy_envs:{env_id}-v0")
    rows = read_csv(tmp_path / "run" / "episodes.csv")
    assert [(row["episodic_return"], row["episodic_length"]) for row in rows] == [(3, 3)] * 10
    assert read_csv(tmp_path / "run" / "evals.csv")[-1]["eval_return"] == 3


def test_a_reward_of_another_shape_is_named(script, main, tmp_path):
    code, _, err = main(script, *words("RewardOfTwo", tmp_path / "run"))
    assert code == 1
    assert err.splitlines()[-1] == "ValueError: RewardOfTwo-v0: a reward of shape (2,) is not one number"


@pytest.mark.parametrize("env_id", ["GlobalRandom", "SpaceSample"])
def test_seed_fixes_every_random_number_of_a_process(script, env_id, tmp_path):
    """Whatever was drawn before."""
    tables = []
    for i, seed in enumerate((1, 1, 2)):
        random.seed(i)
        np.random.seed(i)
        train(script, tmp_path / str(i), updates=2, env_id=f"toy_envs:{env_id}-v0", seed=seed)
        tables.append([(tmp_path / str(i) / name).read_bytes() for name in ("episodes.csv", "evals.csv")])
        tables[-1].append(read_model(tmp_path / str(i))["obs_rms.mean"].tolist())
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]


@pytest.mark.parametrize(("env_id", "said"), [("Endless", True), ("ThreeStepTimeLimit", False)])
def test_an_environment_without_a_time_limit_says_so_at_the_start(script, env_id, said, main, tmp_path):
    code, out, _ = main(script, *words(env_id, tmp_path / "run", eval_episodes=0))
    assert code == 0
    assert out.startswith(f"toy_envs:{env_id}-v0 has no time limit") == said


# ------------------------------------------------------------------------------------------------------- command line


def test_runs_of_one_second_get_a_folder_each(script, monkeypatch, main, tmp_path):
    monkeypatch.setattr(script, "train", lambda args, run_dir, saved: None)
    monkeypatch.setattr(script.time, "time", lambda: 1.8e9)
    for lag in (0, 0, 0, 8):
        assert main(script, "--lag", lag)[0] == 0
    name = f"HalfCheetah-v5__{script.__name__}__lag0__1__1800000000"
    folders = {path.name: path for path in (tmp_path / "cwd" / "runs").iterdir()}
    assert folders.keys() == {name, f"{name}-2", f"{name}-3", name.replace("lag0", "lag8")}
    assert all(read_json(path / "config.json")["script"] == script.__name__ for path in folders.values())


@pytest.mark.xfail(strict=True, reason="the second run is refused")
def test_a_folder_that_another_run_makes_at_the_same_moment_is_left_to_it(script, monkeypatch, main, tmp_path):
    """Runs of one shell loop get there at once: that a folder is not there yet may be true for two of them."""
    monkeypatch.setattr(script, "train", lambda args, run_dir, saved: None)
    mkdir, before = Path.mkdir, []

    def late(path, *args, **more):
        if not before and "__lag0__" in path.name:
            before.append(path)
            mkdir(path, parents=True)
        return mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", late)
    code, _, err = main(script)
    assert (code, err) == (0, "")
    (ours,) = {*(tmp_path / "cwd" / "runs").iterdir()} - {tmp_path / "cwd" / x for x in before}
    assert (ours / "config.json").exists()


BOTH_AT_ONCE = """
import sys, time, vaco_continuous
from pathlib import Path
Path(sys.argv.pop(1)).touch()
while len(list(Path(".").glob("ready*"))) < 2:
    time.sleep(0.001)
vaco_continuous.main()
"""


def test_two_processes_may_resume_one_folder_at_once(vaco, stopped, tmp_path):
    stopped(vaco, 3, *words("Noise", tmp_path / "run", total_timesteps=16 * 60, checkpoint_every=1))
    command = [sys.executable, "-c", BOTH_AT_ONCE]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, f"ready{i}", "--resume", "run"], cwd=tmp_path, env=ENVIRONMENT, **pipes)
        for i in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert errors == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["iteration"] == 60
    assert all(x.isfinite().all() for x in read_model(tmp_path / "run").values())
    assert not list((tmp_path / "run").glob("*.partial"))


def test_resume_names_a_missing_folder_and_takes_a_checkpoint_for_its_folder(script, stopped, main, tmp_path):
    code, out, err = main(script, "--resume", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "No such file or directory" in err
    assert len(err.splitlines()) == 1
    stopped(script, 3, *words("Noise", tmp_path / "run"))
    assert main(script, "--resume", tmp_path / "run" / "checkpoint.pt")[0] == 0
    assert (tmp_path / "run" / "model.pt").exists()


def test_run_dir_may_be_text_and_in_the_home_folder(script, monkeypatch, main, tmp_path):
    assert script.Args(run_dir="x").run_dir == Path("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(script, "--run-dir=~/x", *words("Noise", "")[:-2])[0] == 0
    assert (tmp_path / "x" / "model.pt").exists()
    assert list((tmp_path / "cwd").iterdir()) == []
    (tmp_path / "x" / "model.pt").unlink()
    assert main(script, "--resume=~/x")[0] == 0
    assert (tmp_path / "x" / "model.pt").exists()


def test_values_behind_flags(script, main, tmp_path):
    code, out, err = main(script, "--anneal-lr", "False")
    assert (code, out) == (2, "")
    assert "--no-anneal-lr" in err
    assert len(err.splitlines()) == 1
    assert main(script, *words("Noise", tmp_path / "run", total_timesteps="1e2"))[0] == 0
    assert len(read_csv(tmp_path / "run" / "metrics.csv")) == 6  # 100 // 16
