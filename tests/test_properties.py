"""Random arguments, good, bad and extreme: a script trains with finite numbers, or says in one line why not.

Nothing else may happen: no exception from deep inside, no training of nothing, no cell that is NaN or infinite."""

import csv
import dataclasses
import math
import tempfile
from pathlib import Path

import pytest
from helpers import CONTROL, LLM, TINY, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-8, 1e-45, 1e-300, 1e30, 3e38, 1e300, math.nan, math.inf, -math.inf]
NUMBER = st.one_of(sampled_from(EDGES), st.floats(0, 1), st.floats())
HUGE = [0, -1, 2 * 10**15, -(10**30), 10**30]

# What is not here is at its default. Sizes that are allowed stay small, so that a run takes a fraction of a second.
COMMON = {
    "lag": sampled_from([0, 1, 5, 10**14, -1, 10**16]),
    "seed": st.one_of(st.integers(0, 2**32 - 1), sampled_from([2**32, *HUGE])),
    "num_evals": sampled_from([0, 1, 3, 10**14, *HUGE]),
    "checkpoint_every": sampled_from([0, 1, 2, 10**14, *HUGE]),
    "num_minibatches": sampled_from([1, 2, 3, 4, 8, 16, *HUGE]),
    "update_epochs": sampled_from([1, 2, 0, -1]),
    "learning_rate": NUMBER,
    "max_grad_norm": NUMBER,
    "norm_adv": st.booleans(),
}
CONTROL_ARGS = {
    "env_id": sampled_from(["Noise", "ThreeStep", "ThreeStepTimeLimit", "DictCounter", "Matrix", "Sign", "Constant"]),
    "num_envs": sampled_from([1, 2, 3, *HUGE]),
    "num_steps": sampled_from([1, 2, 8, *HUGE]),
    "total_timesteps": sampled_from([1, 16, 30, 48, *HUGE]),
    "eval_episodes": sampled_from([0, 1, 2, -1]),
    "gamma": NUMBER,
    "gae_lambda": NUMBER,
    "ent_coef": NUMBER,
    "vf_coef": NUMBER,
    "target_kl": st.one_of(st.none(), NUMBER),
    "anneal_lr": st.booleans(),
    "lag_mode": sampled_from(["uniform", "fixed"]),
}
LLM_ARGS = {
    "num_terms": sampled_from([2, 3, 1, 0, -1, 10**9]),
    "num_digits": sampled_from([1, 2, 0, -1, 10**9]),
    "ops": sampled_from(["+", "+-*", "", "/", "++", "+ "]),
    "num_updates": sampled_from([1, 2, 3, 0, -1]),
    "num_prompts": sampled_from([1, 2, 4, 0, -1]),
    "num_generations": sampled_from([2, 4, 1, 0, -1]),
    "temperature": NUMBER,
    "max_new_tokens": sampled_from([None, 5, 30, 0, -1]),
    "warmup_updates": sampled_from([0, 1, 10**14, -1]),
    "kl_coef": NUMBER,
    "n_embd": sampled_from([2, 8, 12, 7, 0, -1]),
    "warm_start_steps": sampled_from([0, 1, 3, -1]),
    "eval_problems": sampled_from([1, 4, 0, -1]),
    "pass_k": sampled_from([1, 3, 0, -1]),
}
OF_SCRIPT = {
    "ppo_continuous": CONTROL_ARGS | {"clip_coef": NUMBER, "recompute_logprobs": st.booleans()},
    "vaco_continuous": CONTROL_ARGS
    | {"delta": NUMBER, "rho_bar": NUMBER, "c_bar": NUMBER, "realign": st.booleans(), "tv_filter": st.booleans()},
    "grpo_llm": LLM_ARGS | {"clip_low": NUMBER, "clip_high": NUMBER},
    "vaco_llm": LLM_ARGS
    | {"delta": NUMBER, "rho_bar": NUMBER, "realign": st.booleans(), "tv_filter": st.booleans()}
    | {"tv_center": sampled_from(["learner", "behaviour"])},
}
SMALL = {
    name: {"num_envs": 2, "num_steps": 8, "total_timesteps": 48, "num_minibatches": 2, "env_id": "Noise"}
    for name in CONTROL
}
SMALL |= {name: TINY | {"num_updates": 3, "eval_problems": 4} for name in LLM}
SMALL = {name: args | {"update_epochs": 2, "num_evals": 2} for name, args in SMALL.items()}


@st.composite
def arguments(draw, name: str) -> dict:
    """A small run with up to four fields changed: with all of them changed, nearly every run would be refused."""
    fields = COMMON | OF_SCRIPT[name]
    chosen = draw(st.lists(sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True))
    other_warm_start = name in LLM and not COMMON.keys() >= {*chosen}  # it is made for this example alone
    return SMALL[name] | ({"warm_start_steps": 3} if other_warm_start else {}) | {x: draw(fields[x]) for x in chosen}


def refusal(error: ValueError) -> str:
    assert len(str(error).splitlines()) == 1
    assert "--" in str(error)
    return "refused"


def outcome(name: str, args: dict, folder: Path) -> str:
    """'refused', 'failed' or 'finished', each with what it promises. Anything else raises."""
    script, run_dir, fault = load(name), folder / "run", None
    if name in CONTROL:
        args = args | {"env_id": f"toy_envs:{args['env_id']}-v0", "eval_episodes": args.get("eval_episodes", 1)}
    else:
        args = args | {"warm_start_dir": folder.parent / "warm"}
        args["warm_start_dir"].mkdir(exist_ok=True)
    try:
        args = script.Args(**args)
    except ValueError as error:
        return refusal(error)
    run_dir.mkdir()
    try:
        script.train(args, run_dir)
    except FloatingPointError as error:
        fault = str(error)
    for path in run_dir.glob("*.csv"):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                wrong = {column: x for column, x in row.items() if x and not math.isfinite(float(x))}
                assert not wrong, (path.name, wrong)
    assert (run_dir / "model.pt").exists() == (fault is None)
    if fault:
        assert fault.endswith(" not finite")
        return "failed"
    with open(run_dir / "metrics.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == (args.num_iterations if name in CONTROL else args.num_updates) > 0
    return "finished"


QUIET = {"deadline": None, "derandomize": True, "database": None}
QUIET |= {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}


def try_many(name: str, max_examples: int, folder: Path) -> None:
    def one(args):
        outcome(name, args, Path(tempfile.mkdtemp(dir=folder)))  # beside the warm starts, which the examples share

    given(arguments(name))(settings(max_examples=max_examples, **QUIET)(one))()


@pytest.mark.filterwarnings("ignore")  # numpy's of overflow, where a run fails because of it
@pytest.mark.parametrize("name", OF_SCRIPT)
def test_any_arguments(name, tmp_path, capsys):
    try_many(name, 50, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_SCRIPT)
def test_many_arguments(name, tmp_path, capsys):
    try_many(name, 1000, tmp_path)


@pytest.mark.parametrize("name", OF_SCRIPT)
def test_every_field_is_tried(name):
    """But for those that only name things, and those that have few values."""
    names = {field.name for field in dataclasses.fields(load(name).Args)}
    left_out = {"run_dir", "resume", "track", "compile", "device", "warm_start_dir", "task", "loss"}
    assert names - left_out == (COMMON | OF_SCRIPT[name]).keys()


@pytest.mark.parametrize("name", OF_SCRIPT)
def test_the_three_outcomes_occur(name, tmp_path, capsys):
    """Else the tests above would show little."""
    extreme = {"learning_rate": 1e30} | ({"num_updates": 10} if name in LLM else {})
    for change, expected in (({}, "finished"), (extreme, "failed"), ({"lag": -1}, "refused")):
        folder = tmp_path / expected
        folder.mkdir()
        assert outcome(name, SMALL[name] | change, folder) == expected


@pytest.mark.parametrize("name", CONTROL)
@pytest.mark.parametrize("env_id", ["Constant", "ThreeStepTimeLimit"])
def test_returns_without_variance(name, env_id, tmp_path, capsys):
    """Every return is the same reward, so that no part of their variance can be explained."""
    assert outcome(name, SMALL[name] | {"env_id": env_id, "gamma": 0.0}, tmp_path) == "finished"
