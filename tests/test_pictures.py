"""The pictures of a report: readable, whatever the names and numbers and however many there are."""

import itertools

import numpy as np
import pytest
from PIL import Image

from benchmark import pictures, report, results, runs


def write(out, rows, curves=None, header="step,score", file="evals.csv"):
    """results.csv of (task, algorithm, lag, seed, return), and a file for each of curves {row: {step: score}}"""
    out.mkdir(exist_ok=True)
    lines = [",".join(map(str, (*row, 100))) for row in rows]
    (out / "results.csv").write_text("\n".join(["task,algorithm,lag,seed,eval_return,final_step", *lines]) + "\n")
    for (task, algorithm, lag, seed, *_), curve in (curves or {}).items():
        folder = runs.run_folder(out, task, algorithm, lag, seed)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("\n".join([header, *(f"{x},{y}" for x, y in curve.items())]) + "\n")
    return out


def crossed(tasks=("T",), algorithms=("a", "b"), lags=(0,), seeds=(1, 2, 3)):
    return [(*key, 10.0 * i) for i, key in enumerate(itertools.product(tasks, algorithms, lags, seeds))]


@pytest.fixture
def figures(monkeypatch):
    """{file: its figure} of what is drawn; the files are written as well."""
    from matplotlib.figure import Figure

    found, save, replace_file = {}, Figure.savefig, pictures.replace_file
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (found.update(last=figure), save(figure, *a, **k)))
    monkeypatch.setattr(
        pictures, "replace_file", lambda path, x: (found.update({path.name: found.pop("last")}), replace_file(path, x))
    )
    return found


def overlapping(figure):
    """Pairs of texts of a figure that lie on each other, and texts that stick out of it."""
    figure.dpi = 150  # as it is written
    figure.draw_without_rendering()
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    pairs = [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[i + 1 :] if x.overlaps(y)]
    return pairs, [a for a, x in boxes if x.x0 < 0 or x.x1 > figure.bbox.x1 or x.y1 > figure.bbox.y1]


@pytest.mark.parametrize("name", ["$\\frac{$", "cost $5 and $6", "_a", "InvertedDoublePendulum-v5"])
def test_any_name_is_drawn_to_the_letter(tmp_path, figures, name):
    rows = crossed(tasks=(name, "T"), algorithms=(name, "b", "c"), lags=(0, 3, 15))
    report.write_report(write(tmp_path / "out", rows, {row: {0: 1.0, 100: 2.0} for row in rows}))
    assert figures.keys() == {"lag.png", "curves.png", "pairs.png"}
    for figure in figures.values():
        assert overlapping(figure) == ([], [])
    legend = figures["lag.png"].legends[0].get_texts()[0].get_text()
    assert legend.strip() == name.replace("$", r"\$")


def test_many_panels_are_several_files_that_fit_on_a_sheet(tmp_path):
    rows = crossed(tasks=[f"T{i}" for i in range(10)], lags=(0, 15, 63), seeds=(1,))
    out = write(tmp_path / "out", rows, {row: {0: 1.0, 100: row[-1]} for row in rows})
    report.write_report(out)
    assert sorted(path.name for path in out.glob("curves*")) == ["curves-2.png", "curves-3.png", "curves.png"]
    assert "![Learning curves](curves-3.png)" in (out / "report.md").read_text()
    for file in out.glob("curves*"):
        width, height = Image.open(file).size
        assert width == 150 * pictures.WIDTH
        assert height < 1.25 * width  # a sheet of A4 without margins and caption


def mean_line(axis, name="a"):
    return next(line for line in axis.lines if line.get_label() == name)


def test_curves_of_other_steps_are_interpolated_and_infinite_scores_are_gaps(tmp_path, figures):
    rows = crossed(algorithms=("a",), lags=(0, 1), seeds=(1, 2))
    curves = [{0: 0.0, 100: 10.0, 300: 30.0}, {50: 5.0, 150: 25.0}, *[{0: 0.0, 50: 1.0, 100: "inf", 200: 2.0}] * 2]
    report.write_report(write(tmp_path / "out", rows, dict(zip(rows, curves, strict=True))))
    line, gap = (mean_line(axis) for axis in figures["curves.png"].axes)
    assert np.array_equal(line.get_xdata(), [50, 100, 150])
    assert np.allclose(line.get_ydata(), [5, (10 + 15) / 2, (15 + 25) / 2])
    assert np.array_equal(gap.get_ydata(), [0, 1, np.nan, 2], equal_nan=True)


def test_lag_pairs_and_profile_show_known_numbers(tmp_path, figures, monkeypatch):
    """Tasks A and B with scores of return / 100; seed 3 of b on B is missing, and A has a task beside it unscored."""
    path = tmp_path / "references.csv"
    path.write_text("task,final_step,random,ppo\nA,100,0,100\nB,100,0,100\n")
    monkeypatch.setattr(results, "PATH", path)
    rows = [row for row in crossed(("A", "B", "C"), lags=(0, 15)) if (*row[:2], row[3]) != ("B", "b", 3)]
    report.write_report(write(tmp_path / "out", rows))
    first, *others = figures["lag.png"].axes[:4]
    assert first.get_title() == "2 tasks, IQM"
    assert [axis.get_title() for axis in others] == ["A", "B", "C"]
    # a at lag 0: 0 .1 .2 on A, 1.2 1.3 on B
    scores = np.array([[0, 1.2], [0.1, 1.3], [0.2, np.nan]])
    assert mean_line(first).get_ydata()[0] == pytest.approx(pictures.iqm(scores))
    assert mean_line(others[1]).get_ydata()[0] == 130  # of all three seeds of a on B
    (points,) = [line for line in figures["pairs.png"].axes[0].lines if line.get_label() == "lag 0"]
    known = np.isfinite(points.get_xdata())
    assert sorted(points.get_xdata()[known]) == pytest.approx([0, 0.1, 0.2, 1.2, 1.3])  # a across
    assert sorted(points.get_ydata()[known]) == pytest.approx([0.6, 0.7, 0.8, 1.8, 1.9])  # b up
    profile = mean_line(figures["profile.png"].axes[0])
    at = np.searchsorted(profile.get_xdata(), 0.15)
    assert profile.get_ydata()[at] == pytest.approx((1 / 3 + 1) / 2)


def test_filter_is_drawn_of_those_that_have_one(tmp_path, figures):
    rows = crossed(seeds=(1, 2))
    for name, header in (("a", "step,lag/tv_forward_mean"), ("b", "step,lag/tv_forward_mean,lag/filtered_fraction")):
        extra = ",.5" * (name == "b")
        curves = {row: {10: f"{row[3]}{extra}", 20: f"{row[3]}{extra}"} for row in rows if row[1] == name}
        write(tmp_path / "out", rows, curves, header, "metrics.csv")
    report.write_report(tmp_path / "out")
    forward, filtered = figures["filter.png"].axes
    assert [mean_line(forward, name).get_ydata().tolist() for name in "ab"] == [[1.5, 1.5], [1.5, 1.5]]
    assert [line.get_label() for line in filtered.lines] == ["b"]


def test_many_algorithms_and_returns_of_any_size_are_drawn(tmp_path, figures):
    rows = crossed(algorithms=[f"a{i}" for i in range(20)])
    rows = [(*row[:4], (-1) ** i * 1e30) for i, row in enumerate(rows)]
    report.write_report(write(tmp_path / "out", rows, {row: {0: 1e30, 100: -1e30} for row in rows[:3]}))
    assert len({tuple(look.values()) for look in pictures.looks(results.load(tmp_path / "out")[1]).values()}) == 20
    assert not figures["profile.png"].axes[0].collections  # no bands
    for figure in figures.values():
        assert overlapping(figure) == ([], [])
