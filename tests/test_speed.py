"""python -m benchmark speed: real, short measurements, and what it refuses."""

import csv
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from helpers import ENVIRONMENT, ROOT

PEERS = os.environ.get("VACO_PEERS_PYTHON")
CLEANRL = os.environ.get("VACO_CLEANRL")  # a copy of its ppo_continuous_action.py


def start(*words):
    command = [sys.executable, "-m", "benchmark", "speed", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes)


def speed(*words, timeout=300):
    process = start(*words)
    process.out, process.err = process.communicate(timeout=timeout)
    assert "Traceback" not in process.out + process.err
    return process


def read_rows(out):
    with open(out / "speed.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert all(row.values())
        assert min(float(row[key]) for key in ("steps_per_second", "warmup_seconds", "cpu_share")) > 0
        assert 20 < float(row["peak_rss_mb"]) < 100_000
        assert "python 3." in row["versions"]
        assert str(ROOT) not in row["command"]
    return rows


def read_table(out):
    """{contestant: {column: cell}}"""
    lines = [line for line in (out / "speed.md").read_text().splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


@pytest.mark.slow
def test_ratios_are_medians_over_repeats(tmp_path):
    out = tmp_path / "new"
    words = ("--repeats", 3, "--iterations", 1, "--match", r"PPO, lag \d+$|bare")
    run = speed("--out", out, *words)
    assert run.returncode == 0, run.err
    rows = read_rows(out)
    assert [row["contestant"] for row in rows] == ["PPO, lag 0", "PPO, lag 63", "bare environment"] * 3  # in turn
    speeds = {(row["contestant"], row["repeat"]): float(row["steps_per_second"]) for row in rows}
    table = read_table(out)
    ratios = [speeds["PPO, lag 0", r] / speeds["bare environment", r] for r in "123"]
    assert table["PPO, lag 0"]["x bare environment"] == f"{statistics.median(ratios):.2f}"
    own = [speeds["PPO, lag 0", r] for r in "123"]
    assert table["PPO, lag 0"]["steps/s, median"] == f"{statistics.median(own):,.0f}"
    assert table["PPO, lag 0"]["min to max"] == f"{min(own):,.0f} to {max(own):,.0f}"
    assert {path.name for path in out.iterdir()} == {"speed.csv", "speed.md"}


@pytest.mark.skipif(bool(find_spec("stable_baselines3")), reason="needs a python without the peers")
def test_a_peer_that_fails_is_reported(tmp_path):
    words = ("--repeats", 1, "--iterations", 1, "--match", "SB3|bare")
    run = speed("--out", tmp_path, *words, "--peers", sys.executable)
    assert run.returncode == 1
    reason = "SB3 PPO: exit code 1: ModuleNotFoundError: No module named 'stable_baselines3'"
    assert reason in run.out
    assert reason in (tmp_path / "speed.md").read_text()
    assert "Traceback" in (tmp_path / "SB3-PPO.log").read_text()
    assert [row["contestant"] for row in read_rows(tmp_path)] == ["bare environment"]
    assert read_table(tmp_path)["SB3 PPO"]["steps/s, median"] == ""


def test_an_interrupted_run_keeps_what_is_measured(tmp_path):
    words = ("--repeats", 500, "--iterations", 1, "--match", "bare|PPO, lag 0$")
    process = start("--out", tmp_path, *words)
    while not (tmp_path / "speed.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert read_rows(tmp_path)
    assert len(read_table(tmp_path)) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--iterations", "0"], "--repeats and --iterations must be at least 1"),
        (["--peers", "no/python"], "--peers no/python is no program"),
        (["--cleanrl", "README.md"], "--cleanrl needs a copy of CleanRL's"),
        (["--match", "("], "unterminated subpattern"),
        (["--match", "nobody"], "--match nobody matches the name of no contestant"),
        (["--out", "held"], "holds a speed.csv"),
    ],
)
def test_bad_input_is_refused(tmp_path, words, says):
    (tmp_path / "held").mkdir()
    (tmp_path / "held/speed.csv").write_text("kept")
    words = [*words[:-1], tmp_path / "held"] if words[0] == "--out" else ["--out", tmp_path / "new", *words]
    run = speed(*words)
    assert run.returncode == 2
    assert says in run.err
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "held/speed.csv").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.skipif(not PEERS, reason="VACO_PEERS_PYTHON names no python with the peers")
def test_the_peers_run(tmp_path):
    cleanrl = ["--cleanrl", CLEANRL] if CLEANRL else []
    peers = ["SB3 PPO", "sbx PPO", *(["CleanRL PPO"] if CLEANRL else []), "bare environment"]
    words = ("--repeats", 1, "--iterations", 1, "--match", "SB3|sbx|CleanRL|bare")
    run = speed("--out", tmp_path, *words, "--peers", PEERS, *cleanrl, timeout=900)
    assert run.returncode == 0, run.out + run.err
    assert [row["contestant"] for row in read_rows(tmp_path)] == peers
