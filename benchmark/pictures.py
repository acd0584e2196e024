"""The pictures of a report, from rows of results.csv and the curves beside it.

Colours are Okabe and Ito's, told apart by colour-blind readers; line styles and markers tell them apart in grey print.
A picture of many panels is written as several files, NAME.png, NAME-2.png, ..., each of which fits on a sheet of A4.
Each draw_ returns the names of the files it has written, none where there is nothing to draw.
"""

import csv
import io
import math
import textwrap
from collections import defaultdict

import numpy as np

from benchmark.results import read_evals
from benchmark.runs import Refused, replace_file
from benchmark.scores import score_matrix
from benchmark.stats import MIN_RUNS, iqm, mean, performance_profile, stratified_bootstrap

# The last algorithm has the same colour in every picture.
LAST_COLOR, COLORS = "#D55E00", ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES, MARKERS = ("--", "-.", ":", (0, (6, 1, 1, 1, 1, 1))), "osD^vP<X>*"
WIDTH = 9  # inches; on A4 it shrinks to 7.3, and a text of 10 points to 8
ROWS = 4  # of panels in one file
REPS = 2000  # of the bands of curves; numbers in tables have 10,000
POINTS = 400  # of a curve of metrics
THIN = 4  # algorithms; the single seeds of more would be a tangle
BANDS = 6  # algorithms; the intervals of more would hide each other
LAGS = 6  # that have panels or marks of their own
FARTHEST = 10**15  # a step; floats still count one by one there


def looks(suite):
    """{algorithm: its colour, line style and marker}, no two alike up to 240"""
    found, styles = {}, len(COLORS) * len(STYLES)
    for index, name in enumerate(suite.algorithms):
        last = index > 0 and index == len(suite.algorithms) - 1
        color = LAST_COLOR if last else COLORS[index % len(COLORS)]
        style = "-" if last else STYLES[(index // len(COLORS) + index) % len(STYLES)]
        marker = MARKERS[(index + 7 * (index // styles)) % len(MARKERS)]  # after 24 indices one further, not 4
        found[name] = {"color": color, "linestyle": style, "marker": marker}
    return found


def shown(text, inches):
    """A text as it is drawn: broken into lines of that length, and a $ begins no formula."""
    return textwrap.fill(text, int(10 * inches)).replace("$", r"\$")


def some_lags(suite):
    """(at most LAGS lags, evenly chosen, notes that say so)"""
    lags = suite.lags
    if len(lags) <= LAGS:
        return lags, []
    chosen = [lags[i] for i in np.linspace(0, len(lags) - 1, LAGS).round().astype(int)]
    return chosen, [f"{LAGS} of {len(lags)} lags."]


def pages(panels, path, columns=None):
    """Figures of a sheet each: (figure, [(axis, panel)], path), with light grids."""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps every figure

    columns = columns or (2 if len(panels) == 4 else max(1, min(3, len(panels))))
    for page, start in enumerate(range(0, len(panels), ROWS * columns), start=1):
        chosen = panels[start : start + ROWS * columns]
        rows = -(-len(chosen) // columns)
        size = WIDTH if columns > 1 else 6.5, rows * (3.3 if rows < 3 else 2.5)
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes:
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[len(chosen) :]:
            axis.set_visible(False)
        file = path if page == 1 else path.with_stem(f"{path.stem}-{page}")
        yield figure, list(zip(axes, chosen, strict=False)), file


def words(axis, title, x, y):
    """Title and labels of a panel, in lines that fit it."""
    figure = axis.get_figure()
    rows, columns = axis.get_gridspec().get_geometry()
    width, height = figure.get_figwidth() / columns, figure.get_figheight() / rows
    axis.set_title(shown(title, width - 0.15), fontsize=10)
    axis.set_xlabel(shown(x, width - 0.6))
    axis.set_ylabel(shown(y, height - 0.6))


def save(figure, path, suite=None, handles=None, notes=()):
    """Write the figure with one legend above the panels, and notes below; returns the name of the file.

    handles: {label: handle}, else the suite's algorithms.
    """
    if handles is None:
        lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
        handles = {name: lines[name] for name in suite.algorithms if name in lines}
    width, height = figure.get_size_inches()
    if handles:
        labels = [shown(name, width - 1) for name in handles]
        longest = max(len(line) for label in labels for line in label.splitlines())
        columns = max(1, min(len(handles), int(width / (0.9 + 0.09 * longest))))
        style = {"loc": "outside upper left", "ncols": columns, "frameon": False, "handlelength": 3}
        figure.legend(handles.values(), labels, **style)
        height += 0.21 * -(-sum(label.count("\n") + 1 for label in labels) // columns)
    if notes:
        text = shown(" ".join(notes), width)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color="#444444")
        height += 0.2 * (text.count("\n") + 1)
    figure.set_size_inches(width, height)
    picture = io.BytesIO()
    # no date and no version in the file: the same runs give the same bytes
    figure.savefig(picture, format="png", dpi=150, metadata={"Software": None})
    replace_file(path, picture.getvalue())
    return path.name


def steps_axis(axis):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 300k, 1M
    axis.xaxis.set_major_locator(MaxNLocator(5))


def draw_line(axis, x, y, name, look, **more):
    axis.plot(x, y, linewidth=2, markersize=5, markevery=max(1, len(x) // 6), label=name, **look, **more)


def empty(axis, text):
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="#555555")


def limits(values, margin):
    """(low, high) that leave a margin around the values, also where they are all the same"""
    low, high = min(values), max(values)
    margin *= high - low or abs(high) or 1.0
    return low - margin, high + margin


def grouped(rows):
    """{(task, lag, algorithm): [row]} of what is finished"""
    groups = defaultdict(list)
    for row in rows:
        if row["status"] == "finished":
            groups[row["task"], row["lag"], row["algorithm"]].append(row)
    return groups


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
    curves = {key: [read_curve(row) for row in members] for key, members in grouped(rows).items()}
    curves = {key: [curve for curve in members if curve] for key, members in curves.items()}
    if not any(curves.values()):
        return []
    found, files, (lags, notes) = looks(suite), [], some_lags(suite)
    if any(set(curve) != set(members[0]) for members in curves.values() for curve in members):
        notes.append("A mean spans the steps that all of its seeds reach; between evaluations it is interpolated.")
    if not all(np.isfinite(list(curve.values())).all() for members in curves.values() for curve in members):
        notes.append("Gaps: a score that is no finite number.")
    if len(found) > BANDS:
        notes.append(f"No intervals: more than {BANDS} algorithms.")
    panels = [(task, lag) for task in suite.tasks for lag in lags]
    columns = 2 if len(lags) in (2, 4) else None
    for figure, page, file in pages(panels, path, columns):
        for axis, (task, lag) in page:
            counts = [len(curves.get((task, lag, algorithm), ())) for algorithm in found]
            for algorithm, look in found.items():
                if members := curves.get((task, lag, algorithm)):
                    draw_seeds(axis, members, algorithm, look, len(found))
            seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
            title = f"{task}, lag {lag} ({seeds}\N{NO-BREAK SPACE}seed{'s' if max(counts) != 1 else ''})"
            words(axis, title, suite.step_name, suite.score_name)
            steps_axis(axis)
            if not any(counts):
                empty(axis, "no evaluation curves")
            heights = [y for key, m in curves.items() if key[0] == task for c in m for y in c.values() if y == y]
            if heights:
                axis.set_ylim(limits(heights, 0.04))  # the same at all lags of a task
        files.append(save(figure, file, suite, notes=notes))
    return files


def draw_seeds(axis, curves, algorithm, look, algorithms):
    """The curves of one algorithm, one per seed, their mean and its interval."""
    if algorithms <= THIN:
        x, y = zip(*[point for c in curves for point in (*c.items(), (np.nan, np.nan))], strict=True)
        axis.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.4)
    steps, values = common(curves)
    draw_line(axis, steps, values.mean(0), algorithm, look)
    if len(curves) >= MIN_RUNS and algorithms <= BANDS and len(steps):
        axis.fill_between(steps, *band(values), color=look["color"], alpha=0.15, linewidth=0)


def read_curve(row):
    """{step: score} of a run, NaN where the score is no finite number."""
    path = row["folder"] / "evals.csv"
    try:
        curve = read_evals(path)
        check_steps(curve)
    except (OSError, OverflowError, ValueError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error!r}") from None
    return {step: score if math.isfinite(score) else math.nan for step, score in curve.items()}


def check_steps(steps):
    if max(map(abs, steps), default=0) > FARTHEST:
        raise ValueError(f"a step beyond {FARTHEST:.0e}")


def draw_lags(suite, rows, tasks, path):
    """Score against lag: a panel of all `tasks` that have scores, if several, and one per task."""
    found, files = looks(suite), []
    panels = [("all tasks, IQM", tasks, "score", iqm)] if len(tasks) > 1 else []
    panels += [(task, (task,), "eval_return", mean) for task in suite.tasks]
    ticks = range(0, len(suite.lags), -(-len(suite.lags) // 8))
    for figure, page, file in pages(panels, path):
        for axis, (title, chosen, key, statistic) in page:
            for index, (algorithm, look) in enumerate(found.items()):
                offset = min(0.12, 0.6 / len(found)) * (index - (len(found) - 1) / 2)
                points = []
                for position, lag in enumerate(suite.lags):
                    scores, seeds = score_matrix(rows, algorithm, lag, chosen, key)
                    if not seeds:
                        continue
                    each = scores.mean(axis=1)
                    axis.plot([position + offset] * len(each), each, ".", color=look["color"], alpha=0.35, markersize=5)
                    low, high = stratified_bootstrap(scores, statistic) if len(seeds) >= MIN_RUNS else (np.nan, np.nan)
                    points.append((position + offset, statistic(scores), low, high))
                if points:
                    x, y, low, high = np.array(points).T
                    axis.plot(x, y, linewidth=2, markersize=6, label=algorithm, **look)
                    axis.vlines(x, low, high, color=look["color"], linewidth=1.6)
            words(axis, title, "lag, updates", suite.score_name if key == "eval_return" else "normalised score")
            axis.set_xticks(ticks, [str(suite.lags[tick]) for tick in ticks])
            axis.set_xlim(-0.6, len(suite.lags) - 0.4)
            if not axis.lines:
                empty(axis, "no finished runs")
        files.append(save(figure, file, suite, notes=["Lag: largest age of the policy that acts."]))
    return files


def draw_pairs(suite, rows, tasks, path):
    """Each pair of runs with one seed as a point: above the diagonal the first algorithm is better."""
    from matplotlib.lines import Line2D

    groups = {(*key, row["seed"]): row for key, found in grouped(rows).items() for row in found}
    if len(tasks) > 1:
        panels = [(x, y, tasks, "score", f"{len(tasks)} tasks") for x, y in suite.comparisons]
    else:
        panels = [(x, y, (task,), "eval_return", task) for task in suite.tasks for x, y in suite.comparisons]
    files, (lags, notes) = [], some_lags(suite)
    marks = {lag: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, lag in enumerate(lags)}
    dots = {f"lag {lag}": Line2D([], [], color=c, marker=m, linestyle="") for lag, (c, m) in marks.items()}
    for figure, page, file in pages(panels, path):
        for axis, (x, y, chosen, key, title) in page:
            drawn = []
            for lag, (color, marker) in marks.items():
                keys = [(task, seed) for task in chosen for seed in suite.seeds]
                pairs = [(groups.get((t, lag, y, s)), groups.get((t, lag, x, s))) for t, s in keys]
                points = [(a[key], b[key]) for a, b in pairs if a and b and None not in (a[key], b[key])]
                if points:
                    axis.plot(*zip(*points, strict=True), marker, color=color, alpha=0.75, markersize=6)
                    drawn += [value for point in points for value in point]
            if drawn:
                ends = limits(drawn, 0.06)
                axis.plot(ends, ends, color="#777777", linewidth=1)
                axis.set(xlim=ends, ylim=ends, box_aspect=1)
            else:
                empty(axis, "no seed has both")
            axis.locator_params(nbins=5)
            name = suite.score_name if key == "eval_return" else "normalised score"
            words(axis, title, f"{y}: {name}", f"{x}: {name}")
        files.append(save(figure, file, handles=dots, notes=notes))
    return files


def draw_profile(suite, rows, tasks, key, path):
    """Share of runs above each score, a panel per lag, with pointwise intervals."""
    known = [r[key] for r in rows if r["task"] in tasks and r[key] is not None]
    if not known:
        return []
    found, files, (lags, notes) = looks(suite), [], some_lags(suite)
    if len(found) > BANDS:
        notes.append(f"No intervals: more than {BANDS} algorithms.")
    thresholds = np.linspace(*limits(known, 0.03), 107)
    for figure, page, file in pages(lags, path):
        for axis, lag in page:
            for algorithm, look in found.items():
                scores, seeds = score_matrix(rows, algorithm, lag, tasks, key)
                if not seeds:
                    continue
                shares = performance_profile(scores, thresholds)
                draw_line(axis, thresholds, shares, algorithm, look, drawstyle="steps-pre")
                if len(seeds) >= MIN_RUNS and len(found) <= BANDS:
                    low, high = stratified_bootstrap(
                        scores, lambda x: performance_profile(x, thresholds), REPS, batched=True
                    )
                    axis.fill_between(thresholds, low, high, step="pre", color=look["color"], alpha=0.15, linewidth=0)
            score = "normalised score" if key == "score" else suite.score_name
            words(axis, f"lag {lag}", score, "share of runs above")
            axis.set_ylim(-0.05, 1.05)
            if not axis.lines:
                empty(axis, "no finished runs")
        files.append(save(figure, file, suite, notes=notes))
    return files


def draw_filter(suite, rows, path):
    """Forward total variation and share of filtered points over the training, means over tasks and seeds."""
    columns = {"lag/tv_forward_mean": "forward TV, pi_theta and pi_T", "lag/filtered_fraction": "filtered share"}
    curves = defaultdict(list)  # {(lag, algorithm): [{step: {column: value}}]}
    for (_, lag, algorithm), members in grouped(rows).items():
        found = [read_metrics(row["folder"] / "metrics.csv", columns) for row in members]
        curves[lag, algorithm] += [curve for curve in found if curve]
    if not any(curves.values()):
        return []
    files, (lags, notes) = [], some_lags(suite)
    panels = [(lag, column) for lag in lags for column in columns]
    for figure, page, file in pages(panels, path, columns=2):
        for axis, (lag, column) in page:
            for algorithm, look in looks(suite).items():
                if members := curves[lag, algorithm]:
                    steps, values = common([{step: x[column] for step, x in curve.items()} for curve in members])
                    draw_line(axis, steps, values.mean(0), algorithm, look)
            words(axis, f"lag {lag}", suite.step_name, columns[column])
            steps_axis(axis)
            axis.set_ylim(bottom=0)
        files.append(save(figure, file, suite, notes=notes))
    return files


def read_metrics(path, columns):
    """{step: {column: value}} of about POINTS rows of metrics.csv; empty where it has not all of the columns."""
    if not path.exists():
        return {}
    try:
        lines = path.read_text().splitlines()
        header = next(csv.reader(lines[:1]), [])
        if not set(columns) <= set(header):
            return {}
        places = {column: header.index(column) for column in columns}
        chosen = csv.reader(lines[1 :: max(1, len(lines) // POINTS)])
        curve = {int(float(line[0])): {name: float(line[i] or "nan") for name, i in places.items()} for line in chosen}
        check_steps(curve)
    except (OSError, OverflowError, ValueError, IndexError, csv.Error) as error:
        raise Refused(f"{path} cannot be read: {error!r}") from None
    return curve
