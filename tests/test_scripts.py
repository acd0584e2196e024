"""The scripts by command line: files of a run, repetition to the bit, refused input, runs that fail."""

import csv
import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CONTROL, SMALL, assert_same_runs, flags, load, read_csv, read_json, run_script, tables, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

METRICS = [  # the columns that other code reads
    "global_step",
    "charts/learning_rate",
    "charts/SPS",
    "charts/seconds",
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/approx_kl_mean",
    "losses/approx_kl_max",
    "losses/explained_variance",
    "losses/grad_norm",
    "lag/age_mean",
    "lag/age_max",
    "lag/tv_backward",
    "lag/ess",
    "lag/tv_forward_mean",
    "lag/tv_forward_max",
    "lag/tv_forward_last",
]
OWN = {"ppo_continuous": ["losses/clipfrac"], "vaco_continuous": ["lag/filtered_fraction", "lag/filter_triggered"]}

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


def again(run: Run, run_dir: Path, **args) -> Path:
    """The same run once more, in this process, but for `args`."""
    run_dir.mkdir()
    load(run.name).train(load(run.name).Args(**RUN | args), run_dir)
    return run_dir


# ------------------------------------------------------------------------------------------------- files of a run


def test_a_run_finishes_and_shows_its_progress(run):
    assert (run.process.returncode, run.process.stderr) == (0, "")
    first, *progress, last = run.process.stdout.splitlines()
    assert first == "not compiled (--compile, --no-compile); files in out/run"
    assert last == "finished: out/run"
    assert len(progress) == 6 + 2
    for word in ("384 of 400 steps", "SPS", "minutes left", "evaluation"):
        assert word in progress[-1]
    assert "return" in progress[-2]


def test_files_of_a_run(run):
    """No checkpoint yet: there is one every 50 updates."""
    names = {path.name for path in run.dir.iterdir() if not path.name.startswith("events.out.tfevents")}
    assert names == {"config.json", "episodes.csv", "evals.csv", "metrics.csv", "model.pt"}
    assert [path.name for path in run.dir.parents[1].iterdir()] == ["out"]  # nothing else where it was started


def test_config_says_how_to_repeat_the_run(run):
    defaults = dataclasses.asdict(load(run.name).Args())
    args = defaults | RUN | {"run_dir": "out/run", "compile": False}
    assert read_json(run.dir / "config.json") == {"script": run.name, "args": args}


def test_columns(run):
    header = {}
    for table in ("episodes", "evals", "metrics"):
        with open(run.dir / f"{table}.csv", newline="") as file:
            header[table] = next(csv.reader(file))
    assert header["episodes"] == ["global_step", "episodic_return", "episodic_length"]
    assert header["evals"] == ["global_step", "eval_return", "eval_std", "eval_length"]
    assert header["metrics"][:4] == METRICS[:4]
    assert sorted(header["metrics"]) == sorted(METRICS + OWN[run.name])


def test_metrics_have_a_row_per_update(run):
    rows = read_csv(run.dir / "metrics.csv")
    assert [row["global_step"] for row in rows] == [64, 128, 192, 256, 320, 384]  # whole batches: 400 is rounded down
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx([3e-3 * left / 6 for left in range(6, 0, -1)])
    assert max(row["lag/age_max"] for row in rows) == 2
    seconds = [row["charts/seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert [row["charts/SPS"] * row["charts/seconds"] for row in rows] == pytest.approx([64 * i for i in range(1, 7)])


def test_episodes_and_evaluations_are_real(run):
    """A reward of 1 per step, but for the one at which the pole falls."""
    rows = read_csv(run.dir / "episodes.csv")
    assert len(rows) > 20
    assert all(row["episodic_length"] == row["episodic_return"] + 1 for row in rows)
    assert sum(row["episodic_length"] for row in rows) <= 384
    evals = read_csv(run.dir / "evals.csv")
    assert [row["global_step"] for row in evals] == [192, 384]
    assert all(row["eval_length"] == pytest.approx(row["eval_return"] + 1) for row in evals)


def test_tensorboard_has_the_same_numbers(run):
    events, tables = EventAccumulator(str(run.dir)).Reload(), {}
    for table, prefix in (("metrics", ""), ("evals", "charts/"), ("episodes", "charts/")):
        rows = read_csv(run.dir / f"{table}.csv")
        tables |= {prefix + name: [(row["global_step"], row[name]) for row in rows] for name in list(rows[0])[1:]}
    assert set(events.Tags()["scalars"]) == tables.keys()
    for tag, points in tables.items():
        expected = [(step, pytest.approx(x, rel=1e-5, abs=1e-8)) for step, x in points]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == expected


def test_default_folder_is_named_after_environment_script_lag_and_seed(script, main, tmp_path):
    words = flags(**SMALL, env_id="toy_envs:ThreeStep-v0", total_timesteps=16, seed=3, lag=2)
    code, out, _ = main(script, *words)
    assert code == 0
    (run_dir,) = (tmp_path / "cwd" / "runs").iterdir()
    assert run_dir.name.startswith(f"toy_envs-ThreeStep-v0__{script.__name__}__lag2__3__")
    assert f"finished: runs/{run_dir.name}" in out


def test_evaluations_are_evenly_spaced_and_the_last_is_at_the_end(vaco, tmp_path):
    for num_evals, expected in ((0, []), (1, [7]), (2, [4, 7]), (3, [3, 5, 7]), (20, range(1, 8))):
        run_dir = tmp_path / str(num_evals)
        train(vaco, run_dir, updates=7, env_id="toy_envs:ThreeStep-v0", num_evals=num_evals)
        rows = read_csv(run_dir / "evals.csv") if (run_dir / "evals.csv").exists() else []
        assert [row["global_step"] / 16 for row in rows] == list(expected)


def test_learning_rate_stays_without_annealing(script, tmp_path):
    train(script, tmp_path / "run", updates=3, env_id="toy_envs:ThreeStep-v0", anneal_lr=False)
    assert [row["charts/learning_rate"] for row in read_csv(tmp_path / "run" / "metrics.csv")] == [3e-4] * 3


# ----------------------------------------------------------------------------------------------------- repetition


def test_the_same_seed_gives_the_same_run_to_the_bit(run, tmp_path):
    assert_same_runs(again(run, tmp_path / "run"), run.dir)


def test_another_seed_gives_another_run(run, tmp_path):
    assert tables(again(run, tmp_path / "run", seed=6))["episodes.csv"] != tables(run.dir)["episodes.csv"]


@pytest.mark.parametrize("args", [{"eval_episodes": 0}, {"num_evals": 6, "eval_episodes": 1}, {"checkpoint_every": 2}])
def test_evaluations_and_checkpoints_change_nothing_in_training(run, args, tmp_path):
    other = again(run, tmp_path / "run", **args)
    (run.dir / "evals.csv").rename(tmp_path / "evals.csv")
    (other / "evals.csv").unlink(missing_ok=True)
    assert_same_runs(other, run.dir)
    (tmp_path / "evals.csv").rename(run.dir / "evals.csv")


def test_tracking_sends_what_tensorboard_gets_and_changes_nothing(run, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: calls.append(settings)))
    other = again(run, tmp_path / "tracked", track=True)
    assert calls == [{"project": "vaco", "name": "tracked", "dir": other, "sync_tensorboard": True}]
    assert_same_runs(other, run.dir)


# -------------------------------------------------------------------------------------------------------- refused


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the old environments
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env-id NoSuch-v5", "NoSuch"),
        ("--env-id no_such_module:Env-v0", "no_such_module"),
        ("--env-id Hopper-v3", "v3"),
        ("--env-id=", "environment ID"),
        ("--env-id CartPole-v1", "CartPole-v1 has actions Discrete(2)"),
        ("--env-id toy_envs:DiscreteActions-v0", "a Box"),
        ("--env-id toy_envs:RaisesInInit-v0", "a file that is not there"),
        ("--total-timesteps 2047", "--total-timesteps must lie in 2048"),
        ("--num-minibatches 3", "--num-minibatches must cut the batch of 2048"),
        ("--num-minibatches 2048", "parts of 2 or more"),
        ("--num-minibatches 0", "--num-minibatches"),
        ("--num-envs 1 --num-steps 1 --num-minibatches 1", "--num-minibatches"),
        ("--num-envs 0", "--num-envs must lie in 1"),
        ("--num-steps -1", "--num-steps"),
        ("--update-epochs 0", "--update-epochs"),
        ("--checkpoint-every 0", "--checkpoint-every"),
        ("--lag -1", "--lag must lie in 0"),
        ("--lag 1.5", "--lag"),
        ("--lag-mode sometimes", "'uniform', 'fixed'"),
        ("--gamma 1.01", "--gamma must lie in 0 .. 1, not 1.01"),
        ("--gae-lambda -0.01", "--gae-lambda"),
        ("--learning-rate 0", "--learning-rate"),
        ("--max-grad-norm inf", "--max-grad-norm"),
        ("--ent-coef -0.1", "--ent-coef"),
        ("--vf-coef -0.1", "--vf-coef"),
        ("--target-kl 0", "--target-kl"),
        ("--eval-episodes -1", "--eval-episodes"),
        ("--num-evals -1", "--num-evals"),
        ("--seed -1", "--seed"),
        ("--seed 4294967296", "--seed"),  # numpy.random takes 32 bits
        ("--device nonsense", "nonsense"),
        ("--no-such-flag", "--no-such-flag"),
        ("HalfCheetah-v5", "HalfCheetah-v5"),
        ("--run-dir .", "File exists: '.'"),
        ("--run-dir /dev/null/run", "/dev/null/run"),
    ],
)
def test_bad_input_is_refused(vaco, main, words, message, tmp_path):
    """Exit code 2, a short message with what to change, and nothing left behind."""
    code, _, err = main(vaco, *words.split())
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert len(err) < 1500
    assert list((tmp_path / "cwd").iterdir()) == []


def test_numbers_out_of_range_are_refused(script):
    """NaN lies in no range; thresholds are positive."""
    numbers = [x.name for x in dataclasses.fields(script.Args) if x.type in (int, float, float | None)]
    assert len(numbers) > 15
    for name in numbers:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} "):
            script.Args(**{name: math.nan})
    for name in {"clip_coef", "delta", "rho_bar", "c_bar"} & {*numbers}:
        for x in (0.0, -0.2, 1e300, math.inf):
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} "):
                script.Args(**{name: x})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_gpu_is_refused(vaco, main, tmp_path):
    code, out, err = main(vaco, "--device", "cuda")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "CUDA" in err


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(run, main):
    before = {path.name: path.read_bytes() for path in run.dir.iterdir()}
    code, out, err = main(load(run.name), *flags(**RUN, run_dir=run.dir))
    assert (code, out) == (2, "")
    assert err == f"{run.name}.py: [Errno 17] File exists: '{run.dir}'\n"
    assert {path.name: path.read_bytes() for path in run.dir.iterdir()} == before


# ------------------------------------------------------------------------------------------------- runs that fail


@pytest.mark.filterwarnings("ignore")  # numpy's of overflow
@pytest.mark.parametrize(
    ("args", "update", "quantity"),
    [
        ({"env_id": "NanReward"}, 2, "rewards not finite"),  # in the 11th step; an update has 8
        ({"env_id": "HugeReward"}, 1, "rewards not finite"),
        ({"env_id": "NanObservation"}, 2, "obs not finite"),
        ({"learning_rate": 1e30, "anneal_lr": False}, 1, "_loss not finite"),
        ({"learning_rate": 1e30, "num_minibatches": 1, "update_epochs": 1}, 2, "not finite"),
    ],
    ids=["reward is NaN", "reward is infinite", "observation is NaN", "loss", "the last step"],
)
def test_a_run_stops_at_the_first_number_that_is_not_finite(script, main, args, update, quantity, tmp_path):
    args = SMALL | {"env_id": "Noise"} | args
    args["env_id"] = f"toy_envs:{args['env_id']}-v0"
    code, out, err = main(script, *flags(**args, total_timesteps=16 * 4, run_dir=tmp_path / "run"))
    assert code == 1
    assert "finished" not in out
    assert err.splitlines()[-1].startswith("FloatingPointError: ")
    assert quantity in err.splitlines()[-1]
    assert not (tmp_path / "run" / "model.pt").exists()
    metrics = tmp_path / "run" / "metrics.csv"
    assert (len(read_csv(metrics)) if metrics.exists() else 0) == update - 1


@pytest.mark.parametrize("name", ["policy_loss", "value_loss", "entropy", "grad_norm"])
def test_losses_and_gradients_are_looked_at_after_every_update(script, name):
    def steps_fn(agent, opt_state, minibatches, args):
        names = ("policy_loss", "value_loss", "entropy", "grad_norm", "approx_kl_mean")
        losses = {f"losses/{x}": torch.tensor(math.inf if x == name else 0.0) for x in names}
        return opt_state, [losses] * len(minibatches)

    agent, args = script.Agent(3, 2), script.Args(num_envs=2, num_steps=8, num_minibatches=2)
    names = ("norm_obs", "actions", "logprobs", "learner_logprobs", "advantages", "returns")
    batch = {x: torch.zeros(16) for x in names}
    with pytest.raises(FloatingPointError, match=f"^{name} not finite$"):
        script.update(agent, script.init_adam(agent), batch, args, np.random.default_rng(0), steps_fn)


def test_a_reward_that_is_nan_in_an_evaluation_stops_the_run(vaco, tmp_path):
    """Training takes 8 steps of an episode, evaluation all 20; the 11th is paid NaN."""
    with pytest.raises(FloatingPointError, match="evaluation returns not finite"):
        train(vaco, tmp_path / "run", updates=1, env_id="toy_envs:NanReward-v0")


def test_a_fault_of_the_environment_is_shown_whole(vaco, main, tmp_path):
    words = flags(**SMALL, env_id="toy_envs:RaisesInStep-v0", total_timesteps=64, run_dir=tmp_path / "run")
    code, _, err = main(vaco, *words)
    assert code == 1
    assert "toy_envs.py" in err
    assert err.splitlines()[-1] == "RuntimeError: a fault of the environment"
