"""The runner of the benchmark: real processes of a quick stand-in, killed and resumed, and the scripts themselves."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark_helpers import (
    alive,
    cells,
    final_table,
    read_rows,
    run_bench,
    start_bench,
    toy,
    wait_for,
    write_runs,
)

from benchmark import runner, runs
from benchmark.__main__ import main, parse, with_settings
from benchmark.suites import SUITES, Suite


def records(out):
    return [json.loads(path.read_text()) for path in sorted(out.rglob("lag*/seed*.json"))]


# ---------------------------------------------------------------------------------------------------------- the runner


def test_runs_all_reports_and_skips_what_is_finished(tmp_path):
    out = tmp_path / "out"
    code, text, error = run_bench(tmp_path, "run", "toy", "--out", out)
    assert code == 0, error
    assert "8/8 runs done, 0 running, 0 failed" in text
    assert ["mean", "116.5", "266.5", "+150.0"] in cells(text)
    rows = read_rows(out)
    assert [(r["algorithm"], r["lag"]) for r in rows[:3]] == [("PPO", "0"), ("VACO .5", "0"), ("PPO", "15")]
    assert [r["seed"] for r in rows] == ["1"] * 4 + ["2"] * 4
    assert {r["status"] for r in rows} == {"finished"}
    assert (rows[3]["eval_return"], rows[3]["train_return"]) == ("266.0", "265.0")
    assert (out / "Toy-v0/VACO-.5/lag15/seed1.log").read_text() == "starting 1 threads 1\n"

    times = {path: path.stat().st_mtime_ns for path in out.rglob("model.pt")}
    code, text, _ = run_bench(tmp_path, "run", "toy", "--out", "out", "--workers", 1)  # the folder, named otherwise
    assert (code, "8 finished before" in text) == (0, True)
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("model.pt")}
    assert run_bench(tmp_path, "report", "out")[0] == 0


def test_the_record_of_a_run(tmp_path):
    out = tmp_path / "out"
    assert run_bench(tmp_path, "run", "toy", "--out", out, "--seeds", 1, settings={"fail-seed": 2})[0] == 0
    assert run_bench(tmp_path, "run", "toy", "--out", out, "--seeds", 2, settings={"fail-seed": 2})[0] == 1
    good, bad = records(out)[:2]
    assert (good["status"], good["exit_code"], bad["status"], bad["exit_code"]) == ("finished", 0, "failed", 1)
    assert 5 < good["peak_rss_mb"] < 1000
    (start,) = good["starts"]
    assert start.keys() == {"command", "commit", "versions", "machine", "time"}
    assert start["versions"].keys() == {"python", "torch", "numpy", "gymnasium", "mujoco"}
    assert "stand_in.py --env-id Toy-v0 --lag 0 --seed 1" in start["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", start["time"])


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_kills_the_runs_and_says_how_to_go_on(tmp_path, signum, code):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 30}}
    process = start_bench(tmp_path, "run", "toy", "--out", out, "--workers", 2, **slow)
    wait_for(lambda: len(alive(out)) == 2)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (code, "")
    assert f"go on with: python -m benchmark run toy --out {out} --workers 2" in stdout
    assert not alive(out)
    assert {(r["status"], r["exit_code"]) for r in records(out)} == {("running", -9)}
    text = run_bench(tmp_path, "status", out, **slow)[1]
    assert "toy: 8 runs, 6 missing, 2 unfinished" in text


def test_a_failed_run_is_listed_and_started_again(tmp_path):
    out, failing = tmp_path / "out", {"settings": {"fail-seed": 2}}
    code, text, _ = run_bench(tmp_path, "run", "toy", "--out", out, **failing)
    assert code == 1
    reason = "failed: VACO .5, Toy-v0, lag 15, seed 2: exit code 1: RuntimeError: boom at the first update (log:"
    assert reason in text
    assert text.count("failed: ") == 4
    assert f"4 runs failed; repeat them with: python -m benchmark run toy --out {out}" in text
    text = run_bench(tmp_path, "status", out, **failing)[1]
    assert "toy: 8 runs, 4 finished, 4 failed" in text
    assert "failed: PPO, Toy-v0, lag 0, seed 2 (log: " in text
    code, text, _ = run_bench(tmp_path, "run", "toy", "--out", out, **failing)
    assert (code, "4 finished before" in text) == (1, True)


def test_a_second_runner_is_refused(tmp_path):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 30}}
    process = start_bench(tmp_path, "run", "toy", "--out", out, "--workers", 2, **slow)
    wait_for(lambda: alive(out))
    code, _, error = run_bench(tmp_path, "run", "toy", "--out", out, **slow)
    assert (code, error) == (2, f"benchmark: {out} is in use by another runner\n")
    wait_for(lambda: len(alive(out)) == 2)
    assert "2 running" in run_bench(tmp_path, "status", out, **slow)[1]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (["run", "none", "--out", "new"], {}, "unknown suite none: choose one of quick"),
        (["run", "toy", "--out", "new", "--workers", "0"], {}, "--workers, --minutes, --cpus and --memory must be"),
        (["run", "toy"], {}, "--out is missing: name a folder for the runs, such as runs/toy"),
        (["run", "toy", "--out", "new"], {"seeds": (1, 2, 1)}, "two runs for one folder: PPO, Toy-v0, lag 0, seed 1"),
        (["run", "toy", "--out", "new"], {"algorithms": {"A": ("absent.py", {})}}, "no script absent.py"),
        (["run", "quick", "--out", "held"], {}, "held holds the suite toy"),
        (["run", "toy", "--out", "held"], {"settings": {"num-steps": 4}}, "held holds toy with other settings"),
        (["run", "toy", "--out", "held", "--dry-run", "--set", "num-steps=4"], {}, "held holds toy with other"),
        (["run", "toy", "--out", "full"], {}, "full is not empty and holds no suite.json"),
        (["run", "toy", "--out", "full/notes"], {}, "notes"),
        (["run", "toy", "--out", "new", "--set", "gian=1"], {}, "--set gian: no such flag of "),
        (["run", "toy", "--out", "new", "--set", "gain=1"], {}, "--set gain: it is set already for PPO"),
        (["run", "toy", "--out", "new", "--set", "num-envs=x"], {}, "refuses the flags of PPO, Toy-v0, lag 0, seed 1"),
        (["run", "toy", "--out", "new", "--set", "num-envs=60"], {}, "--total-timesteps must be at least one batch"),
        (["report", "new"], {}, "new/results.csv"),
        (["status", "full"], {}, "full holds no suite.json"),
    ],
)
def test_refusals_are_one_line_and_touch_nothing(tmp_path, words, changes, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    runs.remember_suite(tmp_path / "held", "toy", Suite(**toy(tmp_path / "stand_in.py")))
    code, _, error = run_bench(tmp_path, *words, **changes)
    assert code == 2
    assert message in error
    assert error.startswith("benchmark: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["notes"]
    assert (tmp_path / "full/notes").read_text() == "mine"


def test_a_finished_run_of_another_kind_is_refused(tmp_path):
    def change(run, config, record, evals):
        if (run.algorithm, run.lag, run.seed) == ("VACO .5", 15, 2):
            config["args"]["num_envs"] = 7

    write_runs(tmp_path / "out", change, script=tmp_path / "stand_in.py")
    for words in (["report", "out"], ["status", "out"], ["run", "toy", "--out", "out"]):
        code, _, error = run_bench(tmp_path, *words)
        assert (code, error.count("\n")) == (2, 1)
        assert "seed2 holds another configuration (num_envs 7, not 10)" in error


def test_status_reads_what_the_script_has_written(tmp_path):
    (run, *_) = runs.expand(write_runs(tmp_path / "out"), tmp_path / "out")
    assert runs.status(run) == "finished"
    (run.folder / "model.pt").unlink()
    assert runs.status(run) == "unfinished"
    run.beside(".json").write_text('{"status": "failed"}')
    assert runs.status(run) == "failed"
    shutil.rmtree(run.folder)
    run.beside(".json").unlink()
    assert runs.status(run) == "missing"


# ----------------------------------------------------------------------------------------- killed, resumed, repeated


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments_changes_no_result(tmp_path, rounds):
    """Each time kill -9 hits the runner, whose runs go on, or a run while the runner goes on."""
    settings = {"settings": {"step-seconds": 0.02, "total-timesteps": 200 * rounds}}
    out, rng = tmp_path / "out", random.Random(rounds)
    for _ in range(rounds):
        process = start_bench(tmp_path, "run", "toy", "--out", out, "--workers", 2, **settings)
        time.sleep(rng.uniform(0.8, 2))
        if rng.random() < 0.5 and (running := alive(out)):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(rng.choice(running), signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.communicate()
    assert run_bench(tmp_path, "run", "toy", "--out", out, "--workers", 8, **settings)[0] == 0
    assert run_bench(tmp_path, "run", "toy", "--out", tmp_path / "whole", "--workers", 8, **settings)[0] == 0
    assert final_table(out) == final_table(tmp_path / "whole")
    assert len({row["eval_std"] for row in read_rows(out)}) == 2  # one per seed: every step counts
    assert (out / "curves.png").read_bytes() == (tmp_path / "whole/curves.png").read_bytes()


def test_a_killed_run_is_resumed_from_its_checkpoint(tmp_path):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 0.3}}
    process = start_bench(tmp_path, "run", "toy", "--out", out, "--workers", 8, **slow)
    wait_for(lambda: list(out.rglob("checkpoint.pt")))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    stopped = {path.parent for path in out.rglob("checkpoint.pt")} - {path.parent for path in out.rglob("model.pt")}
    assert stopped
    assert run_bench(tmp_path, "run", "toy", "--out", out, "--workers", 8, **slow)[0] == 0
    logs = {path.with_suffix(""): path.read_text() for path in out.rglob("seed*.log")}
    assert all(log.startswith("starting") for log in logs.values())
    assert {folder for folder, log in logs.items() if "resuming" in log} == stopped
    assert all(len(path.read_text().splitlines()) == 6 for path in out.rglob("metrics.csv"))  # 5 steps, none twice
    assert [len(r["starts"]) for r in records(out)].count(2) == len(stopped)


def test_a_checkpoint_of_no_use_is_said(tmp_path):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 0.5, "bad-checkpoint": True}}
    words = ("run", "toy", "--out", out, "--seeds", 1, "--lags", 0, "--algorithms", "PPO")
    process = start_bench(tmp_path, *words, **slow)
    wait_for(lambda: list(out.rglob("checkpoint.pt")))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    code, text, _ = run_bench(tmp_path, *words, **slow)
    assert code == 1
    folder = out / "Toy-v0/PPO/lag0/seed1"
    assert f"no use; it was resumed: if its checkpoint cannot be loaded, delete {folder} (log: " in text
    shutil.rmtree(folder)
    assert run_bench(tmp_path, *words, **slow)[0] == 0


def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path):
    (run, *_) = runs.expand(Suite(**toy()), tmp_path)
    run.folder.mkdir(parents=True)
    args = {flag.replace("-", "_"): value for flag, value in run.flags.items()}
    (run.folder / "config.json").write_text(json.dumps({"args": args}))
    assert not runner.resumable(run)  # no checkpoint
    (run.folder / "checkpoint.pt").write_text("")
    assert runner.resumable(run)
    (run.folder / "config.json").write_text(json.dumps({"args": args | {"num_envs": 11}}))
    assert not runner.resumable(run)
    (run.folder / "config.json").write_text("{")
    assert not runner.resumable(run)


def test_a_run_that_another_process_is_at_is_waited_for(tmp_path):
    """As a task of a cluster, or a run whose runner was killed."""
    out = tmp_path / "out"
    (first, *_) = runs.expand(Suite(**toy(tmp_path / "stand_in.py")), out)
    first.folder.parent.mkdir(parents=True)
    runs.remember_suite(tmp_path / "other", "toy", Suite(**toy(tmp_path / "stand_in.py")))
    shutil.copy(tmp_path / "other/suite.json", out)
    with runner.hold(first.beside(".lock")):
        assert runner.hold(first.beside(".lock")) is None
        process = start_bench(tmp_path, "run", "toy", "--out", out)
        wait_for(lambda: len(list(out.rglob("model.pt"))) == 7)
        time.sleep(1)
        assert process.poll() is None
        assert not first.folder.exists()
    process.communicate(timeout=60)
    assert (process.returncode, first.folder.exists()) == (0, True)


# ---------------------------------------------------------------------------------------- a suite of the command line


def test_parts_of_a_suite_share_a_folder(tmp_path):
    out = tmp_path / "out"
    code, text, error = run_bench(tmp_path, "run", "toy", "--out", out, "--seeds", 1, "--algorithms", "PPO")
    assert (code, "2/2 runs done" in text) == (0, True), error
    assert json.loads((out / "suite.json").read_text())["seeds"] == [1, 2]  # the whole suite, of which a part was run
    assert "8 runs, 6 missing, 2 finished" in run_bench(tmp_path, "status", out)[1]
    text = run_bench(tmp_path, "run", "toy", "--out", out, "--lags", "15")[1]
    assert "4 runs, 1 finished before" in text
    assert "2 runs, 0 finished before" in run_bench(tmp_path, "run", "toy", "--out", out, "--seeds=7", "--lags=3")[1]
    held = json.loads((out / "suite.json").read_text())
    assert (held["seeds"], held["lags"]) == ([1, 2, 7], [0, 3, 15])
    assert "8 runs, 5 finished before" in run_bench(tmp_path, "run", "toy", "--out", out)[1]


def test_set_a_flag_or_sweep_it():
    words = ["total-timesteps=3e4", "clip_coef=.3", "--anneal-lr=false", "target-kl=none", "device=cpu"]
    (ppo, vaco, *_) = runs.expand(with_settings(SUITES["quick"], words), "out")
    assert (ppo.flags["total-timesteps"], ppo.flags["clip-coef"], ppo.flags["target-kl"]) == (30_000, 0.3, None)
    assert "clip-coef" not in vaco.flags
    assert "--no-anneal-lr" in vaco.command
    assert [parse(x) for x in ("1e6", ".5", "TRUE", "cpu", "1.0", "nan")][:5] == [1_000_000, 0.5, True, "cpu", 1]

    suite = with_settings(SUITES["quick"], ["delta=0.1,.2"])
    assert list(suite.algorithms) == ["PPO", "VACO delta .1", "VACO delta .2"]
    assert suite.algorithms["VACO delta .1"] == ("vaco_continuous.py", {"delta": 0.1})
    assert suite.comparisons == (("VACO delta .1", "PPO"), ("VACO delta .2", "PPO"))
    assert suite.options == "--set delta=0.1,.2"

    suite = with_settings(SUITES["quick"], ["update-epochs=1,10"])
    names = ("VACO update-epochs 1", "PPO update-epochs 1"), ("VACO update-epochs 10", "PPO update-epochs 10")
    assert suite.comparisons == names  # each value with the same one
    suite = with_settings(SUITES["quick"], ["delta=.1,.2", "realign=true,false"])
    assert list(suite.algorithms)[1:3] == ["VACO delta .1 realign true", "VACO delta .1 realign false"]


def test_a_name_never_says_another_value_than_the_run_has():
    suite = with_settings(SUITES["halfcheetah"], ["clip-coef=.4"])
    assert suite.algorithms["PPO"][1] == {"clip-coef": 0.4}
    assert suite.algorithms["PPO clip .5"][1] == {"clip-coef": 0.5}
    for words in (["clip-coef=.4"], ["delta=.3"]):
        with pytest.raises(runs.Refused, match="it is set already for "):
            with_settings(SUITES["tuned"], words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "detla=.1"], "--set detla: no such flag of ppo_continuous.py, vaco_continuous.py"),
        (["--set", "delta"], "--set delta: give FLAG=VALUE"),
        (["--set", "delta=.1,"], "give FLAG=VALUE"),
        (["--set", "num-minibatches=7"], "--num-minibatches must cut the batch of 2048"),
        (["--set", "num-envs=1.5"], "--num-envs"),
        (["--set", "delta=nan"], "--delta must lie in"),
        (["--set", "lag-mode=both"], "--lag-mode"),
        (["--set", "lag=1"], "--set lag: this is what --tasks, --lags, --seeds and --out are for"),
        (["--set", "delta=.1", "delta=.2"], "--set delta: it is set already for VACO"),
        (["--set", "delta=.1", "--set", "rho-bra=.2"], "--set rho-bra: no such flag"),
        (["--seeds", "3:1"], "--seeds 3:1: give numbers"),
        (["--lags=-1"], "--lags -1: give numbers"),
        (["--seeds", "1:99999"], "give numbers"),
        (["--algorithms", "TRPO"], "--algorithms: the suite has no 'TRPO' but PPO, VACO"),
        (["--tasks", ".."], "the name '..' cannot be a folder"),
        (["--tasks", "gym:A/b-v1", "gym:A-b-v1"], "two runs for one folder"),
    ],
)
def test_wrong_options_are_refused_in_a_line(tmp_path, capsys, words, message):
    assert main(["run", "quick", "--dry-run", "--out", str(tmp_path / "new"), *words]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_dry_run_prints_every_command_and_touches_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "mujoco10", "--dry-run", "--seeds", "1", "--out", "none"]) == 0
    text = capsys.readouterr().out
    assert text.count(f"--run-dir {tmp_path}/none/") == 120
    assert "--total-timesteps 1000000" in text
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SUITES)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- the scripts


def test_flags_of_the_suites_are_accepted_by_their_scripts():
    runner.check([run for suite in SUITES.values() for run in runs.expand(suite, "out") if run.seed == 1])


@pytest.mark.parametrize("kills", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_the_scripts_themselves(tmp_path, kills):
    steps = 20_000 if kills else 1100
    settings = {"num-envs": 4, "num-steps": 64, "num-minibatches": 4, "update-epochs": 2, "total-timesteps": steps}
    suite = {"tasks": ("InvertedPendulum-v5",), "lags": (2,)}
    settings |= {"num-evals": 2, "eval-episodes": 2, "anneal-lr": False, "checkpoint-every": 5}
    algorithms = {"PPO": ("ppo_continuous.py", {"clip-coef": 0.5}), "VACO": ("vaco_continuous.py", {})}
    suite |= {"algorithms": algorithms, "settings": settings}
    for _ in range(kills):
        process = start_bench(tmp_path, "run", "toy", "--out", "out", **suite)
        time.sleep(random.uniform(5, 12))
        process.send_signal(random.choice((signal.SIGTERM, signal.SIGKILL)))
        process.communicate()
    for finished_before in (0, 4):
        code, text, error = run_bench(tmp_path, "run", "toy", "--out", "out", **suite)
        assert code == 0, text + error
        assert kills or f"4 runs, {finished_before} finished before" in text
    rows = read_rows(tmp_path / "out")
    assert len(rows) == 4
    assert all(float(row["eval_return"]) > 0 and row["area_under_curve"] and row["torch"] for row in rows)
    if kills:
        assert run_bench(tmp_path, "run", "toy", "--out", "whole", **suite)[0] == 0
        assert final_table(tmp_path / "out") == final_table(tmp_path / "whole")
