"""The runner on Slurm: a real cluster of one node, which slurm_node.sh starts, and real tasks of a stand-in script.

apt-get install slurm-wlm munge; python -m pip install submitit; python -m pytest -m slow tests/test_slurm.py (as root)
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_helpers import DRIVER, STAND_IN, read_rows, toy, wait_for

from benchmark.__main__ import main
from benchmark.runs import ROOT

INSTALLED = all(map(shutil.which, ("slurmctld", "slurmd", "munged"))) and importlib.util.find_spec("submitit")
SLURM = pytest.mark.skipif(not INSTALLED or os.geteuid() != 0, reason="needs slurm-wlm, munge, submitit and root")
FLAGS = ("--executor", "slurm", "--minutes", "5", "--memory", "0.5", "--workers", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    script = Path(__file__).with_name("slurm_node.sh")
    try:
        subprocess.run([script, "start", folder], check=True, timeout=60)
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([script, "stop", folder], check=True)


@pytest.fixture
def bench(tmp_path, cluster):
    """bench(*words, **changes of the toy suite) is `python -m benchmark *words` on the cluster."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def start(*words, **changes):
        suite = toy(tmp_path / "stand_in.py", **changes)
        (tmp_path / "driver.py").write_text(DRIVER.format(root=str(ROOT), suite=suite))
        command = [sys.executable, str(tmp_path / "driver.py"), *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=cluster, **pipes)

    def bench(*words, **changes):
        process = start(*words, **changes)
        text, _ = process.communicate(timeout=300)
        return process.returncode, text

    bench.start = start
    return bench


@SLURM
@pytest.mark.slow
def test_a_job_array_gives_the_folder_of_local_runs(bench, tmp_path):
    code, text = bench("run", "toy", "--out", tmp_path / "slurm", *FLAGS)
    assert code == 0, text
    assert "8 tasks, logs in" in text
    assert bench("run", "toy", "--out", tmp_path / "local")[0] == 0
    assert read_rows(tmp_path / "slurm") == read_rows(tmp_path / "local")
    code, text = bench("run", "toy", "--out", tmp_path / "slurm", *FLAGS)
    assert (code, "8 finished before" in text, "submitted" in text) == (0, True, False)


@SLURM
@pytest.mark.slow
def test_failed_tasks_are_listed_and_can_be_resubmitted(bench, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(STAND_IN)
    algorithms = {"PPO": (str(script), {"gain": 1}), "VACO .5": (str(script), {"gain": 2.5})}
    script.write_text(STAND_IN.replace('if args.get("fail_seed") == args["seed"]', 'if args["seed"] == 2'))
    code, text = bench("run", "toy", "--out", tmp_path / "out", *FLAGS, algorithms=algorithms)
    assert code == 1
    assert text.count("failed: ") == 4
    assert "failed: PPO, Toy-v0, lag 0, seed 2: unfinished: RuntimeError: boom at the first update (log: " in text
    assert "4 runs failed; repeat them with: python -m benchmark run toy --out" in text
    script.write_text(STAND_IN)
    code, text = bench("run", "toy", "--out", tmp_path / "out", *FLAGS, algorithms=algorithms)
    assert (code, "4 finished before" in text, ": 4 tasks" in text) == (0, True, True)


@SLURM
@pytest.mark.slow
def test_cancelled_tasks_are_resumed(bench, tmp_path, cluster):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 1}}
    process = bench.start("run", "toy", "--out", out, *FLAGS, **slow)
    wait_for(lambda: len(list(out.rglob("checkpoint.pt"))) >= 2)
    process.send_signal(signal.SIGINT)  # the runner no longer waits, the tasks go on
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the tasks go on, end them with: scancel" in text
    subprocess.run(["scancel", "--user", "root"], env=cluster, check=True)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], env=cluster, capture_output=True, text=True).stdout.strip())
    assert list(out.rglob("checkpoint.pt"))
    code, text = bench("run", "toy", "--out", out, *FLAGS, **slow)
    assert code == 0, text
    assert "resuming" in "".join(path.read_text() for path in out.rglob("seed*.log"))
    assert bench("run", "toy", "--out", tmp_path / "whole", "--workers", 8, **slow)[0] == 0
    assert read_rows(out) == read_rows(tmp_path / "whole")


@SLURM
@pytest.mark.slow
def test_what_slurm_refuses_is_said_in_a_line(bench, tmp_path):
    code, text = bench("run", "toy", "--out", tmp_path / "out", *FLAGS, "--slurm", "partition=none")
    assert code == 2
    assert "benchmark: Slurm took no job: " in text
    assert "invalid partition specified" in text
    code, text = bench("run", "toy", "--out", tmp_path / "out", *FLAGS, "--slurm", "partition")
    assert (code, "--slurm partition: give KEY=VALUE" in text) == (2, True)


def test_without_submitit_a_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)  # as if it were not installed
    assert main(["run", "quick", "--out", str(tmp_path / "new"), "--executor", "slurm"]) == 2
    assert capsys.readouterr().err == "benchmark: --executor slurm needs submitit: python -m pip install submitit\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not importlib.util.find_spec("submitit"), reason="needs submitit")
def test_without_slurm_a_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "quick", "--out", str(tmp_path / "new"), "--executor", "slurm"]) == 2
    assert "benchmark: --executor slurm needs a machine that can submit jobs" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
