"""What the tests of the benchmark use: a script that stands in for the real ones, and folders of finished runs."""

import csv
import json
import os
import time
from pathlib import Path

from benchmark import runs
from benchmark.suites import Suite

# Takes no time, resumes from its checkpoint, and its eval_std depends on every step it has made.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    print("--resume DIR")
    sys.exit()
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
resumed = Path(flags["--resume"]) if "--resume" in flags else None
if resumed:
    args = json.loads((resumed / "config.json").read_text())["args"]
else:
    args = {flag[2:].replace("-", "_"): json.loads(x) if x[0].isdigit() else x for flag, x in flags.items()}
folder = Path(args["run_dir"])
if not resumed:
    folder.mkdir(parents=True)  # like the scripts: a run directory which is there already is refused
assert os.environ["OMP_NUM_THREADS"] == "1"
versions = {"python": "3.12", "torch": "2.13", "numpy": "2.4", "gymnasium": "1.4", "mujoco": "4.0"}
config = {"args": args, "commit": "abc", "versions": versions, "machine": {"cores": 2}, "command": sys.argv}
if not resumed:
    (folder / "config.json").write_text(json.dumps(config))
(folder / "pid").write_text(str(os.getpid()))
if args.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("resuming" if resumed else "starting", args["seed"], flush=True)
batch, height = args["num_envs"] * args["num_steps"], 100 * args["gain"] + args["seed"] + args["lag"]
names = {"metrics.csv": "global_step,charts/SPS\\n", "evals.csv": "global_step,eval_return,eval_std,eval_length\\n"}
state = {"step": 0, "sum": args["seed"], "sizes": [0, 0]}
if resumed:
    state = json.loads((folder / "checkpoint.pt").read_text())
    if args.get("bad_checkpoint"):
        raise RuntimeError("this checkpoint is of no use")
files = [open(folder / name, "a", buffering=1) for name in names]
for file, size, header in zip(files, state["sizes"], names.values()):
    file.truncate(size)
    file.write("" if size else header)
metrics, evals = files
for step in range(state["step"] + batch, args["total_timesteps"] + 1, batch):
    time.sleep(args["step_seconds"])
    state = {"step": step, "sum": (state["sum"] * 1103515245 + 12345) % 2**31}
    metrics.write(f"{step},1000.0\\n")
    evals.write(f"{step},{height * step / args['total_timesteps']},{state['sum']},10.0\\n")
    if args.get("fail_seed") == args["seed"]:
        raise RuntimeError("boom at the first update")
    state["sizes"] = [file.tell() for file in files]
    (folder / "checkpoint.partial").write_text(json.dumps(state))
    os.replace(folder / "checkpoint.partial", folder / "checkpoint.pt")
result = {"status": "finished", "seed": args["seed"], "global_step": step, "train_return": height - 1.0}
result |= {"eval_return": float(height), "eval_std": state["sum"] / 2**31, "sps": 1000.0}
(folder / "result.partial").write_text(json.dumps(result))
os.replace(folder / "result.partial", folder / "result.json")
"""

DRIVER = """
import sys
sys.path.insert(0, {root!r})
from benchmark.__main__ import main
from benchmark.suites import SUITES, Suite
SUITES["toy"] = Suite(**{suite!r})
sys.exit(main())
"""


def toy(script="stand_in.py", **changes):
    """A suite of eight runs of the stand-in; total-timesteps is not a multiple of its batch of 10 x 2."""
    settings = {"num-envs": 10, "num-steps": 2, "total-timesteps": 110, "step-seconds": 0} | changes.pop("settings", {})
    algorithms = {"PPO": (str(script), {"gain": 1}), "VACO .5": (str(script), {"gain": 2.5})}
    suite = {
        "description": "stand-in",
        "algorithms": algorithms,
        "tasks": ("Toy-v0",),
        "lags": (0, 15),
        "seeds": (1, 2),
    }
    return suite | {"settings": settings} | changes


def read_rows(out):
    with open(out / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def cells(text):
    """The rows of the Markdown tables in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


def alive(out):
    """Process ids of stand-ins under `out` that still run."""
    found = [path.read_text() for path in out.rglob("pid")]
    return [int(pid) for pid in found if pid and is_alive(int(pid))]  # a file may just have been opened


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a process that is dead but not yet collected by its parent is not running
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def write_runs(out, change=lambda run, config, result, evals: None, **changes):
    """Folders of finished runs without running them; `change` edits what a run has written."""
    suite = Suite(**toy(**changes))
    out.mkdir()
    runs.remember_suite(out, "toy", suite)
    for run in runs.expand(suite, out):
        args = {flag.replace("-", "_"): value for flag, value in run.flags.items()}
        versions = {"python": "3.12", "torch": "2.13", "numpy": "2.4", "gymnasium": "1.4", "mujoco": "4.0"}
        config = {"args": args, "commit": "abc", "versions": versions, "machine": "a machine"}
        value = {"PPO": 10.0, "VACO .5": 12.0}[run.algorithm] * run.seed
        result = {"status": "finished", "seed": run.seed, "global_step": 100, "train_return": value - 1}
        result |= {"eval_return": value, "eval_std": 1.0, "sps": 5.0}
        evals = [(50, 0.0), (100, value)]
        run.folder.mkdir(parents=True)
        change(run, config, result, evals)
        (run.folder / "config.json").write_text(json.dumps(config))
        (run.folder / "result.json").write_text(json.dumps(result))
        lines = [f"{step},{value},1,1" for step, value in evals]
        (run.folder / "evals.csv").write_text(
            "\n".join(["global_step,eval_return,eval_std,eval_length", *lines]) + "\n"
        )
    return suite
