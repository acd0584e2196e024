"""The pictures and the page of a report: readable, whatever the names, the numbers and how many there are."""

import html
import itertools
import re

import numpy as np
import pytest
from benchmark_helpers import cells
from PIL import Image

from benchmark import document, pictures, report, runs
from benchmark.__main__ import main
from benchmark.results import load


def write(out, rows, curves=None):
    """results.csv of (task, algorithm, lag, seed, return), and an evals.csv for each of curves {row: {step: score}}"""
    out.mkdir()
    lines = [",".join(map(str, row)) for row in rows]
    (out / "results.csv").write_text("\n".join(["task,algorithm,lag,seed,eval_return", *lines]) + "\n")
    for (task, algorithm, lag, seed, *_), curve in (curves or {}).items():
        folder = runs.run_folder(out, task, algorithm, lag, seed)
        folder.mkdir(parents=True)
        (folder / "evals.csv").write_text("\n".join(["step,score", *(f"{x},{y}" for x, y in curve.items())]) + "\n")
    return out


def crossed(tasks=("T",), algorithms=("a", "b"), lags=(0,), seeds=(1, 2, 3)):
    keys = itertools.product(tasks, algorithms, lags, seeds)
    return [(*key, 10.0 * i) for i, key in enumerate(keys)]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, in order; they are written as well."""
    found, save = [], pictures.save

    def keep(figure, *words, **more):
        found.append(figure)
        return save(figure, *words, **more)

    monkeypatch.setattr(pictures, "save", keep)
    return found


def overlapping(figure):
    """Pairs of texts of a figure that lie on each other, and texts that stick out of it."""
    figure.dpi = 150  # as it is written
    figure.draw_without_rendering()
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        low, high = axis.get_xlim()
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label]
        texts += [tick.label1 for tick in axis.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    pairs = [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[i + 1 :] if x.overlaps(y)]
    return pairs, [a for a, x in boxes if x.x0 < 0 or x.x1 > figure.bbox.x1 or x.y1 > figure.bbox.y1]


@pytest.mark.parametrize("name", ["$\\frac{$", "cost $5 and $6", "_a", "A" * 99 + "b", "long name " * 9 + "end"])
def test_any_name_is_drawn_to_the_letter(tmp_path, figures, name):
    rows = crossed(tasks=(name, "T"), algorithms=(name, "b", "c"))
    out = write(tmp_path / "out", rows, {row: {0: 1.0, 100: 2.0} for row in rows})
    report.write_report(out)
    assert {"lag.png", "curves.png", "pairs.png"} <= {path.name for path in out.glob("*.png")}
    for figure in figures:
        assert overlapping(figure) == ([], [])
    legend = figures[0].legends[0].get_texts()[0].get_text()
    assert re.sub(r"\s", "", legend) == re.sub(r"\s", "", name.replace("$", r"\$"))


def test_many_algorithms_look_different(tmp_path, figures):
    out = write(tmp_path / "out", crossed(algorithms=[f"a{i}" for i in range(30)]))
    _, suite, _ = load(out)
    assert len({tuple(look.values()) for look in pictures.looks(suite).values()}) == 30
    report.write_report(out)
    profile = figures[-1]
    assert len({line.get_label() for line in profile.axes[0].lines}) == 30
    assert not profile.axes[0].collections  # no bands
    assert "No intervals" in profile.get_supxlabel()
    for figure in figures:
        assert overlapping(figure) == ([], [])


def test_many_panels_are_several_files_that_fit_on_a_sheet(tmp_path):
    rows = crossed(tasks=[f"T{i}" for i in range(10)], lags=(0, 3, 15, 63), seeds=(1,))
    out = write(tmp_path / "out", rows, {row: {0: 1.0, 100: row[-1]} for row in rows})
    _, suite, found = load(out)
    files = pictures.draw_curves(suite, found, out / "curves.png")
    assert files == ["curves.png", *(f"curves-{page}.png" for page in (2, 3, 4, 5))]
    for file in files:
        width, height = Image.open(out / file).size
        assert width == 150 * pictures.WIDTH
        assert height < 1.25 * width  # a sheet of A4 without margins and caption


def test_many_lags_have_few_panels_and_ticks(tmp_path, figures):
    out = write(tmp_path / "out", crossed(lags=range(200), seeds=(1,)))
    report.write_report(out)
    lag, pairs, profile = figures
    assert len(lag.axes[0].get_xticks()) == 8
    assert len(profile.axes) == pictures.LAGS
    for figure in (pairs, profile):
        assert "6 of 200 lags" in figure.get_supxlabel()
    assert [axis.get_title() for axis in profile.axes][::5] == ["lag 0", "lag 199"]


def test_returns_of_any_size_are_drawn(tmp_path, figures):
    values = (1e30, -1e30, 1e30, 1e30, 1e30, 1e30)
    rows = [(*row[:4], value) for row, value in zip(crossed(), values, strict=True)]
    report.write_report(write(tmp_path / "out", rows, {row: {0: 1e30, 100: -1e30} for row in rows}))
    assert len(figures) == 4


# -------------------------------------------------------------------------------------------------------------- curves


def mean_line(figure):
    return next(line for line in figure.axes[0].lines if line.get_label() == "a")


def test_seeds_evaluated_at_other_steps_have_an_interpolated_mean(tmp_path, figures):
    rows = crossed(algorithms=("a",), seeds=(1, 2))
    curves = dict(zip(rows, ({0: 0.0, 100: 10.0, 300: 30.0}, {50: 5.0, 150: 25.0}), strict=True))
    _, suite, found = load(write(tmp_path / "out", rows, curves))
    pictures.draw_curves(suite, found, tmp_path / "curves.png")
    line = mean_line(figures[0])
    assert np.array_equal(line.get_xdata(), [50, 100, 150])
    assert np.allclose(line.get_ydata(), [5, (10 + 15) / 2, (15 + 25) / 2])
    assert "all of its seeds reach" in figures[0].get_supxlabel()


def test_infinite_scores_are_gaps(tmp_path, figures):
    rows = crossed(algorithms=("a",), seeds=(1, 2))
    curve = {0: 0.0, 50: 1.0, 100: "inf", 200: 2.0, 250: 3.0}
    _, suite, found = load(write(tmp_path / "out", rows, {row: curve for row in rows}))
    pictures.draw_curves(suite, found, tmp_path / "curves.png")
    assert np.array_equal(mean_line(figures[0]).get_ydata(), [0, 1, np.nan, 2, 3], equal_nan=True)
    assert "Gaps" in figures[0].get_supxlabel()
    low, high = figures[0].axes[0].get_ylim()
    assert -1 < low < 0 < 3 < high < 4


@pytest.mark.parametrize("step", ["inf", "1e30", "nan"])
@pytest.mark.parametrize("file", ["evals.csv", "metrics.csv"])
def test_impossible_steps_are_refused_in_a_line(tmp_path, capsys, file, step):
    rows = crossed()
    out = write(tmp_path / "out", rows, {row: {0: 1.0, 100: 2.0} for row in rows})
    header = "step,lag/tv_forward_mean,lag/filtered_fraction"
    (runs.run_folder(out, "T", "a", 0, 2) / file).write_text(f"{header}\n0,1,1\n{step},1,1\n")
    assert main(["report", str(out)]) == 2
    text = capsys.readouterr().err
    assert f"seed2/{file} cannot be read" in text
    assert text.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------ the page


NAMES = ("<b>", "a*b*c", "**x**", "`x`", "_x_", "a_b", "a|b", "&amp;", "[x](y)", "~~x~~", "a\\b")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_markup(name):
    blocks = [("heading", 1, name), ("table", [[name], [name]]), ("list", [document.literal(name)])]
    blocks += [("text", f"**bold {document.literal(name)}** and `code <b>`")]
    shown = html.escape(name)
    page = document.to_html(blocks, None)
    assert f">{shown}</h1>" in page
    assert page.count(f">{shown}</t") == 3  # the title, and two cells
    assert f"<li>{shown}</li>" in page
    assert f"<p class=text><strong>bold {shown}</strong> and <code>code &lt;b&gt;</code></p>" in page
    markdown = document.to_markdown(blocks)
    assert "`code <b>`" in markdown
    for text in (markdown.splitlines()[0].removeprefix("# "), cells(markdown)[0][0] if name != "a|b" else name):
        assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text) == name  # as Markdown reads it
        assert not re.search(r"(?<!\\)[<*`&]|(?<![\w\\])_", text)


def test_only_what_is_markup_is_escaped():
    text = "1.5 [1.2, 1.8], a < b & c_d, +2.0"
    assert document.to_markdown([("heading", 2, text), ("text", text)]) == f"## {text}\n\n{text}\n"


def test_paper_cuts_nothing_off():
    printed = document.STYLE.split("@media print")[1]
    for rule in (".wide { overflow: visible", "td { white-space: normal", "break-after: avoid", "max-height: 200mm"):
        assert rule in printed
    table = ("table", [[f"name {i}" for i in range(30)], ["1.0"] * 30])
    assert '<div class="wide many">' in document.to_html([table], None)
