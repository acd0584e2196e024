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
from benchmark_helpers import final_table, run_bench, start_bench, wait_for

from benchmark.__main__ import main

INSTALLED = all(map(shutil.which, ("slurmctld", "slurmd", "munged"))) and importlib.util.find_spec("submitit")
SLURM = pytest.mark.skipif(not INSTALLED or os.geteuid() != 0, reason="needs slurm-wlm, munge, submitit and root")
FLAGS = ("--executor", "slurm", "--minutes", "5", "--memory", "0.5", "--workers", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of its clients."""
    folder = tmp_path_factory.mktemp("slurm")
    script = Path(__file__).with_name("slurm_node.sh")
    try:
        subprocess.run([script, "start", folder], check=True, timeout=60)
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([script, "stop", folder], check=True)


@SLURM
@pytest.mark.slow
def test_a_job_array_gives_the_folder_of_local_runs(tmp_path, cluster):
    code, text, error = run_bench(tmp_path, "run", "toy", "--out", tmp_path / "slurm", *FLAGS, env=cluster)
    assert code == 0, text + error
    assert "8 tasks, logs in" in text
    assert run_bench(tmp_path, "run", "toy", "--out", tmp_path / "local")[0] == 0
    assert final_table(tmp_path / "slurm") == final_table(tmp_path / "local")
    code, text, _ = run_bench(tmp_path, "run", "toy", "--out", tmp_path / "slurm", *FLAGS, env=cluster)
    assert (code, "8 finished before" in text, "submitted" in text) == (0, True, False)


@SLURM
@pytest.mark.slow
def test_failed_and_cancelled_tasks_can_be_resubmitted(tmp_path, cluster):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 1, "fail-seed": 2}}
    process = start_bench(tmp_path, "run", "toy", "--out", out, *FLAGS, env=cluster, **slow)
    wait_for(lambda: len(list(out.rglob("checkpoint.pt"))) >= 2)
    process.send_signal(signal.SIGINT)  # the runner no longer waits, the tasks go on
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the tasks go on, end them with: scancel" in text
    subprocess.run(["scancel", "--user", "root"], env=cluster, check=True)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], env=cluster, capture_output=True, text=True).stdout.strip())
    code, text, _ = run_bench(tmp_path, "run", "toy", "--out", out, *FLAGS, env=cluster, **slow)
    assert code == 1
    assert text.count("failed: ") == 4
    assert "failed: PPO, Toy-v0, lag 0, seed 2: exit code 1: RuntimeError: boom at the first update (log: " in text
    assert "4 runs failed; repeat them with: python -m benchmark run toy --out" in text
    assert "resuming" in "".join(path.read_text() for path in out.rglob("seed1.log"))
    words = ("run", "toy", "--out", tmp_path / "whole", "--workers", 8)
    assert run_bench(tmp_path, *words, **slow)[0] == 1
    assert final_table(out) == final_table(tmp_path / "whole")


@SLURM
@pytest.mark.slow
def test_what_slurm_refuses_is_said_in_a_line(tmp_path, cluster):
    words = ("run", "toy", "--out", tmp_path / "out", *FLAGS)
    code, _, error = run_bench(tmp_path, *words, "--slurm", "partition=none", env=cluster)
    assert code == 2
    assert "benchmark: Slurm took no job: " in error
    assert "invalid partition specified" in error
    code, _, error = run_bench(tmp_path, *words, "--slurm", "partition", env=cluster)
    assert (code, "--slurm partition: give KEY=VALUE" in error) == (2, True)


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
