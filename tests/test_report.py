"""The report of known numbers: tables, pictures, warnings, and what it makes of damaged or foreign folders."""

import json
import shutil

import pytest
from benchmark_helpers import cells, read_rows, toy, write_runs

from benchmark import report, results, runs, tables
from benchmark.document import to_markdown
from benchmark.suites import Suite


def test_table_and_interval_of_known_numbers(tmp_path):
    write_runs(tmp_path / "out", lags=(3,), seeds=(1, 2, 3))
    text = report.write_report(tmp_path / "out")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    assert lines[0] == ["seed", "PPO", "VACO .5", "VACO .5 - PPO"]
    assert lines[2:] == [
        ["1", "10.0", "12.0", "+2.0"],
        ["2", "20.0", "24.0", "+4.0"],
        ["3", "30.0", "36.0", "+6.0"],
        ["mean", "20.0", "24.0", "+4.0"],
    ]
    assert "mean difference +4.0, 95 % bootstrap interval +2.0 to +6.0, higher on 3 of 3 seeds." in text
    assert "Mixed" not in text
    assert "Incomplete" not in text
    assert {(r["seed"], r["area_under_curve"]) for r in read_rows(tmp_path / "out") if r["algorithm"] == "PPO"} == {
        ("1", "5.0"),
        ("2", "10.0"),
        ("3", "15.0"),
    }
    written = (tmp_path / "out/report.md").read_text()
    for known in ("run toy --out", "commit: abc", "torch: 2.13", "a machine", "--num-envs 10", "--gain 2.5"):
        assert known in written


def test_three_algorithms_are_each_compared_with_the_last():
    suite = Suite(**toy(algorithms={"PPO": ("a.py", {}), "wide": ("a.py", {"clip-coef": 0.5}), "VACO": ("b.py", {})}))
    rows = [
        {"task": "Toy-v0", "lag": 0, "algorithm": a, "seed": s, "status": "finished", "eval_return": v * s}
        for a, v in (("PPO", 1.0), ("wide", 5.0), ("VACO", 4.0))
        for s in (1, 2)
    ]
    text = to_markdown(tables.seed_table(suite, rows, "Toy-v0", 0))
    assert ["2", "2.0", "10.0", "8.0", "+6.0", "-2.0"] in cells(text)
    assert "VACO - PPO: mean difference +4.5, no interval from fewer than 3 seeds, higher on 2 of 2 seeds." in text
    assert "VACO - wide: mean difference -1.5, no interval from fewer than 3 seeds, higher on 0 of 2 seeds." in text


def test_one_seed_has_no_interval(tmp_path):
    write_runs(tmp_path / "out", seeds=(1,))
    text = report.write_report(tmp_path / "out")
    assert "mean difference +2.0, no interval from fewer than 3 seeds, higher on 1 of 1 seeds." in text
    assert (tmp_path / "out/curves.png").exists()


def test_missing_failed_and_unfinished_runs_are_listed_and_left_out(tmp_path):
    out = tmp_path / "out"

    def change(run, config, result, evals):
        if (run.algorithm, run.lag, run.seed) == ("PPO", 0, 2):
            result["status"] = "failed"

    write_runs(out, change, seeds=(1, 2, 3))
    shutil.rmtree(out / "Toy-v0/VACO-.5/lag0/seed1")
    (out / "Toy-v0/VACO-.5/lag15/seed3/result.json").unlink()
    text = report.write_report(out)
    assert "Incomplete: 3 of 18 runs" not in text
    assert "Incomplete: 3 of 12 runs are not finished" in text
    for line in ("PPO, Toy-v0, lag 0, seed 2: failed", "VACO .5, Toy-v0, lag 0, seed 1: missing"):
        assert f"- {line}" in text
    assert "- VACO .5, Toy-v0, lag 15, seed 3: unfinished" in text
    assert (
        "mean difference +6.0, no interval from fewer than 3 seeds, higher on 1 of 1 seeds (2 of 3 seeds left out)."
        in text
    )
    assert [r["status"] for r in read_rows(out)].count("finished") == 9


def test_nothing_finished_is_a_report_too(tmp_path):
    suite = write_runs(tmp_path / "out")
    for run in runs.expand(suite, tmp_path / "out"):
        shutil.rmtree(run.folder)
    assert "VACO .5 - PPO: no seed has both." in report.write_report(tmp_path / "out")


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_no_evaluation_is_said_and_not_replaced_by_the_training_return(tmp_path, value):
    def change(run, config, result, evals):
        result["eval_return"] = value
        evals.clear()

    write_runs(tmp_path / "out", change)
    text = report.write_report(tmp_path / "out")
    assert text.count("no evaluation") == 8
    assert {(r["eval_return"], r["area_under_curve"]) for r in read_rows(tmp_path / "out")} == {("", "")}


def test_mixed_versions_commits_and_settings_are_said(tmp_path):
    def change(run, config, result, evals):
        if run.seed == 2:
            config["versions"]["mujoco"], config["commit"] = "3.9", None
        config["args"]["gamma"] = 0.9 if run.seed == 2 and run.algorithm == "PPO" else 0.99

    write_runs(tmp_path / "out", change)
    report.write_report(tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text()
    assert "**Mixed mujoco, so the runs are not strictly comparable:** 4.0 (4 runs); 3.9 (4 runs)" in text
    assert "**Mixed commit, so the runs are not strictly comparable:** abc (4 runs); unknown (4 runs)" in text
    assert "**Mixed settings of PPO, so its runs are not comparable:** gamma" in text
    assert text.count("Mixed") == 3


def test_damaged_files_of_a_run_are_refused_in_a_line(tmp_path):
    def change(run, config, result, evals):
        if run.algorithm == "PPO" and run.lag == 0:
            evals[:] = [(50, 0.0), (50, 1.0)]  # a step twice
        if run.algorithm == "VACO .5" and run.lag == 0:
            config["versions"] = None

    suite = write_runs(tmp_path / "out", change, seeds=(1,))
    for run in [run for run in runs.expand(suite, tmp_path / "out") if run.lag == 0]:
        with pytest.raises(runs.Refused, match="cannot be read"):
            results.read_run("toy", run, [])


@pytest.mark.parametrize("key", ["algorithms", "tasks", "lags", "seeds"])
@pytest.mark.parametrize("value", [3, [], {}, {"a": 1}, None])
def test_a_damaged_suite_file_is_refused_in_a_line(tmp_path, key, value):
    if (key, value) in [("tasks", {"a": 1}), ("seeds", {"a": 1}), ("lags", {"a": 1})]:
        return  # keys, taken as a list
    write_runs(tmp_path / "out")
    path = tmp_path / "out/suite.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(runs.Refused, match="is not a suite"):
        runs.recall_suite(tmp_path / "out")
