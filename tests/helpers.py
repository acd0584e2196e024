"""What several test files use: how a script is run, and how the files of a run are read."""

import copy
import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMING = ("SPS", "seconds", "tokens_per_second")  # how the names of the columns that measure time end
CONTROL = ("ppo_continuous", "vaco_continuous")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
LLM = ("grpo_llm", "vaco_llm")
SMALL = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "eval_episodes": 2, "num_evals": 1}
TINY = {"num_terms": 2, "ops": "+", "n_embd": 32, "warm_start_steps": 100, "num_prompts": 4, "num_generations": 4}
TINY |= {"num_minibatches": 2, "eval_problems": 8, "pass_k": 2, "kl_coef": 0.1, "learning_rate": 1e-3}


def load(name: str):
    return importlib.import_module(name)


def flags(**args) -> list[str]:
    """flags(num_envs=2, track=True, anneal_lr=False) -> ["--num-envs", "2", "--track", "--no-anneal-lr"]"""
    words = []
    for name, x in args.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if x else f"--no-{flag}"] if isinstance(x, bool) else [f"--{flag}", str(x)]
    return words


def run_script(name: str, *words: str, cwd: Path, **more) -> subprocess.CompletedProcess:
    """python NAME.py WORDS, in the folder cwd."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, **more)


def train(script, run_dir: Path, updates: int, **args):
    """A small training in this process, of so many updates. Returns the agent."""
    args = SMALL | args
    run_dir.mkdir(parents=True, exist_ok=True)
    total_timesteps = args["num_envs"] * args["num_steps"] * updates
    return script.train(script.Args(total_timesteps=total_timesteps, **args), run_dir)


def read_csv(path: Path) -> list[dict[str, float]]:
    with open(path, newline="") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_model(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "model.pt", weights_only=True)


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tables(run_dir: Path) -> dict[str, list[dict[str, str]]]:
    """All that is in the tables of a run but for the columns that measure time."""
    found = {}
    for path in sorted(run_dir.glob("*.csv")):
        rows = csv.DictReader(path.read_text().splitlines())
        found[path.name] = [{name: x for name, x in row.items() if not name.endswith(TIMING)} for row in rows]
    return found


def assert_same_runs(a: Path, b: Path) -> None:
    """Bit for bit."""
    assert tables(a) == tables(b)
    assert tables(a)["metrics.csv"]
    assert same_tensors(read_model(a), read_model(b))


def spy(monkeypatch, script, name: str) -> list[tuple]:
    """Lists (arguments, result) of every call of script.NAME, as they were then. The function itself runs as ever."""
    real, calls = getattr(script, name), []

    def listening(*args):
        before = [copy.deepcopy(x) if isinstance(x, torch.nn.Module | dict) else x for x in args]
        result = real(*args)
        calls.append((before, result))
        return result

    monkeypatch.setattr(script, name, listening)
    return calls


def start(script, envs, seed: int) -> dict:
    """The state with which `rollout` begins."""
    obs, _ = envs.reset(seed=[seed + 1000 * i for i in range(envs.num_envs)])
    return {"obs": obs, "global_step": 0}
