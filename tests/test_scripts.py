"""The scripts by command line: files of a run, repetition to the bit, refused input, runs that fail."""

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    CONTROL,
    SMALL,
    call_main,
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

TIMING = {"charts/SPS", "charts/seconds"}
METRICS = {  # the columns that other code reads, besides global_step
    *("charts/learning_rate", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl_mean"),
    *("losses/approx_kl_max", "losses/explained_variance", "losses/grad_norm", "lag/age_mean", "lag/age_max"),
    *("lag/tv_backward", "lag/ess", "lag/tv_forward_mean", "lag/tv_forward_max", "lag/tv_forward_last"),
}
OWN = {"ppo_continuous": {"losses/clipfrac"}, "vaco_continuous": {"lag/filtered_fraction", "lag/filter_triggered"}}

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
    words = flags(**RUN, run_dir="out/run", checkpoint_every=4)
    return Run(request.param, folder / "out" / "run", run_script(request.param, *words, cwd=folder))


@pytest.fixture
def main(script, monkeypatch, capfd, tmp_path):
    """main(*words) -> (exit code, stdout, stderr) of the script in an empty folder."""
    return lambda *words: call_main(script, monkeypatch, capfd, tmp_path / "cwd", *words)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = read_csv(run_dir / "metrics.csv")
    return [{name: x for name, x in row.items() if name not in TIMING} for row in rows]


def header(path: Path) -> list[str]:
    with open(path, newline="") as file:
        return next(csv.reader(file))


def again(run: Run, run_dir: Path, **args) -> Path:
    """The same run once more, in this process, but for `args`."""
    script = load(run.name)
    run_dir.mkdir()
    script.train(script.Args(**RUN | args), run_dir)
    return run_dir


def assert_same_training(a: Path, b: Path) -> None:
    assert (a / "episodes.csv").read_bytes() == (b / "episodes.csv").read_bytes()
    assert metrics(a) == metrics(b)
    assert same_tensors(read_model(a), read_model(b))


# ------------------------------------------------------------------------------------------------- files of a run


def test_a_run_finishes_and_shows_its_progress(run):
    assert (run.process.returncode, run.process.stderr) == (0, "")
    first, *lines, last = run.process.stdout.splitlines()
    assert first == "not compiled (--compile, --no-compile); files in out/run"
    assert last == "finished: out/run"
    for word in ("384 of 400 steps", "SPS", "minutes left", "evaluation"):
        assert word in lines[-1]
    assert [sum(f", {word} " in line for line in lines) for word in ("return", "evaluation")] == [6, 2]


def test_files_of_a_run(run):
    names = {path.name for path in run.dir.iterdir() if not path.name.startswith("events.out.tfevents")}
    assert names == {"episodes.csv", "evals.csv", "metrics.csv", "config.json", "checkpoint.pt", "model.pt"}
    assert [path.name for path in run.dir.parents[1].iterdir()] == ["out"]  # nothing else where it was started


def test_config_says_how_to_repeat_the_run(run):
    config = read_json(run.dir / "config.json")
    defaults = dataclasses.asdict(load(run.name).Args())
    args = defaults | RUN | {"run_dir": "out/run", "checkpoint_every": 4}
    assert config == {"script": run.name, "args": args}


def test_headers_stay_as_they_are(run):
    assert header(run.dir / "episodes.csv") == ["global_step", "episodic_return", "episodic_length"]
    assert header(run.dir / "evals.csv") == ["global_step", "eval_return", "eval_std", "eval_length"]
    first, *columns = header(run.dir / "metrics.csv")
    assert first == "global_step"
    assert set(columns) == METRICS | TIMING | OWN[run.name]
    assert len(columns) == len(set(columns))


def test_metrics_have_a_row_per_update(run):
    rows = read_csv(run.dir / "metrics.csv")
    assert [row["global_step"] for row in rows] == [64, 128, 192, 256, 320, 384]  # whole batches: 400 is rounded down
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx([3e-3 * left / 6 for left in range(6, 0, -1)])
    assert max(row["lag/age_max"] for row in rows) == 2
    seconds = [row["charts/seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_episodes_are_real(run):
    """A reward of 1 per step, but for the one at which the pole falls."""
    rows = read_csv(run.dir / "episodes.csv")
    assert len(rows) > 20
    assert all(row["episodic_length"] == row["episodic_return"] + 1 for row in rows)
    assert sum(row["episodic_length"] for row in rows) <= 384
    evals = read_csv(run.dir / "evals.csv")
    assert [row["global_step"] for row in evals] == [192, 384]
    assert evals[-1]["eval_length"] == pytest.approx(evals[-1]["eval_return"] + 1)


def test_tensorboard_has_the_same_numbers(run):
    events = EventAccumulator(str(run.dir)).Reload()
    for table in ("metrics", "evals"):
        rows = read_csv(run.dir / f"{table}.csv")
        for column in header(run.dir / f"{table}.csv")[1:]:
            points = events.Scalars(column if "/" in column else f"charts/{column}")
            expected = [(row["global_step"], pytest.approx(row[column], rel=1e-5, abs=1e-8)) for row in rows]
            assert [(event.step, event.value) for event in points] == expected
    assert len(events.Scalars("charts/episodic_return")) == len(read_csv(run.dir / "episodes.csv"))


def test_default_folder_is_named_after_environment_script_lag_and_seed(script, main, tmp_path):
    words = flags(**SMALL | {"num_steps": 9}, env_id="toy_envs:ThreeStep-v0", total_timesteps=18, seed=3, lag=2)
    code, out, _ = main(*words)
    assert code == 0
    (run_dir,) = (tmp_path / "cwd" / "runs").iterdir()
    assert run_dir.name.startswith(f"toy_envs-ThreeStep-v0__{script.__name__}__lag2__3__")
    assert f"finished: runs/{run_dir.name}" in out


def test_a_copy_of_a_script_runs_alone_under_another_name(tmp_path):
    """In an empty folder."""
    (tmp_path / "my_ppo.py").write_text(Path(load("ppo_continuous").__file__).read_text())
    words = flags(**SMALL, env_id="InvertedPendulum-v5", total_timesteps=16)
    done = subprocess.run([sys.executable, "my_ppo.py", *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "__my_ppo__" in run_dir.name
    assert (run_dir / "model.pt").exists()


def test_a_run_without_episodes_or_evaluation_has_no_such_tables(script, tmp_path):
    train(script, tmp_path / "run", updates=1, env_id="HalfCheetah-v5", num_evals=0)  # episodes of 1000 steps
    assert [path.name for path in (tmp_path / "run").glob("*.csv")] == ["metrics.csv"]


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
    assert_same_training(other, run.dir)
    assert (other / "evals.csv").read_bytes() == (run.dir / "evals.csv").read_bytes()


def test_another_seed_gives_another_run(run, tmp_path):
    other = again(run, tmp_path / "run", seed=6)
    assert (other / "episodes.csv").read_bytes() != (run.dir / "episodes.csv").read_bytes()
    a, b = read_model(other), read_model(run.dir)
    assert not any(torch.equal(a[name], b[name]) for name in a if name != "obs_rms.count")


@pytest.mark.parametrize("evaluation", [{"num_evals": 0}, {"eval_episodes": 0}, {"num_evals": 6, "eval_episodes": 1}])
def test_evaluation_changes_nothing_in_training(run, evaluation, tmp_path):
    assert_same_training(again(run, tmp_path / "run", **evaluation), run.dir)


WANDB = """
import json
def init(**settings):
    with open("wandb.json", "w") as file:
        json.dump(settings, file, default=str)
"""


def test_tracking_changes_nothing_in_training(run, tmp_path, monkeypatch):
    """With a package that writes to a file what it is asked for: to send what TensorBoard gets."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    other = again(run, tmp_path / "run", track=True)
    monkeypatch.delitem(sys.modules, "wandb")
    assert_same_training(other, run.dir)
    assert (
        read_json(tmp_path / "wandb.json").items()
        >= {"name": "run", "dir": str(other), "sync_tensorboard": True}.items()
    )


# --------------------------------------------------------------------------------------------------------- refused


def assert_refused(outcome, tmp_path, *words: str) -> None:
    """Exit code 2, one line or tyro's box on stderr with these words, and nothing left behind."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    lines = err.strip().splitlines()
    assert len(lines) == 1 or (lines[0].startswith("╭") and len(lines) <= 20)
    message = " ".join(err.replace("│", " ").split())
    assert [word for word in words if word not in message] == []
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the old environments
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env-id NoSuch-v5", ["NoSuch"]),
        ("--env-id no_such_module:Env-v0", ["no_such_module"]),
        ("--env-id toy_envs:NoSuch-v0", ["NoSuch"]),
        ("--env-id Hopper-v3", ["mujoco v2 and v3"]),
        ("--env-id toy_envs:RaisesInInit-v0", ["a file that is not there"]),
        ("--env-id CartPole-v1", ["CartPole-v1", "Discrete(2)", "Box"]),
        ("--env-id toy_envs:DiscreteActions-v0", ["Discrete(2)", "Box"]),
        ("--total-timesteps 2047", ["--total-timesteps must lie in 2048 .. "]),
        ("--num-minibatches 3", ["--num-minibatches", "2048", "equal parts"]),
        ("--num-minibatches 2048", ["--num-minibatches", "of 2 or more"]),
        ("--num-minibatches 0", ["--num-minibatches must lie in 1 .. "]),
        ("--num-envs 0", ["--num-envs"]),
        ("--num-steps -1", ["--num-steps"]),
        ("--update-epochs 0", ["--update-epochs"]),
        ("--checkpoint-every 0", ["--checkpoint-every"]),
        ("--lag -1", ["--lag"]),
        ("--lag 1.5", ["--lag"]),
        ("--lag-mode sometimes", ["--lag-mode", "uniform", "fixed"]),
        ("--gamma 1.01", ["--gamma must lie in 0 .. 1, not 1.01"]),
        ("--gae-lambda -0.01", ["--gae-lambda"]),
        ("--learning-rate 0", ["--learning-rate"]),
        ("--max-grad-norm inf", ["--max-grad-norm"]),
        ("--ent-coef -0.1", ["--ent-coef"]),
        ("--vf-coef -0.1", ["--vf-coef"]),
        ("--target-kl 0", ["--target-kl"]),
        ("--eval-episodes -1", ["--eval-episodes"]),
        ("--num-evals -1", ["--num-evals"]),
        ("--seed -1", ["--seed"]),
        ("--device nonsense", ["nonsense", "cpu"]),
        ("--no-such-flag", ["--no-such-flag"]),
        ("HalfCheetah-v5", ["HalfCheetah-v5"]),
        ("--run-dir ../file", ["File exists", "../file"]),
        ("--run-dir ../file/run", ["Not a directory"]),
        ("--run-dir ..", ["File exists"]),
    ],
)
def test_bad_input_is_refused(main, words, message, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert_refused(main(*words.split()), tmp_path, *message)


@pytest.mark.parametrize(
    ("name", "flag", "x"),
    [("ppo_continuous", "--clip-coef", x) for x in ("0", "-0.2")]
    + [("vaco_continuous", flag, x) for flag in ("--delta", "--rho-bar", "--c-bar") for x in ("0", "-0.2", "1e300")],
)
def test_thresholds_are_positive(name, flag, x):
    with pytest.raises(ValueError, match=flag):
        load(name).Args(**{flag[2:].replace("-", "_"): float(x)})


def test_nan_is_refused_for_every_number(script):
    numbers = [x.name for x in dataclasses.fields(script.Args) if x.type in (int, float, float | None)]
    assert len(numbers) > 15
    for name in numbers:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must lie in .*, not nan"):
            script.Args(**{name: float("nan")})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_gpu_is_refused(main, tmp_path):
    assert_refused(main("--device", "cuda"), tmp_path, "CUDA")


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(run, monkeypatch, capfd, tmp_path):
    before = {path.name: path.read_bytes() for path in run.dir.iterdir()}
    outcome = call_main(load(run.name), monkeypatch, capfd, tmp_path / "cwd", *flags(**RUN, run_dir=run.dir))
    assert_refused(outcome, tmp_path, "File exists", str(run.dir))
    assert {path.name: path.read_bytes() for path in run.dir.iterdir()} == before


# ------------------------------------------------------------------------------------------------- runs that fail


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("args", "updates", "last_line"),
    [
        ({"env_id": "toy_envs:NanReward-v0"}, 1, "rewards not finite"),  # in the 11th step; an update has 8
        ({"env_id": "toy_envs:HugeReward-v0"}, 0, "rewards not finite"),
        ({"env_id": "toy_envs:NanObservation-v0"}, 1, "obs not finite"),
        ({"env_id": "toy_envs:Noise-v0", "learning_rate": 1e30, "anneal_lr": False}, 0, "loss not finite"),
        (
            {"env_id": "toy_envs:Noise-v0", "vf_coef": 1e14, "max_grad_norm": 1e30, "learning_rate": 1e30},
            0,
            "not finite",
        ),
        ({"env_id": "toy_envs:RaisesInStep-v0"}, 1, "RuntimeError: a fault of the environment"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_run_stops_at_the_first_number_that_is_not_finite(main, args, updates, last_line, tmp_path):
    run_dir = tmp_path / "run"
    code, out, err = main(*flags(**SMALL | args, total_timesteps=16 * 4, run_dir=run_dir))
    assert code == 1
    assert "finished" not in out
    assert last_line in err.splitlines()[-1]
    assert not (run_dir / "model.pt").exists()
    assert updates == (len(read_csv(run_dir / "metrics.csv")) if (run_dir / "metrics.csv").exists() else 0)


def test_a_reward_that_is_nan_in_an_evaluation_stops_the_run(script, tmp_path):
    """Training takes 8 steps of an episode, evaluation all 20; the 11th is paid NaN."""
    with pytest.raises(FloatingPointError, match="evaluation returns not finite"):
        train(script, tmp_path / "run", updates=1, env_id="toy_envs:NanReward-v0")
