"""What several test files use: how a script is run, and how the files of a run are read."""

import copy
import csv
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
CONTROL = ("ppo_continuous", "vaco_continuous")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests"), "COLUMNS": "200"}
SMALL = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "eval_episodes": 2, "num_evals": 1}


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


def call_main(script, monkeypatch, capfd, cwd: Path, *words) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `python NAME.py WORDS` in the folder cwd. In this process: saves the import."""
    cwd.mkdir(exist_ok=True)
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
    capfd.readouterr()
    try:
        code = script.main() or 0
    except SystemExit as end:
        code = end.code or 0
    except Exception:  # what the interpreter would do
        traceback.print_exc()
        code = 1
    return code, *capfd.readouterr()


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
