"""The scripts by command line: files of a run, repetition to the bit, refused input, runs that fail or are interrupted.

`run_script` starts a process; `main` calls the script's main() in this one with the given command line, which saves
the seconds of importing torch."""

import csv
import dataclasses
import math
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    CONTROL,
    ENVIRONMENT,
    ROOT,
    SMALL,
    flags,
    load,
    read_csv,
    read_json,
    read_model,
    run_script,
    same_tensors,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

METRICS = [  # the columns that other code reads, in this order
    "global_step",
    "charts/learning_rate",
    "charts/SPS",
    "charts/seconds",
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/approx_kl_mean",
    "losses/approx_kl_max",
    "losses/clipfrac",
    "losses/explained_variance",
    "losses/grad_norm",
    "lag/age_mean",
    "lag/age_max",
    "lag/tv_backward",
    "lag/ess",
    "lag/tv_forward_mean",
    "lag/tv_forward_max",
    "lag/tv_forward_last",
    "lag/filtered_fraction",
    "lag/filter_triggered",
]
TIMING = ("charts/SPS", "charts/seconds")

# the run that most tests look at: six updates under lag, two evaluations
RUN = {"env_id": "InvertedPendulum-v5", "num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2}
RUN |= {"total_timesteps": 400, "lag": 2, "learning_rate": 3e-3, "eval_episodes": 3, "num_evals": 2, "seed": 5}


@dataclasses.dataclass
class Run:
    name: str
    dir: Path
    process: subprocess.CompletedProcess


@pytest.fixture(scope="module", params=CONTROL)
def run(request, tmp_path_factory):
    """A finished run of each script, by its own process."""
    folder = tmp_path_factory.mktemp(request.param)
    words = flags(**RUN, run_dir="out/run")
    return Run(request.param, folder / "out" / "run", run_script(request.param, *words, cwd=folder))


@pytest.fixture
def main(script, monkeypatch, capfd, tmp_path):
    """main(*words) -> (exit code, stdout, stderr) of the script in an empty folder."""

    def main(*words: str):
        (tmp_path / "cwd").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "cwd")
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
        try:
            code = script.main()
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()

    return main


def rows_without_timing(run_dir: Path) -> list[dict[str, float]]:
    rows = read_csv(run_dir / "metrics.csv")
    return [{name: x for name, x in row.items() if name not in TIMING} for row in rows]


def header(path: Path) -> list[str]:
    with open(path, newline="") as file:
        return next(csv.reader(file))


def again(run: Run, run_dir: Path, **args) -> Path:
    """The same run once more, in this process, but for `args`."""
    script = load(run.name)
    script.train(script.Args(**RUN | args, run_dir=run_dir))
    return run_dir


# ------------------------------------------------------------------------------------------------- files of a run


def test_a_run_finishes_and_shows_its_progress(run):
    assert run.process.returncode == 0
    assert run.process.stderr == ""
    lines = run.process.stdout.splitlines()
    assert len(lines) == 6 + 1  # elsewhere than on a terminal at most ten, and the last
    assert "384/384 steps" in lines[-2]
    for word in ("SPS", "left", "return", "evaluation"):
        assert word in lines[-2]
    assert lines[-1] == "finished: out/run"


def test_files_of_a_run(run):
    names = {path.name for path in run.dir.iterdir() if not path.name.startswith("events.out.tfevents")}
    tables = {"episodes.csv", "evals.csv", "metrics.csv"}
    assert names == tables | {"config.json", "checkpoint.pt", "model.pt", "result.json"}
    assert [path.name for path in run.dir.parents[1].iterdir()] == ["out"]  # nothing else where it was started


def test_config_says_how_to_repeat_the_run(run):
    config = read_json(run.dir / "config.json")
    assert {"args", "command", "commit", "versions", "machine", "torch_threads"} <= config.keys()
    defaults = dataclasses.asdict(load(run.name).Args())
    assert config["args"] == defaults | RUN | {"run_dir": "out/run"}
    assert config["command"] == [str(ROOT / f"{run.name}.py"), *flags(**RUN, run_dir="out/run")]
    assert {"python", "torch", "numpy", "gymnasium", "mujoco", "tyro", "tensorboard"} == config["versions"].keys()
    assert config["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert config["torch_threads"] == 1


def test_config_names_the_commit(run, tmp_path):
    """And none for a copy of the script outside a repository."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    if not head:
        pytest.skip("not a git repository")
    assert read_json(run.dir / "config.json")["commit"].removesuffix("-dirty") == head


def test_headers_stay_as_they_are(run):
    assert header(run.dir / "episodes.csv") == ["global_step", "episodic_return", "episodic_length"]
    assert header(run.dir / "evals.csv") == ["global_step", "eval_return", "eval_std", "eval_length"]
    assert header(run.dir / "metrics.csv") == METRICS  # the same for both scripts


def test_metrics_have_a_row_per_update(run):
    rows = read_csv(run.dir / "metrics.csv")
    assert [row["global_step"] for row in rows] == [64, 128, 192, 256, 320, 384]  # whole batches: 400 is rounded down
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx([3e-3 * left / 6 for left in range(6, 0, -1)])
    assert max(row["lag/age_max"] for row in rows) == 2
    seconds = [row["charts/seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_result(run):
    result = read_json(run.dir / "result.json")
    keys = ["status", "seed", "global_step", "train_return", "eval_return", "eval_std", "sps"]
    assert list(result) == [*keys, "peak_rss_mb"]
    assert (result["status"], result["seed"], result["global_step"]) == ("finished", 5, 384)
    late = [row["episodic_return"] for row in read_csv(run.dir / "episodes.csv") if row["global_step"] > 0.9 * 384]
    assert result["train_return"] == pytest.approx(sum(late) / len(late))
    evals = read_csv(run.dir / "evals.csv")
    assert [row["global_step"] for row in evals] == [192, 384]
    assert (result["eval_return"], result["eval_std"]) == (evals[-1]["eval_return"], evals[-1]["eval_std"])
    assert evals[-1]["eval_length"] == pytest.approx(evals[-1]["eval_return"] + 1)


def test_episodes_are_real(run):
    """A reward of 1 per step, but for the one at which the pole falls."""
    rows = read_csv(run.dir / "episodes.csv")
    assert len(rows) > 20
    assert all(row["episodic_length"] == row["episodic_return"] + 1 for row in rows)
    assert sum(row["episodic_length"] for row in rows) <= 384


def test_tensorboard_has_the_same_numbers(run):
    events = EventAccumulator(str(run.dir)).Reload()
    tags = set(events.Tags()["scalars"])
    episodic, evaluated = {"charts/episodic_return", "charts/episodic_length"}, {"charts/eval_return"}
    assert tags >= {*METRICS[1:], *episodic, *evaluated}
    for tag in METRICS[1:]:
        rows = read_csv(run.dir / "metrics.csv")
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [(row["global_step"], pytest.approx(row[tag], rel=1e-5, abs=1e-8)) for row in rows]
    assert [event.value for event in events.Scalars("charts/eval_return")] == pytest.approx(
        [row["eval_return"] for row in read_csv(run.dir / "evals.csv")]
    )
    assert len(events.Scalars("charts/episodic_return")) == len(read_csv(run.dir / "episodes.csv"))


def test_default_folder_is_named_after_environment_script_and_seed(script, main, tmp_path):
    code, out, _ = main(*flags(**SMALL | {"num_steps": 9}, env_id="toy_envs:ThreeStep-v0", total_timesteps=18, seed=3))
    assert code == 0
    (run_dir,) = (tmp_path / "cwd" / "runs").iterdir()
    assert run_dir.name.startswith(f"toy_envs-ThreeStep-v0__{script.__name__}__3__")
    assert f"finished: runs/{run_dir.name}" in out
    assert read_json(run_dir / "result.json")["train_return"] == 3


def test_a_run_without_episodes_or_evaluation_has_null_results(script, tmp_path):
    args = {"env_id": "HalfCheetah-v5", "num_evals": 0}  # episodes of 1000 steps
    assert train(script, tmp_path / "run", updates=1, **args)["train_return"] is None
    result = read_json(tmp_path / "run" / "result.json")
    assert [result[name] for name in ("train_return", "eval_return", "eval_std")] == [None] * 3


def test_evaluations_are_evenly_spaced_and_the_last_is_at_the_end(script, tmp_path):
    for num_evals, expected in ((1, [7]), (2, [4, 7]), (3, [3, 5, 7]), (7, [1, 2, 3, 4, 5, 6, 7]), (20, range(1, 8))):
        run_dir = tmp_path / str(num_evals)
        train(script, run_dir, updates=7, env_id="toy_envs:ThreeStep-v0", num_evals=num_evals)
        assert [row["global_step"] / 16 for row in read_csv(run_dir / "evals.csv")] == list(expected)


def test_learning_rate_stays_without_annealing(script, tmp_path):
    train(script, tmp_path / "run", updates=3, env_id="toy_envs:ThreeStep-v0", anneal_lr=False)
    assert [row["charts/learning_rate"] for row in read_csv(tmp_path / "run" / "metrics.csv")] == [3e-4] * 3


# --------------------------------------------------------------------------------------------------- repetition


def test_the_same_seed_gives_the_same_run_to_the_bit(run, tmp_path):
    other = again(run, tmp_path / "run")
    assert (other / "episodes.csv").read_bytes() == (run.dir / "episodes.csv").read_bytes()
    assert (other / "evals.csv").read_bytes() == (run.dir / "evals.csv").read_bytes()
    assert rows_without_timing(other) == rows_without_timing(run.dir)
    assert same_tensors(read_model(other), read_model(run.dir))


def test_another_seed_gives_another_run(run, tmp_path):
    other = again(run, tmp_path / "run", seed=6)
    assert (other / "episodes.csv").read_bytes() != (run.dir / "episodes.csv").read_bytes()
    a, b = read_model(other), read_model(run.dir)
    assert not any(torch.equal(a[name], b[name]) for name in a if name != "obs_count")


@pytest.mark.parametrize("evaluation", [{"num_evals": 0}, {"eval_episodes": 0}, {"num_evals": 6, "eval_episodes": 1}])
def test_evaluation_changes_nothing_in_training(run, evaluation, tmp_path):
    other = again(run, tmp_path / "run", **evaluation)
    assert (other / "episodes.csv").read_bytes() == (run.dir / "episodes.csv").read_bytes()
    assert rows_without_timing(other) == rows_without_timing(run.dir)
    assert same_tensors(read_model(other), read_model(run.dir))


def test_tensorboard_changes_nothing_in_training(run, tmp_path, monkeypatch):
    class Silent:
        def __init__(self, folder, purge_step):
            pass

        def add_scalar(self, *values):
            pass

        def flush(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Silent)
    other = again(run, tmp_path / "run")
    assert not list(other.glob("events*"))
    assert rows_without_timing(other) == rows_without_timing(run.dir)
    assert same_tensors(read_model(other), read_model(run.dir))


WANDB = """
import json, os

class Run:
    def __init__(self, **settings):
        self.file = open(os.environ["WANDB_DIR"] + "/wandb.jsonl", "w")
        self.write(settings)
    def write(self, data):
        self.file.write(json.dumps(data) + "\\n")
    def log(self, data):
        self.write(data)
    def finish(self, exit_code):
        self.write({"exit_code": exit_code})
        self.file.close()

def init(**settings):
    return Run(**settings)
"""


def test_tracking_changes_nothing_in_training(run, tmp_path, monkeypatch):
    """With a package that writes to a file what Weights & Biases would send."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    other = again(run, tmp_path / "run", track=True)
    monkeypatch.delitem(sys.modules, "wandb")
    assert (other / "episodes.csv").read_bytes() == (run.dir / "episodes.csv").read_bytes()
    assert same_tensors(read_model(other), read_model(run.dir))

    (tmp_path / "wandb.json").write_text(f"[{','.join((tmp_path / 'wandb.jsonl').read_text().splitlines())}]")
    first, *logged, last = read_json(tmp_path / "wandb.json")
    assert first["config"]["env_id"] == "InvertedPendulum-v5"
    assert last == {"exit_code": 0}
    sent = [row for row in logged if "losses/policy_loss" in row]
    assert sent == read_csv(other / "metrics.csv")
    assert [row["charts/eval_return"] for row in logged if "charts/eval_return" in row] == [
        row["eval_return"] for row in read_csv(other / "evals.csv")
    ]


# --------------------------------------------------------------------------------------------------------- refused


def numbers(script) -> list[str]:
    return [x.name for x in dataclasses.fields(script.Args) if x.type in (int, float, float | None)]


def assert_refused(outcome, tmp_path, *words: str) -> None:
    """Exit code 2, a short message on stderr with these words, and nothing left behind."""
    code, _, err = outcome
    assert code == 2
    assert 0 < len(err.strip().splitlines()) <= 20
    message = " ".join(err.replace("│", " ").split())
    assert "Traceback" not in message
    assert len(message) < 1000
    for word in words:
        assert word in message
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the old environments
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env-id", "NoSuch-v5"], ["--env-id", "NoSuch"]),
        (["--env-id", "no_such_module:Env-v0"], ["--env-id", "no_such_module"]),
        (["--env-id", "toy_envs:NoSuch-v0"], ["--env-id", "NoSuch"]),
        (["--env-id", "Hopper-v3"], ["--env-id", "Hopper-v3"]),
        (["--env-id", ""], ["--env-id"]),
        (["--env-id", "HalfCheetah"], ["--env-id", "version", "HalfCheetah-v5"]),
        (["--env-id", "toy_envs:RaisesInInit-v0"], ["--env-id", "a file that is not there"]),
        (["--env-id", "CartPole-v1"], ["--env-id", "Discrete(2)", "Box"]),
        (["--env-id", "toy_envs:DiscreteActions-v0"], ["--env-id", "Discrete(2)", "Box"]),
        (["--total-timesteps", "2047"], ["--total-timesteps", "2048"]),
        (["--total-timesteps", "0"], ["--total-timesteps"]),
        (["--num-minibatches", "3"], ["--num-minibatches", "2048", "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024"]),
        (["--num-minibatches", "2048"], ["--num-minibatches", "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024"]),
        (["--num-minibatches", "4096"], ["--num-minibatches", "1024"]),
        (["--num-minibatches", "0"], ["--num-minibatches"]),
        (["--num-envs", "1", "--num-steps", "1", "--num-minibatches", "1"], ["--num-minibatches", "--num-envs"]),
        (["--num-envs", "0"], ["--num-envs"]),
        (["--num-envs", "-1"], ["--num-envs"]),
        (["--num-steps", "0"], ["--num-steps"]),
        (["--update-epochs", "0"], ["--update-epochs"]),
        (["--lag", "-1"], ["--lag"]),
        (["--lag", "1.5"], ["--lag"]),
        (["--lag-mode", "sometimes"], ["--lag-mode", "uniform", "fixed"]),
        (["--gamma", "1.01"], ["--gamma", "[0, 1]"]),
        (["--gamma", "-0.01"], ["--gamma", "[0, 1]"]),
        (["--gae-lambda", "1.01"], ["--gae-lambda", "[0, 1]"]),
        (["--learning-rate", "0"], ["--learning-rate"]),
        (["--learning-rate", "inf"], ["--learning-rate"]),
        (["--max-grad-norm", "0"], ["--max-grad-norm"]),
        (["--ent-coef", "-0.1"], ["--ent-coef"]),
        (["--vf-coef", "-0.1"], ["--vf-coef"]),
        (["--target-kl", "0"], ["--target-kl"]),
        (["--target-kl", "inf"], ["--target-kl"]),
        (["--num-steps", "1000000000", "--total-timesteps", "100000000000", "--num-minibatches", "3"], ["1, 2, 4"]),
        (["--eval-episodes", "-1"], ["--eval-episodes"]),
        (["--num-evals", "-1"], ["--num-evals"]),
        (["--seed", "-1"], ["--seed"]),
        (["--seed", "4294967296"], ["--seed"]),
        (["--device", "nonsense"], ["--device", "nonsense", "cpu"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["HalfCheetah-v5"], ["HalfCheetah-v5"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_refused(main, words, message, tmp_path):
    assert_refused(main(*words), tmp_path, *message)


@pytest.mark.parametrize(
    ("name", "flag", "x"),
    [("ppo_continuous", "--clip-coef", x) for x in ("0", "-0.2")]
    + [("vaco_continuous", flag, x) for flag in ("--delta", "--rho-bar", "--c-bar") for x in ("0", "-0.2", "1e300")],
)
def test_thresholds_are_positive(name, flag, x):
    with pytest.raises(ValueError, match=flag):
        load(name).Args(**{flag[2:].replace("-", "_"): float(x)})


def test_nan_is_refused_for_every_number(main, script, tmp_path):
    assert len(numbers(script)) > 15
    for name in numbers(script):
        flag = f"--{name.replace('_', '-')}"
        assert_refused(main(flag, "nan"), tmp_path, flag)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_gpu_is_refused(main, tmp_path):
    assert_refused(main("--device", "cuda"), tmp_path, "--device cuda", "--device cpu")


def test_tracking_without_its_package_is_refused(main, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert_refused(main("--track"), tmp_path, "--track", "pip install wandb")


def test_tracking_that_cannot_start_is_refused(main, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text("def init(**settings):\n    raise RuntimeError('no API key')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    outcome = main("--track")
    shutil.rmtree(tmp_path / "site")
    assert_refused(outcome, tmp_path, "--track", "no API key")


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(run, monkeypatch, capfd, tmp_path):
    shutil.copytree(run.dir, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    monkeypatch.setattr(sys, "argv", [f"{run.name}.py", *flags(**RUN, run_dir=tmp_path / "run")])
    assert load(run.name).main() == 2
    err = capfd.readouterr().err
    assert f"--run-dir {tmp_path / 'run'}" in err
    assert len(err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_an_empty_folder_is_accepted(script, tmp_path):
    (tmp_path / "run").mkdir()
    train(script, tmp_path / "run", updates=1, env_id="toy_envs:ThreeStep-v0")
    assert (tmp_path / "run" / "result.json").exists()


def test_a_folder_that_cannot_be_made_is_refused(main, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        assert_refused(main("--run-dir", path), tmp_path, "--run-dir", path.name)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_folder_without_write_permission_is_refused(script, monkeypatch, capfd):
    """Root may write everywhere, so there the script acts as nobody for a moment."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        words = flags(env_id="toy_envs:ThreeStep-v0", run_dir=f"{folder}/a/run")
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *words])
        try:
            os.seteuid(user or pwd.getpwnam("nobody").pw_uid)
            code = script.main()
        finally:
            os.seteuid(user)
        message = f"--run-dir {folder}/a/run cannot be used (Permission denied); name another folder"
        assert (code, capfd.readouterr().err) == (2, f"{script.__name__}.py: {message}\n")
        assert os.listdir(folder) == []
        os.chmod(folder, 0o755)


def test_a_process_that_refuses_says_so_in_a_line(script, tmp_path):
    done = run_script(script.__name__, "--env-id", "CartPole-v1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script.__name__}.py: --env-id CartPole-v1 ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_device_without_memory_is_refused(main, tmp_path):
    assert_refused(main("--device", "meta"), tmp_path, "--device meta")


def test_a_relative_module_is_refused(main, tmp_path):
    assert_refused(main("--env-id", ".module:Env-v0"), tmp_path, "--env-id .module:Env-v0")


# ------------------------------------------------------------------------------------------------- runs that fail


@pytest.mark.parametrize(
    ("args", "update", "quantity"),
    [
        (
            {"env_id": "toy_envs:NanReward-v0"},
            2,
            "rewards not finite in environment 0",
        ),  # in the 11th step; an update has 8
        ({"env_id": "toy_envs:HugeReward-v0"}, 1, "rewards not finite in environment 0"),
        ({"env_id": "toy_envs:NanObservation-v0"}, 2, "obs not finite in environment 0"),
        ({"env_id": "toy_envs:Noise-v0", "learning_rate": 1e30, "anneal_lr": False}, 1, "loss"),
        ({"env_id": "toy_envs:Noise-v0", "vf_coef": 1e38, "max_grad_norm": 1e38}, 1, "grad_norm"),
        (
            {"env_id": "toy_envs:Noise-v0", "learning_rate": 1e39, "num_minibatches": 1, "update_epochs": 1},
            1,
            "not finite",
        ),
    ],
    ids=["reward is NaN", "reward is infinite", "observation is NaN", "loss", "gradient", "the last step"],
)
def test_a_run_stops_at_the_first_number_that_is_not_finite(main, args, update, quantity, tmp_path):
    run_dir = tmp_path / "run"
    code, out, err = main(*flags(**SMALL | args, total_timesteps=16 * 4, run_dir=run_dir))
    assert code == 1
    assert "finished" not in out
    (line,) = [line for line in err.splitlines() if "Warning" not in line and "astype" not in line]
    assert line.startswith(f"failed: update {update}: ")
    assert quantity in line
    result = read_json(run_dir / "result.json")
    assert result["status"] == "failed"
    assert quantity in result["error"]
    assert result["global_step"] == 16 * update
    assert not (run_dir / "model.pt").exists()
    rows = read_csv(run_dir / "metrics.csv") if (run_dir / "metrics.csv").exists() else []
    assert len(rows) == update - 1


def test_the_environment_that_is_not_finite_is_named(script):
    x = torch.zeros(8, 4, 3)
    x[5, 2, 1] = math.inf
    with pytest.raises(FloatingPointError, match=r"^obs not finite in environment 2$"):
        script.require_finite("obs", x, "environment")


def test_a_reward_that_is_nan_in_an_evaluation_stops_the_run(script, tmp_path):
    """Training takes 8 steps of an episode, evaluation all 20; the 11th is paid NaN."""
    result = train(script, tmp_path / "run", updates=1, env_id="toy_envs:NanReward-v0")
    assert read_json(tmp_path / "run" / "result.json")["status"] == result["status"] == "failed"


def test_an_evaluation_that_never_ends_stops_the_run(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "LONGEST_EPISODE", 50)
    result = train(script, tmp_path / "run", updates=2, env_id="toy_envs:Endless-v0")
    assert result["status"] == "failed"
    assert "--eval-episodes 0" in result["error"]
    monkeypatch.setattr(script, "LONGEST_EPISODE", 3)  # just long enough
    assert train(script, tmp_path / "ends", updates=1, env_id="toy_envs:ThreeStep-v0")["eval_return"] == 3


def test_a_fault_of_the_environment_is_shown_whole_and_recorded(script, tmp_path):
    with pytest.raises(RuntimeError, match="a fault of the environment"):
        train(script, tmp_path / "run", updates=4, env_id="toy_envs:RaisesInStep-v0", num_evals=0)
    result = read_json(tmp_path / "run" / "result.json")
    assert result["status"] == "failed"
    assert "update 2: RuntimeError('a fault of the environment')" in result["error"]


# ------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("name", CONTROL)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_update_with_a_checkpoint(name, number, tmp_path):
    words = flags(env_id="toy_envs:ThreeStep-v0", run_dir=tmp_path / "run", total_timesteps=10**9, num_evals=0)
    command = [sys.executable, str(ROOT / f"{name}.py"), *words]
    listen = partial(signal.signal, number, signal.SIG_DFL)  # else ignored where pytest runs in the background
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, preexec_fn=listen, **pipes)
    try:
        metrics, deadline = tmp_path / "run" / "metrics.csv", time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert f"go on with --resume {tmp_path / 'run'}" in err
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert saved["iteration"] == len(metrics.read_text().splitlines()) - 1
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "model.pt").exists()
