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
        return list(csv.DictReader(file))


def read_table(out, title):
    """{contestant: {column: cell}} of the first table under a heading that begins with the title."""
    text = (out / "speed.md").read_text().split(f"\n## {title}")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def assert_complete(row):
    """A row of speed.csv with everything but, perhaps, the share of sampling."""
    assert all(x for name, x in row.items() if name != "sampling_share")
    assert float(row["steps_per_second"]) > 0
    assert float(row["warmup_seconds"]) > 0
    assert 20 < float(row["peak_rss_mb"]) < 100_000
    assert float(row["cpu_share"]) > 0
    assert "python 3." in row["versions"]
    assert "torch" in row["versions"]
    assert str(ROOT) not in row["command"]


def test_a_short_run_without_peers(tmp_path):
    words = ("--only", "control", "--repeats", 1, "--iterations", 1, "--match", r"PPO, lag \d+$|bare")
    run = speed("--out", tmp_path / "new", *words)
    assert run.returncode == 0, run.err
    assert "speed_requirements.txt" in run.out.splitlines()[0]
    rows = read_rows(tmp_path / "new")
    assert [row["contestant"] for row in rows] == ["PPO, lag 0", "PPO, lag 63", "bare environment"]
    for row in rows:
        assert_complete(row)
        assert (row["table"], row["repeat"], row["sampling_share"]) == ("control", "1", "")

    speeds = {row["contestant"]: float(row["steps_per_second"]) for row in rows}
    table = read_table(tmp_path / "new", "HalfCheetah-v5")
    assert table.keys() == speeds.keys()
    for name, cells in table.items():
        assert cells["steps/s, median"] == f"{speeds[name]:,.0f}"
        assert cells["x bare environment"] == f"{speeds[name] / speeds['bare environment']:.2f}"
    assert table["PPO, lag 63"]["x lag 0"] == f"{speeds['PPO, lag 63'] / speeds['PPO, lag 0']:.2f}"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"speed.csv", "speed.md"}


def test_ratios_are_medians_over_repeats(tmp_path):
    run = speed("--out", tmp_path, "--only", "control", "--repeats", 3, "--iterations", 1, "--match", "bare|physics")
    assert run.returncode == 0, run.err
    rows = read_rows(tmp_path)
    assert [row["repeat"] for row in rows] == ["1", "1", "2", "2", "3", "3"]  # all contestants in turn
    speeds = {(row["contestant"], row["repeat"]): float(row["steps_per_second"]) for row in rows}
    ratios = [speeds["physics alone", r] / speeds["bare environment", r] for r in "123"]
    cells = read_table(tmp_path, "HalfCheetah-v5")["physics alone"]
    physics = [speeds["physics alone", r] for r in "123"]
    assert cells["x bare environment"] == f"{statistics.median(ratios):.2f}"
    assert cells["steps/s, median"] == f"{statistics.median(physics):,.0f}"
    assert cells["min to max"] == f"{min(physics):,.0f} to {max(physics):,.0f}"


@pytest.mark.skipif(bool(find_spec("stable_baselines3")), reason="needs a python without the peers")
def test_a_peer_that_fails_is_reported(tmp_path):
    words = ("--only", "control", "--repeats", 1, "--iterations", 1, "--match", "SB3|physics")
    run = speed("--out", tmp_path, *words, "--peers", sys.executable)
    assert run.returncode == 1
    reason = "SB3 PPO: exit code 1: ModuleNotFoundError: No module named 'stable_baselines3'"
    assert reason in run.out
    assert reason in (tmp_path / "speed.md").read_text()
    assert "Traceback" in (tmp_path / "SB3-PPO.log").read_text()
    assert [row["contestant"] for row in read_rows(tmp_path)] == ["physics alone"]
    assert read_table(tmp_path, "HalfCheetah-v5")["SB3 PPO"]["steps/s, median"] == ""


def test_an_interrupted_run_keeps_what_is_measured(tmp_path):
    words = ("--only", "control", "--repeats", 500, "--iterations", 1, "--match", "bare|physics")
    process = start("--out", tmp_path, *words)
    while not (tmp_path / "speed.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    rows = read_rows(tmp_path)
    assert rows
    for row in rows:
        assert_complete(row)
    assert len(read_table(tmp_path, "HalfCheetah-v5")) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "controls"], "--only"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--iterations", "-1"], "--iterations must be at least 1"),
        (["--peers", "no/python"], "--peers no/python is no program"),
        (["--cleanrl", "README.md"], "--cleanrl needs --peers"),
        (["--peers", sys.executable, "--cleanrl", "no.py"], "--cleanrl no.py is no file"),
        (["--match", "("], "--match ( is no regular expression"),
        (["--only", "memory", "--match", "nobody"], "--match nobody matches the name of no contestant"),
    ],
)
def test_bad_input_is_refused(tmp_path, words, says):
    run = speed("--out", tmp_path / "new", *words)
    assert run.returncode == 2
    assert says in run.err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_a_measurement_is_not_overwritten(tmp_path):
    (tmp_path / "speed.csv").write_text("kept")
    run = speed("--out", tmp_path)
    assert run.returncode == 2
    assert "holds a speed.csv" in run.err
    assert (tmp_path / "speed.csv").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.skipif(not PEERS, reason="VACO_PEERS_PYTHON names no python with the peers")
def test_the_peers_run(tmp_path):
    cleanrl = ["--cleanrl", CLEANRL] if CLEANRL else []
    peers = ["SB3 PPO", "sbx PPO", *(["CleanRL PPO"] if CLEANRL else []), "bare environment", "GRPO LLM, lag 0"]
    words = ("--repeats", 1, "--iterations", 1, "--match", "SB3|sbx|CleanRL|TRL|bare|GRPO LLM, lag 0$")
    run = speed("--out", tmp_path, *words, "--peers", PEERS, *cleanrl, timeout=900)
    assert run.returncode == 0, run.out + run.err
    rows = read_rows(tmp_path)
    assert [row["contestant"] for row in rows] == [*peers, "TRL GRPO"]
    for row in rows:
        assert_complete(row)
        assert bool(row["sampling_share"]) == (row["table"] == "llm")
    speeds = {row["contestant"]: float(row["steps_per_second"]) for row in rows}
    ratio = read_table(tmp_path, "language model")["GRPO LLM, lag 0"]["x TRL GRPO"]
    assert ratio == f"{speeds['GRPO LLM, lag 0'] / speeds['TRL GRPO']:.2f}"
