"""The compiled gradient step, when it is chosen, and what a run costs in memory."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers import ENVIRONMENT, read_csv, read_json, read_model, train

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") and HEADERS.exists()), reason="no C++ compiler")


@needs_compiler
def test_compiled_and_eager_learn_the_same(script, tmp_path):
    """Fused kernels round differently. After one iteration, 40 steps of Adam of up to 1e-3 each, no parameter is
    further apart than 1e-5, and the mean distance is below 1e-7. (Later the physics makes any difference grow.)"""
    args = {"env_id": "HalfCheetah-v5", "num_envs": 4, "num_steps": 64, "num_minibatches": 4, "update_epochs": 10}
    args |= {"num_evals": 0, "learning_rate": 1e-3, "ent_coef": 0.01}
    for compiled in (False, True):
        train(script, tmp_path / f"{compiled}", updates=1, **args, compile=compiled)
    first, second = (list(read_model(tmp_path / name).values()) for name in ("False", "True"))
    distance = torch.cat([(x.double() - y.double()).abs().flatten() for x, y in zip(first, second, strict=True)])
    assert 0 < distance.max() < 1e-5
    assert distance.mean() < 1e-7
    (eager,), (compiled,) = (read_csv(tmp_path / name / "metrics.csv") for name in ("False", "True"))
    for column in set(eager) - {"charts/SPS", "charts/seconds"}:
        assert compiled[column] == pytest.approx(eager[column], rel=1e-4, abs=1e-5), column


@needs_compiler
def test_a_run_is_compiled_once(vaco, tmp_path):
    """Not again for a new learning rate, nor for another set of snapshots."""
    torch._dynamo.utils.counters.clear()
    train(vaco, tmp_path / "run", updates=4, env_id="toy_envs:Noise-v0", lag=2, num_evals=0, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("words", "has_compiler", "compiled"),
    [
        (["--total-timesteps", "319488"], True, False),  # 156 updates of 320 gradient steps are 49,920
        (["--total-timesteps", "321536"], True, True),  # 157 are 50,240
        (["--total-timesteps", "1e6"], False, False),
        (["--total-timesteps", "1e6", "--no-compile"], True, False),
        (["--total-timesteps", "4096", "--compile"], False, True),
    ],
)
def test_runs_of_50_000_gradient_steps_are_compiled_where_a_compiler_is(
    script, words, has_compiler, compiled, monkeypatch, main, tmp_path
):
    """Unless a flag says otherwise. The choice is said, and kept for --resume."""
    monkeypatch.setattr(script, "train", lambda *args: None)
    monkeypatch.setattr(script.shutil, "which", lambda name: "/usr/bin/g++" if has_compiler else None)
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    code, out, _ = main(script, *words, "--run-dir", tmp_path / "run")
    assert code == 0
    assert out.startswith("compiled (" if compiled else "not compiled (")
    assert read_json(tmp_path / "run" / "config.json")["args"]["compile"] is compiled


MEASURE = """
import json, sys
from pathlib import Path
import vaco_continuous as script
sizes, metrics = [], script.metrics
def measure(*args):
    sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return metrics(*args)
script.metrics = measure
script.train(script.Args(**json.loads(sys.argv[1])), Path(sys.argv[2]))
print(json.dumps(sizes))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow(tmp_path):
    """160 updates of 128 steps; the slope over the last 100, carried on to the 488 updates of 2,048 steps that make a
    million, is below 32 MiB."""
    args = {"env_id": "Hopper-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "update_epochs": 1}
    args |= {"total_timesteps": 128 * 160, "lag": 3, "eval_episodes": 1, "num_evals": 16}
    command = [sys.executable, "-c", MEASURE, json.dumps(args), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    sizes = torch.tensor(json.loads(done.stdout.splitlines()[-1]), dtype=torch.float64)[60:]
    updates = torch.arange(len(sizes), dtype=torch.float64)
    slope = ((updates - updates.mean()) * sizes).sum() / ((updates - updates.mean()) ** 2).sum()
    assert slope * 488 < 32 * 2**20
