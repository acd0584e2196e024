"""The report of known numbers: tables, warnings, the page, and what it makes of damaged or foreign folders."""

import csv
import re
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
from benchmark_helpers import cells, read_rows, write_runs

from benchmark import references as references_of
from benchmark import report, results, runs
from benchmark.__main__ import main

ROOT = runs.ROOT


@pytest.fixture(autouse=True)
def few_pictures(request, monkeypatch):
    """Pictures take most of the time of a report, and have tests of their own."""
    if not any(word in request.node.name for word in ("page", "nothing", "published")):
        monkeypatch.setattr(report, "draw", lambda *words: ([], []))


def write_csv(folder, rows, header="task,algorithm,lag,seed,eval_return,final_step"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return folder


def report_of(folder, *rows, **more):
    """The text of report.md of a folder with these rows."""
    report.write_report(write_csv(folder, *rows, **more))
    return (folder / "report.md").read_text()


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
    monkeypatch.setattr(results, "PATH", path)
    return path


# ------------------------------------------------------------------------------------------------- folders of a suite


def test_rows_and_tables_of_known_runs(tmp_path):
    out = tmp_path / "out"

    def change(run, config, record, evals):
        if run.seed == 1:
            record["starts"].append(record["starts"][0] | {"commit": "def"})

    write_runs(out, change, lags=(3,), seeds=(1, 2, 3))
    lines = cells(report.write_report(out))
    assert lines[0] == ["seed", "PPO", "VACO .5", "VACO .5 - PPO"]
    assert lines[2:6] == [
        ["1", "10.0", "12.0", "+2.0"],
        ["2", "20.0", "24.0", "+4.0"],
        ["3", "30.0", "36.0", "+6.0"],
        ["mean", "20.0", "24.0", "+4.0"],
    ]
    assert ["Toy-v0", "3", "+4.0 [+2.0, +6.0], 3/3"] in lines
    row = next(row for row in read_rows(out) if (row["algorithm"], row["seed"]) == ("PPO", "1"))
    expected = {"final_step": "100", "status": "finished", "train_return": "9.0", "eval_return": "10.0", "sps": "5.0"}
    expected |= {"eval_std": "1.0", "area_under_curve": "5.0", "peak_rss_mb": "300.0", "commit": "abc, then def"}
    expected |= {"torch": "2.13", "machine": "a machine", "script": "stand_in.py", "lag": "3"}
    assert {key: row[key] for key in expected} == expected
    written = (out / "report.md").read_text()
    for known in (
        "run toy --out",
        "torch: 2.13",
        "a machine",
        "--num-envs 10 --num-steps 2 --total-timesteps 110 --gain 2.5",
        "300 to 300 MB",
    ):
        assert known in written
    assert "**Mixed commit, so the runs are not strictly comparable:** abc, then def (2 runs); abc (4 runs)" in written


def test_train_return_is_that_of_the_last_tenth(tmp_path):
    (run, *_) = runs.expand(write_runs(tmp_path / "out"), tmp_path / "out")
    episodes = "".join(f"{step},{step / 10},5\n" for step in range(10, 101, 5))  # 95 and 100 are in the last tenth
    (run.folder / "episodes.csv").write_text("global_step,episodic_return,episodic_length\n" + episodes)
    assert results.read_run("toy", run)["train_return"] == (9.5 + 10) / 2
    (run.folder / "episodes.csv").unlink()  # a language model has rewards of its updates
    (run.folder / "metrics.csv").write_text("global_step,charts/SPS,charts/reward\n90,1,7\n95,1,.5\n100,3,.25\n")
    row = results.read_run("toy", run)
    assert (row["train_return"], row["sps"]) == (0.375, 3)


def test_missing_failed_and_unfinished_runs_are_listed_and_left_out(tmp_path):
    out = tmp_path / "out"
    every = {(r.algorithm, r.lag, r.seed): r for r in runs.expand(write_runs(out, seeds=(1, 2, 3)), out)}
    (every["PPO", 0, 2].folder / "model.pt").unlink()
    every["PPO", 0, 2].beside(".json").write_text('{"status": "failed"}')
    shutil.rmtree(every["VACO .5", 0, 1].folder)
    (every["VACO .5", 15, 3].folder / "model.pt").unlink()
    text = report.write_report(out)
    assert "Incomplete: 3 of 12 runs are not finished** (1 failed, 1 unfinished, 1 missing)" in text
    assert "- PPO, Toy-v0, lag 0, seed 2: failed" in text
    assert ["2", "failed", "24.0", ""] in cells(text)
    assert ["1", "10.0", "missing", ""] in cells(text)
    assert ["mean", "20.0 (2 of 3 seeds)", "30.0 (2 of 3 seeds)", "+6.0 (1 of 3 seeds)"] in cells(text)
    assert ["Toy-v0", "0", "+6.0, 1/1"] in cells(text)
    assert [row["status"] for row in read_rows(out)].count("finished") == 9


def test_nothing_finished_is_a_report_too(tmp_path):
    out = tmp_path / "out"
    for run in runs.expand(write_runs(out), out):
        shutil.rmtree(run.folder)
    assert "Incomplete: 8 of 8 runs are not finished** (8 missing)" in report.write_report(out)
    assert "there is no picture" in (out / "report.md").read_text()


@pytest.mark.parametrize("value", ["nan", "inf", None])
def test_no_evaluation_is_said_and_not_replaced_by_the_training_return(tmp_path, value):
    def change(run, config, record, evals):
        evals[:] = [(100, value)] if value else []

    write_runs(tmp_path / "out", change)
    assert report.write_report(tmp_path / "out").count("no evaluation") == 8
    assert {(r["eval_return"], r["area_under_curve"]) for r in read_rows(tmp_path / "out")} == {("", "")}


@pytest.mark.parametrize("table", ["step,score\n50,1\n40,2\n", "step,score\n1,high\n", "step,score\n1\n"])
def test_damaged_curves_are_refused_in_a_line(tmp_path, capsys, table):
    run = runs.expand(write_runs(tmp_path / "out"), tmp_path / "out")[0]
    (run.folder / "evals.csv").write_text(table)
    assert main(["report", str(tmp_path / "out")]) == 2
    text = capsys.readouterr().err
    assert "evals.csv cannot be read: " in text
    assert text.count("\n") == 1


# ------------------------------------------------------------------------------------- results.csv is all it needs


def test_published_results_are_readable_and_give_the_published_numbers(tmp_path):
    texts = {}
    for path in (ROOT / "benchmark/results").glob("*.csv"):
        (tmp_path / path.stem).mkdir()
        shutil.copy(path, tmp_path / path.stem / "results.csv")
        texts[path.stem] = report.write_report(tmp_path / path.stem)
        assert "Incomplete" not in texts[path.stem]
    assert texts.keys() >= {"quick", "halfcheetah", "hopper", "llm"}
    assert "+1414.8 [+1075.1, +1971.0], 5/5" in texts["halfcheetah"]
    assert "+0.018 [+0.004, +0.033], 4/5" in texts["llm"]
    written = (tmp_path / "halfcheetah/report.md").read_text()
    assert written.startswith("# halfcheetah: how much of PPO")
    assert "PPO clip .5, one of 10 runs: `python ppo_continuous.py" in written
    assert ["VACO", "0.921 [0.858, 1.528]"] in [line[:2] for line in cells(written)]


def test_an_algorithm_beside_published_results_is_compared_with_each(tmp_path):
    published = (ROOT / "benchmark/results/halfcheetah.csv").read_text()
    with open(tmp_path / "results.csv", "w", newline="") as file:
        file.write(published)
        writer = csv.DictWriter(file, published.partition("\n")[0].split(","), lineterminator="\n")
        for seed in range(1, 6):
            row = {"task": "HalfCheetah-v5", "algorithm": "Mine", "lag": 15, "seed": seed, "eval_return": 2000 + seed}
            writer.writerow(row)
    text = report.write_report(tmp_path)
    pairs = ["VACO - PPO", "VACO - PPO clip .5", "Mine - PPO", "Mine - PPO clip .5", "Mine - VACO"]
    assert ["task", "lag", *pairs] in cells(text)
    written = (tmp_path / "report.md").read_text()
    assert "unknown (5 runs)" in written
    assert "- Mine: no run has a score" in written  # without final_step it has no reference


def test_normalised_scores_by_hand(tmp_path, references):
    rows = [("A-v0", "x", 0, seed, value, 1000) for seed, value in ((1, -20), (2, 20), (3, 60), (4, 140))]
    rows += [("B-v0", "x", 0, seed, value, 1000) for seed, value in ((1, 60), (2, 140), (3, 220), (4, 300))]
    lines = cells(report_of(tmp_path, rows))  # scores 0 .5 1 2 and 1 2 3 4
    (line,) = [line for line in lines if line[0] == "x"]
    assert [cell.split(" ")[0] for cell in line] == ["x", "1.500", "1.688", "1.688", "0.188"]


def test_only_what_all_algorithms_have_is_averaged_over_tasks(tmp_path, references):
    """Task A has five seeds, task B three; of these, `one` lacks seed 5 of A at lag 15, and all of B at lag 63."""
    rows = synthetic(tasks=("A-v0",), lags=(0, 15, 63)) + synthetic(("B-v0",), lags=(0, 15, 63), seeds=range(1, 4))
    rows = [row for row in rows if row[:4] != ("A-v0", "one", 15, 5) and row[:3] != ("B-v0", "one", 63)]
    text = report_of(tmp_path, rows + synthetic(("C-v0",), lags=(0,)))
    assert "### Lag 0: normalised score over 2 tasks, seeds of each: 3 or 5" in text
    assert "### Lag 15: normalised score over 2 tasks, seeds of each: 3 or 4" in text
    assert "### Lag 63: normalised score over 1 task, seeds of each: 5" in text
    for note in ("C-v0, seed 1, 2, 3, 4, 5: no score of one, two", "A-v0, seed 5: no score of one"):
        assert f"- {note}\n" in text
    assert "- B-v0, seed 1, 2, 3: no score of one\n" in text
    kept = {row[:4]: row[4] for row in rows if row[2] == 15 and row[:4] != ("A-v0", "two", 15, 5)}
    means = [[(np.mean([x for key, x in kept.items() if key[:2] == (t, a)]) + 20) / 80 for t in ("A-v0", "B-v0")]
             for a in ("one", "two")]  # fmt: skip
    section = text.split("### Lag 15")[1].split("### Lag 63")[0]
    line = next(line for line in cells(section) if line[0] == "two")
    assert float(line[3].split(" ")[0]) == pytest.approx(np.mean(means[1]), abs=5e-4)
    line = next(line for line in cells(section) if line[0] == "two - one")
    assert float(line[1].split(" ")[0]) == pytest.approx(np.mean(means[1]) - np.mean(means[0]), abs=5e-4)
    assert line[2] == f"{sum(b > a for a, b in zip(*means, strict=True))} of 2"


def test_a_third_algorithm_changes_no_score_of_the_others(tmp_path, references):
    more = [
        row if row[1] != "fake" else (*row[:4], 1e6, row[5]) for row in synthetic(algorithms=("one", "two", "fake"))
    ]
    found = []
    for name, rows in (("few", synthetic()), ("more", more)):
        found.append([line for line in cells(report_of(tmp_path / name, rows)) if line[0] in ("one", "two")])
    assert found[0] == found[1]
    assert len(found[0]) == 4


def test_a_score_needs_the_reference_of_as_many_steps(tmp_path, references):
    for steps, raw in ((1000, False), (992, False), (500, True), ("", True)):
        assert ("Raw scores only" in report_of(tmp_path, synthetic(steps=steps))) == raw
    rows = [(*row[:5], 1000 if row[1] == "one" else 3000) for row in synthetic(tasks=("A-v0",))]
    text = report_of(tmp_path, rows)
    assert "**Mixed final_step, so the runs are not strictly comparable:** 1000.0 (10 runs); 3000.0 (10 runs)" in text


def test_speed_of_learning_by_hand(tmp_path, references):
    """Toy-v0 from 0 to 40, half way is 20: curves reach it at step 50 or 100, or never."""
    references.write_text("task,steps,final_step,random,ppo\nToy-v0,100,100,0,40\n")

    def change(run, config, record, evals):
        height = {1: 25.0, 2: 15.0, 3: 5.0}[run.seed]
        evals[:] = [(25, 0.0), (50, height), (100, 2 * height)]

    write_runs(tmp_path / "out", change, lags=(3,), seeds=(1, 2, 3))
    report.write_report(tmp_path / "out")
    rows = [r for r in read_rows(tmp_path / "out") if r["algorithm"] == "PPO"]
    assert [r["steps_to_half"] for r in rows] == ["50.0", "100.0", ""]
    assert float(rows[0]["area_under_curve"]) == (12.5 * 25 + 37.5 * 50) / 75


def test_no_interval_from_fewer_than_three_seeds(tmp_path, references):
    for seeds in (1, 2):
        text = report_of(tmp_path, synthetic(seeds=range(seeds))).split("Brackets hold")[1]
        assert not [cell for line in cells(text) for cell in line if "[" in cell]


def test_failed_and_many_missing_runs(tmp_path):
    header = "task,algorithm,seed,eval_return,status"
    rows = [
        ("X", "a", 1, 5.0, "finished"),
        ("X", "a", 2, 1e9, "failed"),
        *(("X", "a", s, "", "missing") for s in range(3, 50)),
    ]
    text = report_of(tmp_path, rows, header=header)
    assert ["mean", "5.0 (1 of 49 seeds)"] in cells(text)
    assert "**Incomplete: 48 of 49 runs are not finished** (1 failed, 47 missing)." in text
    assert "- and 28 more: results.csv has all" in text


REQUIRED = "task,algorithm,seed,eval_return"


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("task,algorithm,seed", [("X", "a", 1)], "has no column 'eval_return'"),
        ("task;algorithm;seed;eval_return", [("X",)], "has no column 'task'"),
        ("", [], "has no rows"),
        (REQUIRED, [], "has no rows"),
        (REQUIRED, [("X", "a", "one", 1)], "line 2: invalid literal for int() with base 10: 'one'"),
        (f"{REQUIRED},lag", [("X", "a", 1, 1, -3)], "missing, seed and lag 0 or more"),
        (REQUIRED, [("X", "a", 1, "high")], "line 2: could not convert string to float: 'high'"),
        (REQUIRED, [("X", "a", 1, 5, 9)], "line 2: not as many cells"),
        (REQUIRED, [("X", "a", 1)], "line 2: not as many cells"),
        (REQUIRED, [("X", "a", 1, '"2'), ("X", "a", 2, 3)], "unexpected end of data"),
        (f"{REQUIRED},status", [("X", "a", 1, 2, "done")], "line 2: status must be one of finished"),
        (REQUIRED, [("X", "a", 1, 2), ("X", "a", 1, 3)], "line 3: a, X, lag 0, seed 1 is there twice"),
        (REQUIRED, [("..", "a", 1, 2)], "the name '..' cannot be a folder"),
    ],
)  # fmt: skip
def test_bad_results_are_refused_in_a_line(tmp_path, capsys, header, rows, message):
    out = write_csv(tmp_path / "out", rows, header)
    assert main(["report", str(out)]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert [path.name for path in out.iterdir()] == ["results.csv"]


# ------------------------------------------------------------------------------------------------------------ the page


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
    assert re.findall(r'<h2 id="([^"]+)"', page) == re.findall(r'href="#([^"]+)"', page)
    assert page.count("<table>") == 4
    assert page.count("<blockquote>") == 0


NAMES = (
    "<b>",
    "a*b*c",
    "**x**",
    "`x`",
    "_x_",
    "a_b",
    "a|b",
    "&amp;",
    "[x](y)",
    "~~x~~",
    "a\\b",
    "![x](lag.png)",
    "# x",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_markup(tmp_path, name):
    parts = [f"# {report.literal(name)}", report.table([[name, "b"], [name, "1"]]), f"- {report.literal(name)}"]
    page = report.to_html("\n\n".join([*parts, f"> **bold {report.literal(name)}** and `code <b>`"]), tmp_path)
    body = ElementTree.fromstring(page.split("</head>\n")[1].removesuffix("</html>\n"))
    found = {tag: ["".join(element.itertext()) for element in body.iter(tag)] for tag in {x.tag for x in body.iter()}}
    assert (found["h1"], found["li"], found["td"][0], found["th"][0]) == ([name], [name], name, name)
    assert (found["strong"], found["code"]) == ([f"bold {name}"], ["code <b>"])
    assert not {"b", "em", "a", "img", "del"} & found.keys()


# ------------------------------------------------------------------------------------------------ compare and reference


def test_compare_pairs_run_by_run(tmp_path, capsys):
    old = write_csv(tmp_path / "old", [("X", "a", 0, s, 10.0 * s, 100) for s in (1, 2, 3)])
    new = write_csv(tmp_path / "new", [("X", "a", 0, s, 10.0 * s + s, 100) for s in (3, 2, 1, 4)])
    assert main(["compare", str(old), str(new)]) == 0
    text = capsys.readouterr().out
    assert ["X", "0", "a", "20.0", "22.0", "+2.0 [+1.0, +3.0]", "3 of 3"] in cells(text)
    assert "**1 runs without a partner of the same length, left out:** a, X, lag 0, seed 4" in text
    longer = write_csv(tmp_path / "longer", [("X", "a", 0, s, 99.0, 100 if s == 1 else 1000) for s in (1, 2, 3)])
    assert main(["compare", str(old), str(longer)]) == 0
    assert (
        "2 runs without a partner of the same length, left out:** a, X, lag 0, seed 2; a, X," in capsys.readouterr().out
    )
    other = write_csv(tmp_path / "other", [("Y", "a", 0, 1, 1.0, 100)])
    assert main(["compare", str(old), str(other)]) == 2
    assert "no finished run of the same task" in capsys.readouterr().err
    assert main(["compare", str(old), str(tmp_path / "none")]) == 2


def test_reference_scores_are_measured_and_merged(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "references.csv", tmp_path / "out"
    old = "Old-v0,10,10,1,2" + "," * (len(references_of.COLUMNS) - 5)
    path.write_text(f"{','.join(references_of.COLUMNS)}\n{old}\n")
    suite = {
        "settings": {"total-timesteps": 100},
        "tasks": ("InvertedPendulum-v5", "Reacher-v5"),
        "algorithms": {"PPO": ("a.py", {}), "other": ("a.py", {"gain": 2})},
    }
    write_runs(out, **suite, lags=(0, 15))
    (runs.run_folder(out, "Reacher-v5", "PPO", 0, 2) / "model.pt").unlink()
    words = ["reference", str(out), "--algorithm", "PPO", "--path", str(path)]
    assert main(words) == 0
    assert "Reacher-v5: no reference, 1 of 2 runs at lag 0 have a return" in capsys.readouterr().out
    with open(path, newline="") as file:
        rows = {row["task"]: row for row in csv.DictReader(file)}
    row = rows["InvertedPendulum-v5"]
    assert rows.keys() == {"Old-v0", "InvertedPendulum-v5"}
    assert (row["steps"], row["final_step"], row["seeds"], row["ppo"]) == ("100", "100", "1 2", "15.0")
    assert 3 < float(row["random"]) < 8  # episodes of a falling pole
    assert (row["torch"], row["commit"]) == ("2.13", "abc")
    monkeypatch.setattr(results, "PATH", path)
    scores = [r["score"] for r in results.load(out)[2] if (r["task"], r["algorithm"]) == ("InvertedPendulum-v5", "PPO")]
    assert np.mean(scores) == pytest.approx(1)
    path.write_text("a,b\n1,2\n")
    assert main(words) == 2
    assert "is not a file of reference scores" in capsys.readouterr().err
