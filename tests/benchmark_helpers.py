"""What the tests of the benchmark use: a script that stands in for the real ones, and folders of finished runs."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmark import runs
from benchmark.suites import Suite

# Takes no time, resumes from its checkpoint, and its eval_std depends on every step it has made.
STAND_IN = """
import json, os, sys, time
from dataclasses import asdict, dataclass
from pathlib import Path
import tyro

@dataclass
class Args:
    env_id: str = "Toy-v0"
    lag: int = 0
    seed: int = 1
    gain: float = 1.0
    num_envs: int = 10
    num_steps: int = 2
    total_timesteps: int = 100
    step_seconds: float = 0.0
    fail_seed: int = 0
    bad_checkpoint: bool = False
    run_dir: Path | None = None
    resume: Path | None = None

    def __post_init__(self):
        if self.total_timesteps < self.num_envs * self.num_steps:
            raise ValueError(f"--total-timesteps must be at least one batch, not {self.total_timesteps}")

def main():
    args = tyro.cli(Args)
    folder, resumed = args.resume or args.run_dir, args.resume
    if resumed:
        args = Args(**json.loads((folder / "config.json").read_text())["args"])
    else:
        folder.mkdir(parents=True)  # like the scripts: a run directory which is there already is refused
        (folder / "config.json").write_text(json.dumps({"script": "toy", "args": asdict(args)}, default=str))
    (folder / "pid").write_text(str(os.getpid()))
    print("resuming" if resumed else "starting", args.seed, "threads", os.environ["OMP_NUM_THREADS"], flush=True)
    batch, height = args.num_envs * args.num_steps, 100 * args.gain + args.seed + args.lag
    last = args.total_timesteps // batch * batch
    headers = {"metrics": "global_step,charts/SPS", "evals": "global_step,eval_return,eval_std,eval_length"}
    headers["episodes"] = "global_step,episodic_return,episodic_length"
    state = {"step": 0, "sum": args.seed, "sizes": [0, 0, 0]}
    if resumed:
        if args.bad_checkpoint:
            sys.exit("this checkpoint is of no use")
        state = json.loads((folder / "checkpoint.pt").read_text())
    files = [open(folder / f"{name}.csv", "a", buffering=1) for name in headers]
    for file, size, header in zip(files, state["sizes"], headers.values()):
        file.truncate(size)
        file.write("" if size else header + "\\n")
    for step in range(state["step"] + batch, last + 1, batch):
        time.sleep(args.step_seconds)
        state = {"step": step, "sum": (state["sum"] * 1103515245 + 12345) % 2**31}
        files[0].write(f"{step},1000.0\\n")
        files[1].write(f"{step},{height * step / last},{state['sum'] / 2**31},10.0\\n")
        files[2].write(f"{step},{height - 1.0},10\\n")
        if args.fail_seed == args.seed:
            raise RuntimeError("boom at the first update")
        state["sizes"] = [file.tell() for file in files]
        (folder / "checkpoint.partial").write_text(json.dumps(state))
        os.replace(folder / "checkpoint.partial", folder / "checkpoint.pt")
    (folder / "model.pt").write_text("")

if __name__ == "__main__":
    main()
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
    settings = {"num-envs": 10, "num-steps": 2, "total-timesteps": 110} | changes.pop("settings", {})
    suite = {
        "description": "stand-in",
        "algorithms": {"PPO": (str(script), {"gain": 1}), "VACO .5": (str(script), {"gain": 2.5})},
        "tasks": ("Toy-v0",),
        "lags": (0, 15),
        "seeds": (1, 2),
    }
    return suite | {"settings": settings} | changes


def start_bench(folder, *words, env=None, **changes):
    """`python -m benchmark WORDS` in a folder, with the suite toy of a stand-in there."""
    script = folder / "stand_in.py"
    if not script.exists():
        script.write_text(STAND_IN)
    (folder / "driver.py").write_text(DRIVER.format(root=str(runs.ROOT), suite=toy(script, **changes)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, folder / "driver.py", *map(str, words)], cwd=folder, env=env, **pipes)


def run_bench(folder, *words, env=None, **changes):
    """The same to its end. Returns (exit code, stdout, stderr)."""
    process = start_bench(folder, *words, env=env, **changes)
    stdout, stderr = process.communicate(timeout=300)
    assert "Traceback" not in stdout + stderr
    return process.returncode, stdout, stderr


def read_rows(out):
    with open(out / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def final_table(out):
    """results.csv without the columns that tell the time."""
    return [{key: value for key, value in row.items() if key not in ("sps", "peak_rss_mb")} for row in read_rows(out)]


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


def write_runs(out, change=lambda run, config, record, evals: None, **changes):
    """Folders of finished runs without running them; `change` edits what the run and the runner have written."""
    suite = Suite(**toy(**changes))
    runs.remember_suite(out, "toy", suite)
    for run in runs.expand(suite, out):
        config = {"script": "toy", "args": {flag.replace("-", "_"): value for flag, value in run.flags.items()}}
        versions = {"python": "3.12", "torch": "2.13", "numpy": "2.4", "gymnasium": "1.4", "mujoco": "4.0"}
        start = {"command": "toy", "commit": "abc", "versions": versions, "machine": "a machine", "time": "now"}
        record = {"status": "finished", "exit_code": 0, "peak_rss_mb": 300.0, "starts": [start]}
        value = {"PPO": 10.0, "VACO .5": 12.0}.get(run.algorithm, 11.0) * run.seed
        evals = [(50, 0.0), (100, value)]
        change(run, config, record, evals)
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text(json.dumps(config))
        run.beside(".json").write_text(json.dumps(record))
        tables = {"evals": [f"{step},{value},1,1" for step, value in evals], "metrics": ["100,5.0"]}
        tables["episodes"] = [f"100,{value - 1},10"]
        headers = {"evals": "global_step,eval_return,eval_std,eval_length", "metrics": "global_step,charts/SPS"}
        headers["episodes"] = "global_step,episodic_return,episodic_length"
        for name, lines in tables.items():
            (run.folder / f"{name}.csv").write_text("\n".join([headers[name], *lines]) + "\n")
        (run.folder / "model.pt").write_text("")
    return suite
