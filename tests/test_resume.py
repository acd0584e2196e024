"""A run that was killed goes on as if nothing had happened, or says why it cannot. The faults are those of faults.py;
"the same" is always bit for bit, in every file of a run, but for the columns that measure time."""

import random
import shutil
import signal

import faults
import pytest
from faults import KILL, SCRIPTS, After, Bench, differences
from helpers import call_main, load

ONE_OF_EACH = pytest.mark.parametrize("name", ["vaco_continuous", "grpo_llm"])  # pairs have in common what is asked
ALL = pytest.mark.parametrize("name", SCRIPTS)
FAULTS = pytest.mark.parametrize(("fault", "how", "function"), faults.FAULTS, ids=[x[0] for x in faults.FAULTS])


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """bench(name) -> the Bench of that script, which keeps its undisturbed runs."""
    benches = {name: Bench(name, tmp_path_factory.mktemp(name), random.Random(1)) for name in SCRIPTS}
    return benches.__getitem__


def test_the_comparison_sees_a_difference(bench):
    """Else the tests of this file would show nothing."""
    bench = bench("vaco_continuous")
    found = differences(bench.straight(), bench.straight(seed=6))
    assert found == ["model.pt", "episodes.csv", "evals.csv", "metrics.csv", "TensorBoard"]


@ONE_OF_EACH
@FAULTS
def test_a_fault_has_the_outcome_it_must_have(name, fault, how, function, bench):
    function(bench(name))


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("moment", [faults.at_random, faults.in_a_write])
def test_killed_twenty_times(name, moment, bench):
    for _ in range(7):  # three times each
        faults.killed_often(moment, bench(name))


ENVIRONMENTS = {
    "toy_envs:ThreeStep-v0": {},  # 8 steps a rollout: episodes end within it
    "toy_envs:Matrix-v0": {},  # float64
    "toy_envs:DictCounter-v0": {},
    "toy_envs:Walk-v0": {},
    "Hopper-v5": {"num_steps": 32},
    "Ant-v5": {"num_steps": 32, "eval_episodes": 0},  # 192 steps of one episode; writing back its state is not exact
}


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_environments_go_on_where_they_were(env_id, bench):
    bench, changes = bench("vaco_continuous"), {"env_id": env_id, "checkpoint_every": 2} | ENVIRONMENTS[env_id]
    code, _, run_dir = bench.begin(After(5, KILL), **changes)
    assert code == -signal.SIGKILL
    bench.same_end(run_dir, **changes)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_compiled_run_goes_on_to_the_same_end(bench):
    bench = bench("vaco_continuous")
    _, _, run_dir = bench.begin(After(3, KILL), compile=True)
    bench.same_end(run_dir, compile=True)


@ONE_OF_EACH
def test_checkpoints_change_nothing_in_training(name, bench):
    assert differences(bench(name).straight(), bench(name).straight(checkpoint_every=4)) == []


@ALL
def test_what_cannot_be_resumed_is_refused(name, bench, monkeypatch, capfd, tmp_path):
    straight, other = bench(name).straight(), SCRIPTS[SCRIPTS.index(name) - 2]
    for script, words, message in (
        (name, ["--resume", "none"], "No such file or directory: 'none/config.json'"),
        (other, ["--resume", straight], "unexpected keyword argument"),
        (name, ["--resume", straight, "--seed", 2], "--resume takes no other flag"),
    ):
        code, out, err = call_main(load(script), monkeypatch, capfd, tmp_path / "cwd", *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err
    assert list((tmp_path / "cwd").iterdir()) == []
