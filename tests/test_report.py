"""The report of known numbers: tables, pictures, warnings, and what it makes of damaged or foreign folders."""

import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from benchmark_helpers import cells, read_rows, toy, write_runs

from benchmark import document, pictures, reference, report, results, runs, scores, tables
from benchmark.__main__ import main
from benchmark.document import to_markdown
from benchmark.runs import ROOT
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
    assert "**Not known of 4 runs,** and so perhaps not the same: commit" in text
    assert "**Mixed settings of PPO, so its runs are not comparable:** gamma" in text
    assert text.count("Mixed") == 2


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


# ------------------------------------------------------------------------------------- results.csv is all it needs


REQUIRED = "task,algorithm,seed,eval_return"


def write_csv(folder, rows, header="task,algorithm,lag,seed,eval_return,final_step"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return folder


def synthetic(tasks=("A-v0", "B-v0"), algorithms=("one", "two"), lags=(0, 15), seeds=range(1, 6), steps=1000):
    """Rows whose values do not depend on what else is there."""
    return [
        (task, a, lag, seed, 10 * len(task) + 7 * i - lag * (2 - i % 2) + 3 * np.sin(100 * i + 10 * seed + lag), steps)
        for task in tasks
        for i, a in enumerate(algorithms)
        for lag in lags
        for seed in seeds
    ]


@pytest.fixture
def references(tmp_path, monkeypatch):
    """0 is a return of -20, 1 a return of 60, after 1000 steps, for tasks A and B."""
    path = tmp_path / "references.csv"
    path.write_text("task,steps,final_step,random,ppo\nA-v0,1000,1000,-20,60\nB-v0,1000,1000,-20,60\n")
    monkeypatch.setattr(scores, "PATH", path)
    return path


def test_a_folder_with_results_alone(tmp_path):
    text = report.write_report(write_csv(tmp_path / "out", synthetic()))
    assert "two - one: mean difference" in text
    written = (tmp_path / "out/report.md").read_text()
    assert "Raw scores only" in written
    assert "no evaluation curves" not in written
    assert not (tmp_path / "out/curves.png").exists()
    for picture in ("lag.png", "pairs.png"):
        assert (tmp_path / "out" / picture).stat().st_size > 5000
        assert f"]({picture})" in written


def test_results_of_other_code_with_curves(tmp_path):
    out = write_csv(
        tmp_path / "out", [("X-v1", "ours", 1, 5.0), ("X-v1", "ours", 2, 6.0)], "task,algorithm,seed,eval_return"
    )
    for seed in (1, 2):
        folder = runs.run_folder(out, "X-v1", "ours", 0, seed)
        folder.mkdir(parents=True)
        (folder / "evals.csv").write_text("step,score\n0,1.0\n1000,5.0\n")
    report.write_report(out)
    assert (out / "curves.png").stat().st_size > 5000


def test_published_results_are_readable_and_give_the_published_numbers(tmp_path):
    folder = ROOT / "benchmark/results"
    assert len(list(folder.glob("*.csv"))) >= 9
    for path in folder.glob("*.csv"):
        out = tmp_path / path.stem
        out.mkdir()
        shutil.copy(path, out / "results.csv")
        text = report.write_report(out)
        assert "Incomplete" not in text
    halfcheetah = (tmp_path / "halfcheetah/report.md").read_text()
    assert halfcheetah.startswith("# halfcheetah: how much of PPO")
    assert "mean difference +1344.6, 95 % bootstrap interval +881.3 to +2137.9, higher on 5 of 5 seeds." in halfcheetah
    llm = (tmp_path / "llm/report.md").read_text()
    assert "greedy accuracy at the end" in llm
    assert (
        "VACO 3e-4 - GRPO 3e-4: mean difference +0.031, 95 % bootstrap interval +0.001 to +0.060, higher on 4 of 5"
        in llm
    )


def test_normalised_scores_by_hand(tmp_path, references):
    rows = [("A-v0", "x", 0, seed, value, 1000) for seed, value in ((1, -20), (2, 20), (3, 60), (4, 140))]
    rows += [("B-v0", "x", 0, seed, value, 1000) for seed, value in ((1, 60), (2, 140), (3, 220), (4, 300))]
    text = report.write_report(write_csv(tmp_path / "out", rows))  # scores 0 .5 1 2 and 1 2 3 4
    written = (tmp_path / "out/report.md").read_text()
    (line,) = [line for line in cells(written) if line[0] == "x" and len(line) == 6]
    assert [cell.split(" ")[0] for cell in line] == ["x", "4", "1.500", "1.688", "1.688", "0.188"]
    assert "Raw scores only" not in written
    assert "seed" in text


def test_a_third_algorithm_changes_no_score_of_the_others(tmp_path, references):
    few, more = synthetic(), synthetic(algorithms=("one", "two", "fake"))
    more = [row if row[1] != "fake" else (*row[:4], 1e6, row[5]) for row in more]
    tables_of = []
    for name, rows in (("few", few), ("more", more)):
        report.write_report(write_csv(tmp_path / name, rows))
        lines = cells((tmp_path / name / "report.md").read_text())
        tables_of.append([line for line in lines if line[0] in ("one", "two")])
    assert tables_of[0] == tables_of[1]
    assert len(tables_of[0]) == 4


def test_a_score_needs_the_reference_of_as_many_steps(tmp_path, references):
    for steps, expected in ((1000, False), (992, False), (500, True), ("", True)):
        out = write_csv(tmp_path / f"out{steps}", synthetic(steps=steps))
        report.write_report(out)
        assert ("Raw scores only" in (out / "report.md").read_text()) == expected


def test_runs_of_different_length_are_said(tmp_path):
    rows = [(*row[:5], 1000 if row[1] == "one" else 3000) for row in synthetic(tasks=("A-v0",))]
    text = report.write_report(write_csv(tmp_path / "out", rows))
    assert "**Mixed last steps of A-v0, so its runs are not comparable:** 1,000 (10 runs); 3,000 (10 runs)" in text


def test_tasks_without_a_reference_are_named(tmp_path, references):
    out = write_csv(tmp_path / "out", synthetic(tasks=("A-v0", "C-v0")))
    report.write_report(out)
    assert "Over 1 of 2 tasks, those with a reference:** A-v0" in (out / "report.md").read_text()


def test_speed_of_learning_by_hand(tmp_path, references):
    """Toy-v0 from 0 to 40 half way: curves reach 20 at step 50 or 100 of 100, or never."""
    references.write_text("task,steps,final_step,random,ppo\nToy-v0,100,100,0,40\n")

    def change(run, config, result, evals):
        height = {1: 25.0, 2: 15.0, 3: 5.0}[run.seed]
        evals[:] = [(25, 0.0), (50, height), (100, 2 * height if run.seed < 3 else 10.0)]

    write_runs(tmp_path / "out", change, lags=(3,), seeds=(1, 2, 3))
    report.write_report(tmp_path / "out")
    rows = [r for r in read_rows(tmp_path / "out") if r["algorithm"] == "PPO"]
    assert [(r["steps_to_half"], float(r["area_under_curve"])) for r in rows] == [
        ("50.0", (12.5 * 25 + 37.5 * 50) / 75),
        ("100.0", (7.5 * 25 + 22.5 * 50) / 75),
        ("", (2.5 * 25 + 7.5 * 50) / 75),
    ]
    text = (tmp_path / "out/report.md").read_text()
    assert ["Toy-v0", "3", "75, 2/3", "75, 2/3"] in cells(text)
    assert ["Toy-v0", "3", "17.5 [5.8, 29.2]", "17.5 [5.8, 29.2]"] in cells(text)


def test_failed_runs_are_not_averaged_in(tmp_path):
    header = "task,algorithm,seed,eval_return,status"
    rows = [("X", "a", 1, 5.0, "finished"), ("X", "a", 2, 7.0, "finished"), ("X", "a", 3, 1e9, "failed")]
    text = report.write_report(write_csv(tmp_path / "out", rows, header))
    assert ["mean", "6.0 (2 of 3 seeds)"] in cells(text)
    assert ["3", "failed"] in cells(text)
    assert "- a, X, lag 0, seed 3: failed" in text


def test_no_interval_that_is_not_one(tmp_path, references):
    for seeds in (1, 2):
        out = write_csv(tmp_path / f"out{seeds}", synthetic(seeds=range(seeds)))
        report.write_report(out)
        text = (out / "report.md").read_text().split("Brackets hold")[1]
        assert not [cell for line in cells(text) for cell in line if "[" in cell]
        assert "no interval from fewer than 3 seeds" in text
    few = write_csv(tmp_path / "few", synthetic(tasks=("A-v0",), seeds=range(3)))
    report.write_report(few)
    assert "With fewer than four scores the IQM is the mean: one, two." in (few / "report.md").read_text()


def test_missing_seeds_of_one_task_are_left_out_and_said(tmp_path, references):
    rows = [row for row in synthetic() if row[:4] != ("B-v0", "one", 15, 3)]
    report.write_report(write_csv(tmp_path / "out", rows))
    text = (tmp_path / "out/report.md").read_text()
    assert "one, left out: not finished on every task: seed 3." in text
    assert "4 of 4 seeds" in text


def test_the_page_needs_nothing_else(tmp_path):
    write_runs(tmp_path / "out", seeds=(1, 2, 3))
    report.write_report(tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    pictures = re.findall(r'src="([^"]{30})', page)
    assert len(pictures) == 4
    assert all(picture.startswith("data:image/png;base64,iVBOR") for picture in pictures)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "<script" not in page
    assert "http" not in page
    headings = re.findall(r'<h2 id="([^"]+)"', page)
    assert [f"#{name}" for name in headings] == re.findall(r'href="([^"]+)"', page)


def test_text_of_a_page_is_escaped():
    page = document.to_html([("text", "a <b> & `c`"), ("table", [["<i>"], ["x|y"]])], None)
    assert "a &lt;b&gt; &amp; <code>c</code>" in page
    assert "&lt;i&gt;" in page
    assert document.markdown_table([["x|y"]]).startswith("| x\\|y |")


def test_filter_and_forward_lag_are_drawn_from_metrics(tmp_path):
    suite = write_runs(tmp_path / "out")
    for run in runs.expand(suite, tmp_path / "out"):
        lines = [f"{step},1,0.0{step % 7},0.{step % 5}" for step in range(0, 2000, 2)]
        header = "global_step,charts/SPS,lag/tv_forward_mean,lag/filtered_fraction"
        (run.folder / "metrics.csv").write_text("\n".join([header, *lines]) + "\n")
    report.write_report(tmp_path / "out")
    assert (tmp_path / "out/filter.png").stat().st_size > 5000
    path = runs.expand(suite, tmp_path / "out")[0].folder / "metrics.csv"
    curve = pictures.read_metrics(path, ("lag/tv_forward_mean",))
    assert curve[0] == {"lag/tv_forward_mean": 0.0}
    assert 300 < len(curve) <= 1000
    path.write_text("global_step,other\n1,2\n")
    assert pictures.read_metrics(path, ("lag/tv_forward_mean",)) == {}


def test_a_thousand_rows(tmp_path, references, capsys):
    rows = synthetic(tuple(f"T{i}-v0" for i in range(10)), ("a", "b", "c", "d", "e"), (0, 3, 15, 63), range(5))
    out = write_csv(tmp_path / "out", rows)
    for task, algorithm, lag, seed, value, _ in rows:
        folder = runs.run_folder(out, task, algorithm, lag, seed)
        folder.mkdir(parents=True)
        curve = "".join(f"{step},{value * step / 1000}\n" for step in range(0, 1001, 50))
        (folder / "evals.csv").write_text("step,score\n" + curve)
    start = time.perf_counter()
    report.write_report(out)
    with capsys.disabled():
        print(f"\n{len(rows)} rows reported in {time.perf_counter() - start:.1f} s")
    assert (out / "report.html").exists()


# ----------------------------------------------------------------------------------------------------------- bad input


def test_a_run_resumed_by_another_version_says_so(tmp_path):
    def change(run, config, result, evals):
        if run.seed == 1 and run.lag == 0:
            config["resumed"] = [
                dict(config),
                config | {"commit": "def", "versions": config["versions"] | {"torch": "3"}},
            ]

    write_runs(tmp_path / "out", change)
    text = report.write_report(tmp_path / "out")
    assert "**Mixed commit, so the runs are not strictly comparable:** abc, then def (2 runs); abc (6 runs)" in text
    assert "**Mixed torch, so the runs are not strictly comparable:** 2.13, then 3 (2 runs); 2.13 (6 runs)" in text


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("task,algorithm,seed", [("X", "a", 1)], "once, here not eval_return: its columns, separated by commas, are t"),
        ("task;algorithm;seed;eval_return", [], "here not task: its columns, separated by commas, are task;algorithm;"),
        (f"{REQUIRED},seed", [("X", "a", 1, 2, 1)], "each of the columns task, algorithm, seed, eval_return once"),
        ("", [], "it is empty"),
        (REQUIRED, [], "has no rows"),
        (REQUIRED, [("X", "a", "one", 1)], "line 2: seed one: give a whole number"),
        (REQUIRED, [("X", "a", "1_0", 1)], "line 2: seed 1_0: give a whole number"),
        (REQUIRED, [("X", "a", -1, 1)], "line 2: seed -1: give a whole number from 0"),
        (f"{REQUIRED},lag", [("X", "a", 1, 1, -3)], "line 2: lag -3: give a whole number from 0"),
        (REQUIRED, [("X", "a", 1, "high")], "line 2: eval_return high: give a number"),
        (REQUIRED, [("X", "a", 1, "5_0")], "line 2: eval_return 5_0: give a number"),
        (REQUIRED, [("X", "a", 1, "1e31")], "line 2: eval_return 1e31: it is too large"),
        (REQUIRED, [("X", "a", 1, 5, 9)], "line 2: 5 cells under a header of 4"),
        (REQUIRED, [("X", "a", 1)], "line 2: 3 cells under a header of 4"),
        (REQUIRED, [("X", "a", 1, '"2'), ("X", "a", 2, 3)], "cannot be read: unexpected end of data"),
        (REQUIRED, [("X", '"a\nb"', 1, 2)], "has a line break or the like"),
        (f"{REQUIRED},status", [("X", "a", 1, 2, "done")], "line 2: status done: give one of finished, failed, unf"),
        (REQUIRED, [("X", "a", 1, 2), ("X", "a", 1, 3)], "line 3: a, X, lag 0, seed 1 is there twice"),
        (REQUIRED, [("X", "a/b", 1, 2), ("X", "a b", 1, 3)], "a b, X, lag 0, seed 1 has the same folder as a/b, X"),
        (REQUIRED, [("Hopper-v4", "a", 1, 2), ("Hopper-v5", "a", 1, 3)], "two versions of one"),
        (REQUIRED, [("Hopper-v4", "a", 1, 2), ("my:Hopper-v5", "a", 1, 3)], "two versions of one"),
        (REQUIRED, [("..", "a", 1, 2)], "line 2: the name '..' cannot be a folder"),
    ],
)  # fmt: skip
def test_bad_results_are_refused_in_a_line(tmp_path, capsys, header, rows, message):
    out = write_csv(tmp_path / "out", rows, header)
    assert main(["report", str(out)]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert [path.name for path in out.iterdir()] == ["results.csv"]


def test_what_spreadsheets_write_is_read(tmp_path):
    text = "\ufefftask, algorithm ,seed,eval_return,status\r\nX, a,1.0, 5,Finished\r\nX,a ,2,7,\r\n,,,,\r\n"
    (tmp_path / "results.csv").write_text(text, encoding="utf-8", newline="")
    name, suite, rows = results.load(tmp_path)
    assert (name, list(suite.algorithms), suite.seeds) == ("results", ["a"], (1, 2))
    assert [r["eval_return"] for r in rows] == [5.0, 7.0]


def test_seeds_far_apart_and_large_numbers(tmp_path):
    rows = [("X", "a", 0, seed, value, 1e12) for seed, value in ((1, 5.0), (2, 1e30), (10**17, -1e30))]
    text = report.write_report(write_csv(tmp_path / "out", rows))
    assert ["100000000000000000", "-1e+30"] in cells(text)
    assert tables.spell((1, 2, 10**17)) == "1, 2, 100000000000000000"
    assert tables.spell((4, 5, 6)) == "4 to 6"
    assert tables.spell((3, 1, 5)) == "3, 1, 5"


def test_curves_need_a_header(tmp_path, capsys):
    suite = write_runs(tmp_path / "out")
    path = runs.expand(suite, tmp_path / "out")[0].folder / "evals.csv"
    path.write_text(path.read_text().partition("\n")[2])
    assert main(["report", str(tmp_path / "out")]) == 2
    assert "evals.csv begins with a number: give it a header" in capsys.readouterr().err


def test_results_without_their_runs_are_not_overwritten(tmp_path, capsys):
    out = tmp_path / "out"
    suite = write_runs(out)
    report.write_report(out)
    before = (out / "results.csv").read_text()
    mine = ["Toy-v0", "Mine", "0", "1", "finished", "99"]
    cell = dict(zip(("task", "algorithm", "lag", "seed", "status", "eval_return"), mine, strict=True))
    with open(out / "results.csv", "a", newline="") as file:
        csv.DictWriter(file, results.COLUMNS, lineterminator="\n").writerow(cell)
    changed = (out / "results.csv").read_text()
    assert main(["report", str(out)]) == 2
    assert "has a result of Mine, Toy-v0, lag 0, seed 1, but the folder has no such run" in capsys.readouterr().err
    assert (out / "results.csv").read_text() == changed
    (out / "results.csv").write_text(before)
    shutil.rmtree(out / "Toy-v0")
    assert main(["report", str(out)]) == 2
    assert main(["compare", str(out), str(out)]) == 2  # nothing is finished
    assert (out / "results.csv").read_text() == before
    assert suite.seeds == (1, 2)


def test_means_of_some_seeds_say_of_how_many(tmp_path):
    rows = [("X", a, 0, s, 10.0 * s, 100) for a, seeds in (("a", (1, 2)), ("b", (2, 3, 4, 5))) for s in seeds]
    text = report.write_report(write_csv(tmp_path / "out", rows))
    assert ["mean", "15.0 (2 of 5 seeds)", "35.0 (4 of 5 seeds)", "+0.0 (1 of 5 seeds)"] in cells(text)
    assert "**4 of 10 combinations of algorithm, task, lag and seed** have no row in results.csv" in text
    (line,) = [line for line in cells((tmp_path / "out/report.md").read_text()) if line[:2] == ["X", "0"]][:1]
    assert line[2] == "15.0 (2 of 5 seeds)"
    assert line[3].startswith("35.0 [")
    assert line[3].endswith("(4 of 5 seeds)")


def test_many_missing_runs_are_counted(tmp_path):
    header = "task,algorithm,seed,eval_return,status"
    rows = [("X", "a", 1, 5.0, "finished"), *(("X", "a", s, "", "failed") for s in range(2, 50))]
    text = report.write_report(write_csv(tmp_path / "out", rows, header))
    assert "**Incomplete: 48 of 49 runs are not finished** (48 failed)." in text
    assert "- and 28 more: results.csv has all" in text


def test_a_third_algorithm_of_other_steps_or_tasks_changes_no_score_of_the_others(tmp_path, references):
    def scores_of(name, rows):
        report.write_report(write_csv(tmp_path / name, rows))
        text = (tmp_path / name / "report.md").read_text()
        return [line for line in cells(text) if line[0] in ("one", "two") and len(line) == 6], text

    alone, _ = scores_of("alone", synthetic())
    assert len(alone) == 4
    mine = [row for row in synthetic(algorithms=("one", "two", "mine")) if row[1] == "mine"]
    for name, added, why in (
        ("steps", [(*row[:5], 500 if row[0] == "A-v0" else 1000) for row in mine], "its runs on A-v0 have another num"),
        ("unsaid", [(*row[:5], "") for row in mine], "results.csv has no final_step of its runs"),
        ("tasks", [*mine, *((f"C{row[0]}", *row[1:]) for row in mine)], "Over 2 of 4 tasks"),
        ("lag", [row for row in mine if row[2] == 0], "mine, left out: it has no run at this lag"),
    ):
        with_mine, text = scores_of(name, synthetic() + added)
        assert with_mine == alone
        assert why in text


def test_an_algorithm_beside_published_results_is_compared_with_each(tmp_path):
    published = (ROOT / "benchmark/results/halfcheetah.csv").read_text()
    columns = published.partition("\n")[0].split(",")
    out = tmp_path / "out"
    out.mkdir()
    with open(out / "results.csv", "w", newline="") as file:
        file.write(published)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        for seed in range(1, 6):
            row = {"task": "HalfCheetah-v5", "algorithm": "Mine", "lag": 15, "seed": seed, "eval_return": 2000 + seed}
            writer.writerow(row)
    text = report.write_report(out)
    for pair in ("VACO - PPO", "VACO - PPO clip .5", "Mine - PPO", "Mine - PPO clip .5", "Mine - VACO"):
        assert f"\n{pair}: mean difference" in text
    assert "**Not known of 5 runs,** and so perhaps not the same: commit, python, torch" in text
    written = (out / "report.md").read_text()
    assert written.startswith("# halfcheetah: results read from results.csv")
    assert "whether they share starts and noise, results.csv does not say" in written
    assert "PPO clip .5, one of 10 runs: `python ppo_continuous.py" in written


def test_damaged_curves_and_references_are_refused_in_a_line(tmp_path, capsys, references):
    out = write_csv(tmp_path / "out", synthetic())
    folder = runs.run_folder(out, "A-v0", "one", 0, 1)
    folder.mkdir(parents=True)
    (folder / "evals.csv").write_text("step,score\n10,1\nten,1\n")
    assert main(["report", str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    references.write_text("task,steps\nA,1\n")
    assert main(["report", str(out)]) == 2
    assert "cannot be read: KeyError" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs rlimits")
def test_a_full_disk_loses_nothing(tmp_path):
    """A limit on the size of a file stands in for the disk: writing past it fails as a full disk does."""
    write_runs(tmp_path / "out", seeds=(1, 2, 3))
    report.write_report(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-m", "benchmark", "report", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("benchmark: ")
    assert done.stderr.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}


# ------------------------------------------------------------------------------------------------ compare and reference


def test_compare_pairs_run_by_run(tmp_path, capsys):
    old = write_csv(tmp_path / "old", [("X", "a", 0, s, 10.0 * s, 100) for s in (1, 2, 3)])
    new = write_csv(tmp_path / "new", [("X", "a", 0, s, 10.0 * s + s, 100) for s in (3, 2, 1, 4)])
    assert main(["compare", str(old), str(new)]) == 0
    text = capsys.readouterr().out
    assert ["X", "0", "a", "20.0", "22.0", "+2.0", "+1.0 to +3.0", "3 of 3"] in cells(text)
    assert f"Only in {new}, left out:** a, X, lag 0, seed 4" in text
    assert main(["compare", str(old), str(new), "--fail-below", "2"]) == 0
    assert main(["compare", str(old), str(new), "--fail-below", "2.1"]) == 1
    assert "failed: mean difference +2 of 3 pairs, limit 2.1" in capsys.readouterr().out
    assert main(["compare", str(new), str(old), "--fail-below", "-10"]) == 1  # a run is gone
    assert "1 runs of" in capsys.readouterr().out
    for words in (
        ["compare", str(old), str(tmp_path / "none")],
        ["compare", str(old), str(new), "--fail-below", "nan"],
    ):
        assert main(words) == 2
    longer = write_csv(tmp_path / "longer", [("X", "a", 0, s, 99.0, 100 if s == 1 else 1000) for s in (1, 2, 3)])
    assert main(["compare", str(old), str(longer), "--fail-below", "0"]) == 1
    text = capsys.readouterr().out
    assert "**Of another length, left out:** a, X, lag 0, seed 2; a, X, lag 0, seed 3" in text
    assert "failed: mean difference +89 of 1 pairs, limit 0, 2 have another last step" in text
    other = write_csv(tmp_path / "other", [("Y", "a", 0, 1, 1.0, 100)])
    assert main(["compare", str(old), str(other)]) == 2
    assert "no finished run of the same task" in capsys.readouterr().err


def test_reference_scores_are_measured_and_used(tmp_path, monkeypatch):
    path = tmp_path / "references.csv"
    path.write_text(",".join(reference.COLUMNS) + "\nOld-v0,10,10,1,2" + "," * (len(reference.COLUMNS) - 5) + "\n")
    words = ["reference", "--steps", "4096", "--tasks", "InvertedPendulum-v5", "--seeds", "1:2"]
    words += ["--out", str(tmp_path / "out"), "--csv", str(path)]
    for _ in range(2):  # the second time nothing is run, and the file is the same
        assert main(words) == 0
        with open(path, newline="") as file:
            rows = {row["task"]: row for row in csv.DictReader(file)}
    row = rows["InvertedPendulum-v5"]
    assert rows["Old-v0"]["ppo"] == "2"
    assert (row["steps"], row["final_step"], row["seeds"], row["episodes"]) == ("4096", "4096", "1 2", "100")
    assert 3 < float(row["random"]) < 8 < float(row["ppo"])  # episodes of a falling pole
    assert row["command"].startswith("python -m benchmark reference --steps 4096")
    assert row["torch"]
    assert row["gymnasium"]
    monkeypatch.setattr(scores, "PATH", path)
    _, _, found = results.load(tmp_path / "out")
    scores.add_scores(found, scores.read_references())
    assert np.mean([r["score"] for r in found if r["task"] == "InvertedPendulum-v5"]) == pytest.approx(1)


def test_a_damaged_reference_file_is_refused_before_anything_runs(tmp_path, capsys):
    path = tmp_path / "references.csv"
    path.write_text("a,b\n1,2\n")
    words = [
        "reference",
        "--steps",
        "4096",
        "--tasks",
        "Pendulum-v1",
        "--out",
        str(tmp_path / "out"),
        "--csv",
        str(path),
    ]
    assert main(words) == 2
    assert "is not a file of reference scores" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_random_policy_is_the_same_every_time():
    assert reference.random_return("InvertedPendulum-v5", 5) == reference.random_return("InvertedPendulum-v5", 5)
    with pytest.raises(runs.Refused, match="Nothing-v0"):
        reference.random_return("Nothing-v0")
