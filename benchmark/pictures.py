"""The pictures of a report, from the rows that results.py reads.

Colours are Okabe and Ito's, told apart by colour-blind readers; line styles and markers tell them apart in grey print.
A picture of many panels is written as several files, NAME.png, NAME-2.png, ..., each of which fits on a sheet of A4.
Each draw_ returns the names of its files, none where there is nothing to draw. A `view` is what a panel shows:
(title, name of the score, {lag: {algorithm: scores (seeds, tasks)}}).
"""

import io

import numpy as np

from benchmark.results import FILTER
from benchmark.runs import replace_file
from benchmark.stats import MIN_RUNS, counts, iqm, mean, performance_profile, stratified_bootstrap

# The last algorithm has the same colour in every picture.
LAST_COLOR, COLORS = "#D55E00", ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES, MARKERS = ("--", "-.", ":"), "osD^vP<X>*"
WIDTH, ROWS = 9, 4  # inches, and rows of panels, of one file
REPS = 2000  # of bands; numbers in tables have 10,000
SCORE = "normalised score"  # name of scores over tasks
THIN, BANDS = 4, 6  # algorithms; single seeds or intervals of more would hide each other


def looks(suite):
    """{algorithm: its colour, line style and marker}"""
    found = {}
    for i, name in enumerate(suite.algorithms):
        last = i > 0 and i == len(suite.algorithms) - 1
        color, style = (LAST_COLOR, "-") if last else (COLORS[i % len(COLORS)], STYLES[i % len(STYLES)])
        found[name] = {"color": color, "linestyle": style, "marker": MARKERS[i % len(MARKERS)]}
    return found


def shown(name):
    """A name as it is drawn: a $ begins no formula, and a _ in front hides no legend."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def draw(path, panels, paint, columns=3):
    """Call paint(axis, *panel) for each of the panels, and write them with one legend of all labels above them."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps every figure

    columns, files = max(1, min(columns, len(panels))), []
    for start in range(0, len(panels), ROWS * columns):
        chosen = panels[start : start + ROWS * columns]
        rows = -(-len(chosen) // columns)
        size = WIDTH if columns > 1 else 6.5, rows * (2.7 if rows > 1 else 3.3)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis, panel in zip(axes, chosen, strict=False):
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.title.set_fontsize(10)
            paint(axis, *panel)
        for axis in axes[len(chosen) :]:
            axis.set_visible(False)
        labelled = [pair for axis in figure.axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
        if handles := {text: line for line, text in labelled}:
            fitting = int(figure.get_figwidth() / (0.9 + 0.09 * max(map(len, handles))))
            style = {"loc": "outside upper left", "ncols": max(1, min(len(handles), fitting)), "handlelength": 3}
            figure.legend(handles.values(), handles, frameon=False, **style)
            figure.set_figheight(figure.get_figheight() + 0.21 * -(-len(handles) // style["ncols"]))
        file = path if start == 0 else path.with_stem(f"{path.stem}-{len(files) + 1}")
        content = io.BytesIO()
        # no date and no version in the file: the same runs give the same bytes
        figure.savefig(content, format="png", dpi=150, metadata={"Software": None})
        replace_file(file, content.getvalue())
        files.append(file.name)
    return files


def draw_line(axis, x, y, name, look, **more):
    axis.plot(x, y, linewidth=2, markersize=5, markevery=max(1, len(x) // 6), label=shown(name), **look, **more)


def steps_axis(axis):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 300k, 1M
    axis.xaxis.set_major_locator(MaxNLocator(5))


def limits(values, margin):
    """(low, high) that leave a margin around the values, also where they are all the same"""
    low, high = min(values), max(values)
    margin *= high - low or abs(high) or 1.0
    return low - margin, high + margin


def common(curves):
    """Curves {step: value} of several seeds, interpolated: (steps (n,) that all span, values (seeds, n))"""
    first, last = max(map(min, curves)), min(map(max, curves))
    steps = np.array(sorted({step for curve in curves for step in curve if first <= step <= last}))
    return steps, np.array([np.interp(steps, list(curve), list(curve.values())) for curve in curves])


def band(values):
    """95 % bootstrap interval of the mean over seeds at each step: (seeds, n) -> (low, high), each (n,)"""
    indices = np.random.default_rng(0).integers(len(values), size=(REPS, len(values)))
    weights = np.stack([(indices == i).mean(1) for i in range(len(values))], axis=1)  # (REPS, seeds)
    return np.percentile(weights @ values, [2.5, 97.5], axis=0)


def draw_curves(suite, rows, path):
    """Evaluation curves, a panel per task and lag."""
    cells = {}
    for row in rows:
        if row["status"] == "finished" and row["curve"]:
            cells.setdefault((row["task"], row["lag"], row["algorithm"]), []).append(row["curve"])

    def paint(axis, task, lag):
        found = {a: cells[task, lag, a] for a in suite.algorithms if (task, lag, a) in cells}
        for algorithm, curves in found.items():
            look = looks(suite)[algorithm]
            steps, values = common(curves)
            for curve in curves if len(suite.algorithms) <= THIN else ():
                axis.plot(list(curve), list(curve.values()), color=look["color"], linewidth=0.7, alpha=0.4)
            draw_line(axis, steps, values.mean(0), algorithm, look)
            if len(curves) >= MIN_RUNS and len(suite.algorithms) <= BANDS and len(steps):
                axis.fill_between(steps, *band(values), color=look["color"], alpha=0.15, linewidth=0)
        seeds = " or ".join(map(str, sorted({len(curves) for curves in found.values()})))
        axis.set(title=shown(f"{task}\nlag {lag}, {seeds} seeds"), xlabel=suite.step_name, ylabel=suite.score_name)
        steps_axis(axis)
        heights = [y for key, curves in cells.items() if key[0] == task for c in curves for y in c.values() if y == y]
        if heights:
            axis.set_ylim(limits(heights, 0.04))  # the same at all lags of a task

    panels = [(t, lag) for t in suite.tasks for lag in suite.lags if any(cell[:2] == (t, lag) for cell in cells)]
    return draw(path, panels, paint, 2 if len(suite.lags) in (2, 4) else 3)


def draw_lags(suite, views, path):
    """Score against lag, a panel per view."""

    def paint(axis, title, unit, view):
        statistic = iqm if unit == SCORE else mean
        for i, (algorithm, look) in enumerate(looks(suite).items()):
            offset, points = min(0.12, 0.6 / len(suite.algorithms)) * (i - (len(suite.algorithms) - 1) / 2), []
            for position, lag in enumerate(suite.lags):
                if (scores := view.get(lag, {}).get(algorithm)) is None:
                    continue
                if unit != SCORE:
                    dots = {"color": look["color"], "alpha": 0.35, "markersize": 5}
                    axis.plot([position + offset] * len(scores), scores, ".", **dots)
                enough = counts(scores).min() >= MIN_RUNS
                low, high = stratified_bootstrap(statistic, scores) if enough else (np.nan, np.nan)
                points.append((position + offset, statistic(scores), low, high))
            if points:
                x, y, low, high = np.array(points).T
                axis.plot(x, y, linewidth=2, markersize=6, label=shown(algorithm), **look)
                axis.vlines(x, low, high, color=look["color"], linewidth=1.6)
        axis.set(title=shown(title + ", IQM" * (unit == SCORE)), xlabel="lag, updates", ylabel=unit)
        axis.set_xticks(range(len(suite.lags)), map(str, suite.lags))
        axis.set_xlim(-0.6, len(suite.lags) - 0.4)

    return draw(path, views, paint)


def draw_pairs(suite, views, path):
    """Each pair of runs with one seed as a point, a panel per view and comparison."""

    def paint(axis, x, y, title, unit, view):
        drawn = []
        for i, (lag, scores) in enumerate(view.items()):
            if x in scores and y in scores and np.isfinite(scores[x] - scores[y]).any():
                look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": ""}
                points = np.stack([scores[y].ravel(), scores[x].ravel()])
                axis.plot(*points, alpha=0.75, markersize=5, label=f"lag {lag}", **look)
                drawn += [*points[:, np.isfinite(points.sum(axis=0))].flat]
        if drawn:
            ends = limits(drawn, 0.06)
            axis.plot(ends, ends, color="#777777", linewidth=1)
            axis.set(xlim=ends, ylim=ends)
        axis.locator_params(nbins=5)
        axis.set(title=shown(f"{title}\n{unit}"), xlabel=shown(y), ylabel=shown(x))

    return draw(path, [(x, y, *view) for view in views for x, y in suite.comparisons], paint)


def draw_profile(suite, views, path):
    """Share of runs above each score, a panel per view and lag, with pointwise intervals."""

    def paint(axis, unit, lag, view):
        known = np.concatenate([x.ravel() for scores in view.values() for x in scores.values()])
        thresholds = np.linspace(*limits(known[np.isfinite(known)], 0.03), 107)

        def profile(scores):
            return performance_profile(scores, thresholds)

        for algorithm, look in looks(suite).items():
            if (scores := view[lag].get(algorithm)) is None:
                continue
            draw_line(axis, thresholds, profile(scores), algorithm, look, drawstyle="steps-pre")
            if counts(scores).min() >= MIN_RUNS and len(suite.algorithms) <= BANDS:
                low, high = stratified_bootstrap(profile, scores, reps=REPS)
                axis.fill_between(thresholds, low, high, step="pre", color=look["color"], alpha=0.15, linewidth=0)
        axis.set(title=f"lag {lag}", xlabel=unit, ylabel="share of runs above")
        axis.set_ylim(-0.05, 1.05)

    return draw(path, [(unit, lag, view) for _, unit, view in views for lag in view], paint)


def draw_filter(suite, rows, path):
    """Forward total variation and share of filtered points over the training, means over tasks and seeds."""
    curves = {}
    for row in rows:
        for column, curve in row["metrics"].items():
            curves.setdefault((row["lag"], column, row["algorithm"]), []).append(curve)

    def paint(axis, lag, column):
        for algorithm, look in looks(suite).items():
            if members := curves.get((lag, column, algorithm)):
                steps, values = common(members)
                draw_line(axis, steps, values.mean(0), algorithm, look)
        axis.set(title=f"lag {lag}", xlabel=suite.step_name, ylabel=FILTER[column])
        steps_axis(axis)
        axis.set_ylim(bottom=0)

    lags = [lag for lag in suite.lags if any(key[0] == lag for key in curves)]
    return draw(path, [(lag, column) for lag in lags for column in FILTER], paint, columns=2)
