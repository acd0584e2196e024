"""The runner of the benchmark: real processes of a quick stand-in, killed and resumed, and the scripts themselves."""

import contextlib
import csv
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark_helpers import DRIVER, STAND_IN, alive, cells, read_rows, toy, wait_for, write_runs

from benchmark import results, runner, runs, tables
from benchmark.__main__ import main
from benchmark.choose import choose
from benchmark.document import to_markdown
from benchmark.estimate import estimate, stated_seconds
from benchmark.runs import ROOT
from benchmark.suites import SUITES, Suite

SCRIPTS = pytest.mark.skipif(
    not ((ROOT / "ppo_continuous.py").exists() and (ROOT / "vaco_continuous.py").exists()), reason="needs the scripts"
)


@pytest.fixture
def bench(tmp_path):
    """bench(*words, **changes of the toy suite) is `python -m benchmark *words`; bench.start does not wait."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def start(*words, **changes):
        suite = toy(tmp_path / "stand_in.py", **changes)
        (tmp_path / "driver.py").write_text(DRIVER.format(root=str(ROOT), suite=suite))
        command = [sys.executable, str(tmp_path / "driver.py"), *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    def bench(*words, **changes):
        process = start(*words, **changes)
        process.stdout_text, process.stderr_text = process.communicate(timeout=120)
        assert "Traceback" not in process.stdout_text + process.stderr_text
        return process

    bench.start = start
    return bench


# ---------------------------------------------------------------------------------------------------------- the runner


def test_runs_all_reports_and_skips_what_is_finished(bench, tmp_path):
    out = tmp_path / "out"
    first = bench("run", "toy", "--out", out)
    assert first.returncode == 0, first.stderr_text
    assert "8/8 runs done" in first.stdout_text
    assert ["mean", "116.5", "266.5", "+150.0"] in cells(first.stdout_text)
    rows = read_rows(out)
    assert [(r["algorithm"], r["lag"], r["seed"]) for r in rows[:3]] == [
        ("PPO", "0", "1"),
        ("VACO .5", "0", "1"),
        ("PPO", "15", "1"),
    ]
    assert len(rows) == 8
    assert {r["status"] for r in rows} == {"finished"}
    assert (rows[3]["eval_return"], rows[3]["train_return"]) == ("266.0", "265.0")
    assert (out / "Toy-v0/VACO-.5/lag15/seed1/result.json").exists()
    assert (out / "Toy-v0/VACO-.5/lag15/seed1.log").read_text().startswith("starting 1")
    assert (out / "curves.png").stat().st_size > 5000

    times = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    second = bench("run", "toy", "--out", "out", "--workers", 1)  # the same folder, named otherwise
    assert second.returncode == 0
    assert "8 finished before" in second.stdout_text
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert bench("report", "out").returncode == 0


def test_killed_runner_goes_on_to_the_same_results(bench, tmp_path):
    out, slow = tmp_path / "killed", {"settings": {"step-seconds": 0.1}}
    process = bench.start("run", "toy", "--out", out, "--workers", 2, **slow)
    wait_for(lambda: list(out.rglob("result.json")) and alive(out))
    process.kill()
    process.communicate()
    again = bench("run", "toy", "--out", out, "--workers", 4, **slow)
    assert again.returncode == 0, again.stderr_text
    assert not again.stdout_text.startswith("toy: 8 runs, 0 finished")
    whole = bench("run", "toy", "--out", tmp_path / "whole", "--workers", 8, **slow)
    assert whole.returncode == 0
    assert (out / "results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()
    assert (out / "curves.png").read_bytes() == (tmp_path / "whole/curves.png").read_bytes()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_runs_and_says_how_to_go_on(bench, tmp_path, signum, code):
    out = tmp_path / "out"
    process = bench.start("run", "toy", "--out", out, "--workers", 2, settings={"step-seconds": 30})
    wait_for(lambda: len(alive(out)) == 2)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"go on with: python -m benchmark run toy --out {out} --workers 2" in stdout
    assert stderr == ""
    assert not alive(out)


def test_a_second_signal_kills_runs_that_do_not_end(bench, tmp_path):
    out = tmp_path / "out"
    process = bench.start("run", "toy", "--out", out, "--workers", 2, settings={"step-seconds": 1000, "stubborn": 1})
    wait_for(lambda: len(list(out.rglob("seed*.log"))) == 2 and all(p.read_text() for p in out.rglob("seed*.log")))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (130, 143)  # signals that arrive together are handled in no fixed order
    assert not alive(out)


def test_a_failed_run_is_listed_and_repeated(bench, tmp_path):
    out = tmp_path / "out"
    failed = bench("run", "toy", "--out", out, settings={"fail-seed": 2})
    assert failed.returncode == 1
    reason = "failed: VACO .5, Toy-v0, lag 15, seed 2: exit code 1: RuntimeError: boom at the first update (log:"
    assert reason in failed.stdout_text
    assert failed.stdout_text.count("failed: ") == 4
    assert "Incomplete: 4 of 8 runs are not finished" in (out / "report.md").read_text()
    assert "higher on 1 of 1 seeds (1 of 2 seeds left out)" in failed.stdout_text
    again = bench("run", "toy", "--out", out, settings={"fail-seed": 2})
    assert again.returncode == 1
    assert "4 finished before" in again.stdout_text


def test_a_second_runner_is_refused(bench, tmp_path):
    out = tmp_path / "out"
    process = bench.start("run", "toy", "--out", out, settings={"step-seconds": 30})
    wait_for(lambda: alive(out))
    second = bench("run", "toy", "--out", out, settings={"step-seconds": 30})
    assert second.returncode == 2
    assert "in use by another runner" in second.stderr_text
    assert alive(out)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (["run", "none", "--out", "new"], {}, "unknown suite none: choose one of quick"),
        (["run", "toy", "--out", "new", "--workers", "0"], {}, "--workers must be at least 1"),
        (["run", "toy", "--out", "new"], {"seeds": (1, 2, 1)}, "two runs for one folder: PPO, Toy-v0, lag 0, seed 1"),
        (["run", "toy", "--out", "new"], {"algorithms": {"A": ("absent.py", {})}}, "no script absent.py"),
        pytest.param(["run", "quick", "--out", "held"], {}, "held holds the suite toy", marks=SCRIPTS),
        (["run", "toy", "--out", "held"], {"lags": (0, 3)}, "held holds runs of toy that are left out here"),
        (["run", "toy", "--out", "held"], {"settings": {"num-steps": 4}}, "held holds toy with other settings"),
        (["run", "toy", "--out", "held", "--dry-run"], {"lags": (0, 3)}, "held holds runs of toy that are left out"),
        (["run", "toy", "--out", "full"], {}, "full is not empty and holds no suite.json"),
        (["run", "toy", "--out", "full/notes"], {}, "notes"),
        (["report", "full"], {}, "full holds no suite.json and no results.csv"),
        (["report", "new"], {}, "new holds no suite.json"),
    ],
)
def test_refusals_are_one_line_and_touch_nothing(bench, tmp_path, words, changes, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    (tmp_path / "held").mkdir()
    held = Suite(**toy(tmp_path / "stand_in.py"))
    runs.remember_suite(tmp_path / "held", "toy", held)
    runs.expand(held, tmp_path / "held")[0].folder.mkdir(parents=True)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    refused = bench(*words, **changes)
    assert refused.returncode == 2
    assert message in refused.stderr_text
    assert refused.stderr_text.startswith("benchmark: ")
    assert refused.stderr_text.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["notes"]
    assert (tmp_path / "full/notes").read_text() == "mine"


def test_list_names_every_suite(bench):
    listed = bench("list")
    assert listed.returncode == 0
    assert all(name in listed.stdout_text for name in SUITES)


def test_progress_reads_the_tail_of_metrics(tmp_path):
    (run, *_) = runs.expand(Suite(**toy(seeds=(1,))), tmp_path)
    assert runner.fraction(run) == 0
    run.folder.mkdir(parents=True)
    metrics = run.folder / "metrics.csv"
    metrics.write_text("global_step,charts/SPS\n")
    assert runner.fraction(run) == 0
    metrics.write_text("global_step,charts/SPS\n" + "".join(f"{step},1.0\n" for step in range(1, 56)) + "99,1")
    assert runner.fraction(run) == 0.5  # of 110 steps; the line that is being written does not count
    line = runner.progress(asked=6, total=8, waiting=2, fractions=[0.5, 0.25], started=time.monotonic(), failed=1)
    assert line.startswith("[###########         ] 4/8 runs done, running 50% 25%, 1 failed, elapsed 0:00:00, left ")


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("args", "env_id", "Other-v0", "holds another configuration (env_id Other-v0, not Toy-v0)"),
        ("args", "seed", 1, "holds another configuration (seed 1, not 2)"),
        ("args", "gain", 7, "holds another configuration (gain 7, not 2.5)"),
        ("result", "global_step", 80, "says finished with seed 2, step 80, not seed 2, step 100"),
        ("result", "seed", 1, "says finished with seed 1, step 100, not seed 2, step 100"),
    ],
)
def test_a_finished_run_of_another_kind_is_refused(bench, tmp_path, where, key, value, message):
    def change(run, config, result, evals):
        if (run.algorithm, run.lag, run.seed) == ("VACO .5", 15, 2):
            {"args": config["args"], "result": result}[where][key] = value

    write_runs(tmp_path / "out", change, script=tmp_path / "stand_in.py")
    for words in (["report", "out"], ["run", "toy", "--out", "out"]):
        refused = bench(*words)
        assert refused.returncode == 2
        assert message in refused.stderr_text
        assert refused.stderr_text.count("\n") == 1


# ----------------------------------------------------------------------------------------- killed, resumed, repeated


def final_table(out):
    """results.csv without the column that tells the time."""
    return [{key: value for key, value in row.items() if key != "sps"} for row in read_rows(out)]


def kill_at_random(start, out, rounds, seed):
    """Starts the runner `rounds` times; each time kill -9 hits the runner, or a run while the runner goes on."""
    rng = random.Random(seed)
    for _ in range(rounds):
        process = start()
        time.sleep(rng.uniform(0.2, 1.2))
        if rng.random() < 0.5 and (running := alive(out)):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(rng.choice(running), signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.communicate()


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("resume", [True, False])
def test_kill_9_at_random_moments_changes_no_result(bench, tmp_path, rounds, resume):
    script = tmp_path / "killed.py"
    script.write_text(STAND_IN if resume else STAND_IN.replace("--resume DIR", "no such thing"))
    suite = toy(script, settings={"step-seconds": 0.02, "total-timesteps": 100 * rounds})
    changes = {key: suite[key] for key in ("algorithms", "settings")}
    out = tmp_path / "out"
    kill_at_random(lambda: bench.start("run", "toy", "--out", out, "--workers", 2, **changes), out, rounds, seed=rounds)
    assert bench("run", "toy", "--out", out, "--workers", 8, **changes).returncode == 0
    assert bench("run", "toy", "--out", tmp_path / "whole", "--workers", 8, **changes).returncode == 0
    assert final_table(out) == final_table(tmp_path / "whole")
    assert len({row["eval_std"] for row in read_rows(out)}) == 2  # one per seed: every step counts
    for picture in ("curves.png", "lag.png", "pairs.png", "profile.png"):
        assert (out / picture).read_bytes() == (tmp_path / "whole" / picture).read_bytes()


def test_an_unfinished_run_is_resumed_from_its_checkpoint(bench, tmp_path):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 0.3}}
    process = bench.start("run", "toy", "--out", out, "--workers", 8, **slow)
    wait_for(lambda: len(list(out.rglob("checkpoint.pt"))) == 8)
    process.kill()
    process.communicate()
    held = [path.stat().st_size for path in sorted(out.rglob("metrics.csv"))]
    assert bench("run", "toy", "--out", out, "--workers", 8, **slow).returncode == 0
    logs = [path.read_text() for path in out.rglob("seed*.log")]
    assert all(log.splitlines()[0].startswith("starting") and "resuming" in log for log in logs)
    assert min(held) > len("global_step,charts/SPS\n")
    assert all(len(path.read_text().splitlines()) == 6 for path in out.rglob("metrics.csv"))  # 5 steps, none twice


def test_where_resuming_fails_the_run_is_repeated(bench, tmp_path):
    out, slow = tmp_path / "out", {"settings": {"step-seconds": 0.2, "bad-checkpoint": 1}}
    process = bench.start("run", "toy", "--out", out, "--workers", 8, **slow)
    wait_for(lambda: len(list(out.rglob("checkpoint.pt"))) == 8)
    process.kill()
    process.communicate()
    again = bench("run", "toy", "--out", out, "--workers", 8, **slow)
    assert again.returncode == 0, again.stdout_text
    assert all(path.read_text().startswith("starting") for path in out.rglob("seed*.log"))


def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (run, *_) = runs.expand(Suite(**toy(tmp_path / "stand_in.py")), tmp_path)
    run.folder.mkdir(parents=True)
    args = {flag.replace("-", "_"): value for flag, value in run.flags.items()}
    (run.folder / "config.json").write_text(json.dumps({"args": args}))
    assert not runner.resumable(run)  # no checkpoint
    (run.folder / "checkpoint.pt").write_text("")
    assert runner.resumable(run)
    (run.folder / "result.json").write_text('{"status": "failed"}')
    assert runner.resumable(run)
    (run.folder / "config.json").write_text(json.dumps({"args": args | {"num_envs": 11}}))
    assert not runner.resumable(run)
    (run.folder / "config.json").write_text("{")
    assert not runner.resumable(run)


def test_two_runners_never_do_the_same_run(bench, tmp_path):
    """A task of a cluster holds no lock on the folder, only on its run."""
    out, suite = tmp_path / "out", Suite(**toy(tmp_path / "stand_in.py", seeds=(1,)))
    out.mkdir()
    runs.remember_suite(out, "toy", suite)
    (first, *_) = runs.expand(suite, out)
    first.folder.parent.mkdir(parents=True)
    with runner.hold(first.lock):
        assert runner.hold(first.lock) is None
        done = bench("run", "toy", "--out", out, seeds=(1,))
        assert "running 0%: PPO, Toy-v0, lag 0, seed 1" in bench("status", out).stdout_text
    assert done.returncode == 1
    assert "failed: PPO, Toy-v0, lag 0, seed 1: another runner is at it" in done.stdout_text
    assert not first.folder.exists()
    assert bench("run", "toy", "--out", out, seeds=(1,)).returncode == 0


def test_status_counts_the_states(bench, tmp_path):
    out = tmp_path / "out"
    bench("run", "toy", "--out", out, settings={"fail-seed": 2})
    shutil.rmtree(out / "Toy-v0/PPO/lag0/seed1")
    text = bench("status", out).stdout_text
    assert "toy: 8 runs, 4 unfinished, 3 finished, 1 missing" in text
    assert ["Toy-v0", "0", "0/2 (1 unfinished)", "1/2 (1 unfinished)"] in cells(text)
    assert "unfinished 18%: VACO .5, Toy-v0, lag 15, seed 2 (log: " in text
    assert bench("status", tmp_path / "none").returncode == 2


@SCRIPTS
@pytest.mark.slow
def test_kill_9_of_the_scripts_themselves(bench, tmp_path):
    settings = {"num-envs": 4, "num-steps": 64, "num-minibatches": 4, "update-epochs": 4, "total-timesteps": 20_000}
    suite = toy(tasks=("InvertedPendulum-v5",), lags=(2,))
    suite["settings"] = settings | {"num-evals": 2, "eval-episodes": 2}
    suite["algorithms"] = {"PPO": ("ppo_continuous.py", {}), "VACO": ("vaco_continuous.py", {})}
    (tmp_path / "real.py").write_text(DRIVER.format(root=str(ROOT), suite=suite))

    def start(name):
        command = [sys.executable, str(tmp_path / "real.py"), "run", "toy", "--out", str(tmp_path / name)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    rng = random.Random(0)
    for _ in range(5):
        process = start("out")
        time.sleep(rng.uniform(3, 9))
        process.kill()
        process.communicate()
    for name in ("out", "whole"):
        process = start(name)
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert final_table(tmp_path / "out") == final_table(tmp_path / "whole")


# ---------------------------------------------------------------------------------------- a suite of the command line


def test_choose_some_of_a_suite():
    suite = choose(SUITES["mujoco10"], ["Hopper-v5", "PPO", "VACO"], lags=["0,15"], seeds=["1:3", "7"])
    assert (suite.tasks, list(suite.algorithms)) == (("Hopper-v5",), ["PPO", "VACO"])
    assert (suite.lags, suite.seeds) == ((0, 15), (1, 2, 3, 7))
    assert suite.options == "--only Hopper-v5 PPO VACO --lags 0,15 --seeds 1:3 7"
    assert suite.comparisons == (("VACO", "PPO"),)
    assert choose(SUITES["quick"], tasks=["Ant-v5"]).tasks == ("Ant-v5",)
    assert choose(SUITES["llm"], only=["VACO 3e-4", "GRPO 3e-4"]).pairs == (("VACO 3e-4", "GRPO 3e-4"),)


@SCRIPTS
def test_set_a_flag_or_sweep_it():
    suite = choose(
        SUITES["quick"], settings=["total-timesteps=3e4", "clip-coef=.3", "anneal-lr=false", "target-kl=none"]
    )
    (ppo, vaco, *_) = runs.expand(suite, "out")
    assert (ppo.flags["total-timesteps"], ppo.flags["clip-coef"], ppo.flags["target-kl"]) == (30_000, 0.3, None)
    assert "clip-coef" not in vaco.flags
    assert "--no-anneal-lr" in vaco.command

    suite = choose(SUITES["quick"], settings=["delta=0.1,.2"])
    assert list(suite.algorithms) == ["PPO", "VACO delta .1", "VACO delta .2"]
    assert suite.algorithms["VACO delta .1"] == ("vaco_continuous.py", {"delta": 0.1})
    assert suite.comparisons == (("VACO delta .1", "PPO"), ("VACO delta .2", "PPO"))

    suite = choose(SUITES["quick"], settings=["update-epochs=1,10"])
    names = ("VACO update-epochs 1", "PPO update-epochs 1"), ("VACO update-epochs 10", "PPO update-epochs 10")
    assert suite.comparisons == names  # each value with the same one
    suite = choose(SUITES["quick"], only=["VACO"], settings=["delta=.1,.2", "realign=true,false"])
    assert "VACO delta .1 realign false" in suite.algorithms
    assert len(suite.algorithms) == 4


@SCRIPTS
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "detla=.1"], "--set detla: no such flag of ppo_continuous.py, vaco_continuous.py; python"),
        (["--set", "delta"], "--set delta: give flag=value"),
        (["--set", "delta="], "give flag=value"),
        (["--set", "total-timesteps=many"], "--set total-timesteps=many: give a whole number"),
        (["--set", "num-envs=1.5"], "give a whole number"),
        (["--set", "delta=nan"], "--set delta=nan: give a number"),
        (["--set", "anneal-lr=perhaps"], "give true or false"),
        (["--set", "lag-mode=both"], "choose one of uniform, fixed"),
        (["--set", "lag=1"], "--set lag: use --lags"),
        (["--set", "env-id=Ant-v5"], "use --tasks"),
        (["--set", "run-dir=/tmp"], "use --out"),
        (["--set", "resume=runs"], "what is not finished is resumed anyway"),
        (["--set", "delta=.1,0.1"], "--set delta=.1,0.1 has a value twice"),
        (["--set", "delta=.1", "delta=.2"], "--set delta is there twice: give delta=value,value to sweep"),
        (["--seeds", "3:1"], "--seeds 3:1: give numbers"),
        (["--lags", "-1"], "--lags -1: give numbers"),
        (["--seeds", "1:99999"], "give numbers"),
        (
            ["--only", "Hopper"],
            "--only Hopper: the suite has no such task or algorithm; it has HalfCheetah-v5, PPO, VACO",
        ),
        (["--tasks", ".."], "the name '..' cannot be a folder"),
        (["--tasks", "/"], "the name '/' cannot be a folder"),
        (["--tasks", "Hopper-v4", "Hopper-v5"], "Hopper-v4 and Hopper-v5 are two versions of one environment"),
        (["--tasks", "gym:A/b-v1", "gym:A-b-v1"], "two runs for one folder"),
    ],
)
def test_wrong_options_are_refused_in_a_line(tmp_path, capsys, words, message):
    words = [f"{words[0]}={words[1]}", *words[2:]] if words[1].startswith("-") else words
    assert main(["run", "quick", "--dry-run", "--out", str(tmp_path / "new"), *words]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_name_never_says_another_value_than_the_run_has():
    for suite, only, setting in (
        ("tuned", None, "clip-coef=.4"),
        ("mujoco10", ["PPO clip .5", "VACO"], "clip-coef=.2"),
        ("forward", ["PPO 1 epochs"], "update-epochs=5,7"),
    ):
        with pytest.raises(runs.Refused, match=r"the suite itself sets it for PPO .*; leave that out with --only"):
            choose(SUITES[suite], only, settings=[setting])
    with pytest.raises(runs.Refused, match="two of the values have the same six digits"):
        choose(SUITES["quick"], settings=["delta=.1234567,.1234568"])


def test_settings_that_no_run_was_begun_with_may_be_corrected(bench, tmp_path):
    out = tmp_path / "out"
    wrong = bench("run", "toy", "--out", out, settings={"step-seconds": "x"})
    assert wrong.returncode == 1
    for run in runs.expand(Suite(**toy(tmp_path / "stand_in.py")), out):
        shutil.rmtree(run.folder)
    assert bench("run", "toy", "--out", out).returncode == 0


@SCRIPTS
def test_a_script_that_refuses_its_flags_is_quoted(tmp_path, capsys):
    words = ["run", "quick", "--only", "PPO", "--lags", "0", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main([*words, "--set", "total-timesteps=-5"]) == 1
    assert "exit code 2: Error parsing Args: --total-timesteps must be 1 or more, not -5" in capsys.readouterr().out
    assert main([*words, "--set", "num-envs=0", "--dry-run"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_a_damaged_result_is_repeated(bench, tmp_path):
    out = tmp_path / "out"
    bench("run", "toy", "--out", out)
    before = read_rows(out)
    (out / "Toy-v0/PPO/lag0/seed1/result.json").write_text('{"half')
    assert "1 failed" in bench("status", out).stdout_text
    assert "8 runs, 7 finished before" in bench("run", "toy", "--out", out).stdout_text
    assert read_rows(out) == before


def test_a_closed_pipe_is_no_error():
    line = f"{sys.executable} -m benchmark list mujoco10 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_folder_may_grow_and_be_done_in_parts(bench, tmp_path):
    out = tmp_path / "out"
    assert "4/4 runs done" in bench("run", "toy", "--out", out, "--seeds", "1").stdout_text
    whole = bench("run", "toy", "--out", out)
    assert "8 runs, 4 finished before" in whole.stdout_text
    part = bench("run", "toy", "--out", out, "--only", "PPO", "--lags", "15")
    assert "2 runs, 2 finished before" in part.stdout_text
    assert len(read_rows(out)) == 8
    other = bench("run", "toy", "--out", out, "--lags", "0,3")
    assert (other.returncode, len(read_rows(out))) == (2, 8)


@SCRIPTS
def test_dry_run_and_list_print_every_command_and_touch_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "mujoco10-100m", "--dry-run", "--seeds", "1", "--workers", "10"]) == 0
    text = capsys.readouterr().out
    assert text.count("--run-dir") == 120
    assert "--total-timesteps 100000000" in text
    assert "120 of 120 runs to do, " in text
    assert "stated rates" in text
    assert main(["list", "quick"]) == 0
    assert capsys.readouterr().out.count("python ") == 12
    assert not list(tmp_path.iterdir())


def test_the_estimate_follows_finished_runs(tmp_path):
    """Runs of 100 environment steps at 5 a second take 20 s."""
    suite = write_runs(tmp_path / "out")
    shutil.rmtree(tmp_path / "out/Toy-v0/PPO/lag0/seed1")
    seconds, basis = estimate(runs.expand(suite, tmp_path / "out"))
    assert list(seconds.values()) == [pytest.approx(110 / 5)]
    assert basis == "from the steps per second of 7 finished runs"
    shutil.rmtree(tmp_path / "out")
    assert estimate(runs.expand(suite, tmp_path / "out"))[1].startswith("from stated rates")


def test_estimates_agree_with_the_published_speeds():
    """The stated rates, within a factor of two of every published run."""
    for path in (ROOT / "benchmark/results").glob("*.csv"):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                suite = SUITES[row["suite"]]
                (run,) = [
                    run
                    for run in runs.expand(replace(suite, seeds=(int(row["seed"]),)), "out")
                    if (run.algorithm, run.task, run.lag) == (row["algorithm"], row["task"], int(row["lag"]))
                ]
                batch = run.flags.get("num-prompts", 1) * run.flags.get("num-generations", 1)
                size = run.flags.get("total-timesteps") or run.flags["num-updates"] * batch
                assert 0.5 < stated_seconds(run) / (size / float(row["sps"])) < 2, (path, row["algorithm"])


# --------------------------------------------------------------------------------------------------------- the scripts


@SCRIPTS
@pytest.mark.parametrize("name", SUITES)
def test_flags_of_the_suites_are_accepted_by_their_scripts(name):
    for run in runs.expand(SUITES[name], "out"):
        args = importlib.import_module(run.script.removesuffix(".py")).Args
        args(**{flag.replace("-", "_"): value for flag, value in run.flags.items()})


@SCRIPTS
def test_the_scripts_themselves(bench, tmp_path):
    settings = {"num-envs": 4, "num-steps": 64, "num-minibatches": 4, "update-epochs": 2, "total-timesteps": 1100}
    suite = toy(tasks=("InvertedPendulum-v5",), lags=(2,))
    suite["settings"] = settings | {"num-evals": 2, "eval-episodes": 2, "anneal-lr": False}
    suite["algorithms"] = {"PPO": ("ppo_continuous.py", {"clip-coef": 0.5}), "VACO": ("vaco_continuous.py", {})}
    driver = tmp_path / "real.py"
    driver.write_text(DRIVER.format(root=str(ROOT), suite=suite))
    command = [sys.executable, str(driver), "run", "toy", "--out", str(tmp_path / "out")]
    for finished_before in (0, 4):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"4 runs, {finished_before} finished before" in done.stdout
    rows = read_rows(tmp_path / "out")
    assert len(rows) == 4
    assert all(float(row["eval_return"]) > 0 and row["area_under_curve"] and row["torch"] for row in rows)
    assert "Mixed" not in done.stdout


def test_scripts_that_count_updates(tmp_path):
    """Their own flag for the task, their own last step, accuracies in three decimals."""
    assert runs.final_step({"num_updates": 7}) == 7
    assert runs.final_step({"num_envs": 2, "num_steps": 8, "total_timesteps": 100}) == 96
    suite = SUITES["llm-quick"]
    (first, *_), evals = runs.expand(suite, tmp_path), "update,greedy_accuracy,other\n0,0.25,1\n50,0.5,1\n"
    assert first.command[2:4] == ["--task", "arithmetic"]
    first.folder.mkdir(parents=True)
    (first.folder / "metrics.csv").write_text("global_step,x\n50,1\n")
    (first.folder / "evals.csv").write_text(evals)
    assert runner.fraction(first) == 0.5
    assert results.read_evals(first.folder / "evals.csv") == {0: 0.25, 50: 0.5}
    row = {"task": "arithmetic", "lag": 0, "status": "finished"}
    rows = [
        row | {"algorithm": a, "seed": s, "eval_return": x}
        for s in (1, 2, 3)
        for a, x in (("GRPO", 0.25), ("VACO", 0.5))
    ]
    text = to_markdown(tables.seed_table(suite, rows, "arithmetic", 0))
    assert "greedy accuracy at the end" in text
    assert "+0.250" in text


def test_two_reports_at_once(tmp_path):
    write_runs(tmp_path / "out")
    command = [sys.executable, "-m", "benchmark", "report", str(tmp_path / "out")]
    assert [p.wait() for p in [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]] == [0, 0, 0]
    assert not list((tmp_path / "out").glob(".*partial"))
