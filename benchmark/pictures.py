"""The pictures of a report, from rows of results.csv and the curves beside it.

Colours are Okabe and Ito's, told apart by colour-blind readers; line styles and markers tell them apart in grey print.
"""

import csv
from collections import defaultdict

import numpy as np

from benchmark.results import read_evals
from benchmark.runs import Refused
from benchmark.scores import score_matrix
from benchmark.stats import MIN_RUNS, iqm, mean, performance_profile, stratified_bootstrap

# The last algorithm has the same colour in every picture.
LAST_COLOR, COLORS = "#D55E00", ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES, MARKERS = ("--", "-.", ":", (0, (6, 1, 1, 1, 1, 1))), "osD^vP<X>*"
REPS = 2000  # of the bands of curves; numbers in tables have 10,000
POINTS = 400  # of a curve of metrics
THIN = 4  # algorithms; the single seeds of more would be a tangle


def looks(suite):
    """{algorithm: its colour, line style and marker}"""
    found = {}
    for index, name in enumerate(suite.algorithms):
        last = index > 0 and index == len(suite.algorithms) - 1
        color = LAST_COLOR if last else COLORS[index % len(COLORS)]
        style = "-" if last else STYLES[(index // len(COLORS) + index) % len(STYLES)]
        found[name] = {"color": color, "linestyle": style, "marker": MARKERS[index % len(MARKERS)]}
    return found


def new_figure(rows, columns, width=4.3, height=3.4, **more):
    """(figure, axes (rows, columns), with light grids and room for a legend above)"""
    from matplotlib.figure import Figure  # not pyplot, which needs a display and keeps every figure

    size = max(width * columns + 0.6, 6.5), height * rows + 0.8
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, path, suite=None, handles=None):
    """Write the figure with one legend above the panels: `handles` {label: handle}, else the suite's algorithms."""
    if handles is None:
        lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
        handles = {name: lines[name] for name in suite.algorithms if name in lines}
    if handles:
        columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.9 + 0.09 * max(map(len, handles))))))
        style = {"loc": "outside upper left", "ncols": columns, "frameon": False, "handlelength": 3}
        figure.legend(handles.values(), handles.keys(), **style)
    partial = path.with_name(f".{path.name}")
    try:
        # no date and no version in the file: the same runs give the same bytes
        figure.savefig(partial, format="png", dpi=150 if len(figure.axes) <= 12 else 90, metadata={"Software": None})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def steps_axis(axis, label):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_xlabel(label)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 300k, 1M
    axis.xaxis.set_major_locator(MaxNLocator(5))


def empty(axis, text):
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="#555555")


def grouped(rows):
    """{(task, lag, algorithm): [row]} of what is finished"""
    groups = defaultdict(list)
    for row in rows:
        if row["status"] == "finished":
            groups[row["task"], row["lag"], row["algorithm"]].append(row)
    return groups


def common(curves):
    """Curves {step: value} of several seeds -> (steps (n,) that all have, values (seeds, n))"""
    steps = sorted(set.intersection(*map(set, curves)))
    return np.array(steps), np.array([[curve[step] for step in steps] for curve in curves])


def band(values):
    """95 % bootstrap interval of the mean over seeds at each step: (seeds, n) -> (low, high), each (n,)"""
    indices = np.random.default_rng(0).integers(len(values), size=(REPS, len(values)))
    weights = np.stack([(indices == i).mean(1) for i in range(len(values))], axis=1)  # (REPS, seeds)
    return np.percentile(weights @ values, [2.5, 97.5], axis=0)


def draw_curves(suite, rows, path):
    """Evaluation curves, a row of panels per task and a panel per lag. False without any."""
    groups, found, any_curve = grouped(rows), looks(suite), False
    if len(suite.lags) > 1:
        figure, axes = new_figure(len(suite.tasks), len(suite.lags), height=3.0, sharey="row", sharex=True)
    else:  # side by side
        figure, axes = new_figure(1, len(suite.tasks))
        axes = axes.T
    for i, task in enumerate(suite.tasks):
        for j, lag in enumerate(suite.lags):
            axis, counts = axes[i, j], []
            for algorithm, look in found.items():
                curves = [read_curve(row) for row in groups[task, lag, algorithm]]
                curves = [curve for curve in curves if curve]
                counts.append(len(curves))
                if not curves:
                    continue
                any_curve = True
                line = {"color": look["color"], "linestyle": look["linestyle"]}
                if len(found) <= THIN:
                    x, y = zip(*[point for c in curves for point in (*c.items(), (np.nan, np.nan))], strict=True)
                    axis.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.4)
                steps, values = common(curves)
                axis.plot(steps, values.mean(0), linewidth=2.4, label=algorithm, **line)
                if len(curves) >= MIN_RUNS and np.isfinite(values).all():
                    axis.fill_between(steps, *band(values), color=look["color"], alpha=0.15, linewidth=0)
            seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
            axis.set_title(f"{task}, lag {lag} ({seeds} seed{'s' if max(counts) != 1 else ''})", fontsize=10)
            steps_axis(axis, suite.step_name if axis in axes[-1] or len(suite.lags) == 1 else "")
            if not any(counts):
                empty(axis, "no evaluation curves")
        axes[i, 0].set_ylabel(suite.score_name)
    if any_curve:
        save(figure, path, suite)
    return any_curve


def read_curve(row):
    try:
        return read_evals(row["folder"] / "evals.csv")
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise Refused(f"{row['folder']} cannot be read: {error!r}") from None


def draw_lags(suite, rows, tasks, path):
    """Score against lag: a panel of all `tasks` that have scores, if several, and one per task."""
    found = looks(suite)
    panels = [("all tasks", tasks, "score", iqm)] if len(tasks) > 1 else []
    panels += [(task, (task,), "eval_return", mean) for task in suite.tasks]
    columns = min(4, len(panels))
    figure, axes = new_figure(-(-len(panels) // columns), columns, width=3.9)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, chosen, key, statistic) in zip(axes.flat, panels, strict=False):
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
        axis.set_title(title if key == "eval_return" else f"{title}, IQM", fontsize=10)
        axis.set_xticks(range(len(suite.lags)), [str(lag) for lag in suite.lags])
        axis.set_xlim(-0.6, len(suite.lags) - 0.4)
        axis.set_xlabel("lag: largest age of the acting policy, updates")
        axis.set_ylabel(suite.score_name if key == "eval_return" else "normalised score")
        if not axis.lines:
            empty(axis, "no finished runs")
    save(figure, path, suite)


def draw_pairs(suite, rows, tasks, path):
    """Each pair of runs with one seed as a point: above the diagonal the first algorithm is better."""
    from matplotlib.lines import Line2D

    groups = {(*key, row["seed"]): row for key, found in grouped(rows).items() for row in found}
    if len(tasks) > 1:
        panels = [(x, y, tasks, "score", f"{len(tasks)} tasks") for x, y in suite.comparisons]
    else:
        panels = [(x, y, (task,), "eval_return", task) for task in suite.tasks for x, y in suite.comparisons]
    if not panels:
        return False
    columns = min(4, len(panels))
    figure, axes = new_figure(-(-len(panels) // columns), columns, width=3.8, height=3.6)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    marks = {lag: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, lag in enumerate(suite.lags)}
    for axis, (x, y, chosen, key, title) in zip(axes.flat, panels, strict=False):
        drawn = []
        for lag, (color, marker) in marks.items():
            keys = [(task, seed) for task in chosen for seed in suite.seeds]
            pairs = [(groups.get((t, lag, y, s)), groups.get((t, lag, x, s))) for t, s in keys]
            points = [(a[key], b[key]) for a, b in pairs if a and b and None not in (a[key], b[key])]
            if points:
                axis.plot(*zip(*points, strict=True), marker, color=color, alpha=0.75, markersize=6)
                drawn += [value for point in points for value in point]
        if drawn:
            margin = 0.06 * (max(drawn) - min(drawn)) or 1.0
            limits = min(drawn) - margin, max(drawn) + margin
            axis.plot(limits, limits, color="#777777", linewidth=1)
            axis.set(xlim=limits, ylim=limits)
        else:
            empty(axis, "no seed has both")
        name = suite.score_name if key == "eval_return" else "normalised score"
        axis.set_xlabel(f"{y}: {name}")
        axis.set_ylabel(f"{x}: {name}")
        axis.set_title(title, fontsize=10)
    dots = {f"lag {lag}": Line2D([], [], color=c, marker=m, linestyle="") for lag, (c, m) in marks.items()}
    save(figure, path, handles=dots)
    return True


def draw_profile(suite, rows, tasks, key, path):
    """Share of runs above each score, a panel per lag, with pointwise intervals."""
    found = looks(suite)
    known = [r[key] for r in rows if r["task"] in tasks and r[key] is not None]
    if not known:
        return False
    margin = 0.03 * (max(known) - min(known)) or 1.0
    thresholds = np.linspace(min(known) - margin, max(known) + margin, 107)
    figure, axes = new_figure(1, len(suite.lags), width=3.9, sharey=True)
    for axis, lag in zip(axes.flat, suite.lags, strict=True):
        for algorithm, look in found.items():
            scores, seeds = score_matrix(rows, algorithm, lag, tasks, key)
            if not seeds:
                continue
            line = {"color": look["color"], "linestyle": look["linestyle"]}
            axis.step(thresholds, performance_profile(scores, thresholds), linewidth=2, label=algorithm, **line)
            if len(seeds) >= MIN_RUNS:
                low, high = stratified_bootstrap(
                    scores, lambda x: performance_profile(x, thresholds), REPS, batched=True
                )
                axis.fill_between(thresholds, low, high, step="pre", color=look["color"], alpha=0.15, linewidth=0)
        axis.set_title(f"lag {lag}", fontsize=10)
        axis.set_xlabel("normalised score" if key == "score" else suite.score_name)
        if not axis.lines:
            empty(axis, "no finished runs")
    axes[0, 0].set_ylabel("share of runs above")
    save(figure, path, suite)
    return True


def draw_filter(suite, rows, path):
    """Forward total variation and share of filtered points over the training, means over tasks and seeds."""
    groups, found, any_curve = grouped(rows), looks(suite), False
    columns = {"lag/tv_forward_mean": "forward TV, pi_theta and pi_T", "lag/filtered_fraction": "filtered share"}
    figure, axes = new_figure(2, len(suite.lags), height=2.9, sharey="row", sharex="col")
    for axis, lag in zip(axes.T, suite.lags, strict=True):
        axis[0].set_title(f"lag {lag}", fontsize=10)
        for algorithm, look in found.items():
            members = [row for task in suite.tasks for row in groups[task, lag, algorithm]]
            curves = [curve for row in members if (curve := read_metrics(row["folder"] / "metrics.csv", columns))]
            if not curves:
                continue
            any_curve = True
            line = {"color": look["color"], "linestyle": look["linestyle"]}
            for panel, column in zip(axis, columns, strict=True):
                steps, values = common([{step: x[column] for step, x in curve.items()} for curve in curves])
                panel.plot(steps, values.mean(0), linewidth=1.8, label=algorithm, **line)
        steps_axis(axis[1], suite.step_name)
    for panel, label in zip(axes[:, 0], columns.values(), strict=True):
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    if any_curve:
        save(figure, path, suite)
    return any_curve


def read_metrics(path, columns):
    """{step: {column: value}} of about POINTS rows of metrics.csv; empty where it has not all of the columns."""
    try:
        lines = path.read_text().splitlines()
        header = next(csv.reader(lines[:1]))
        places = {column: header.index(column) for column in columns}
        chosen = csv.reader(lines[1 :: max(1, len(lines) // POINTS)])
        return {int(float(line[0])): {name: float(line[i]) for name, i in places.items()} for line in chosen}
    except (OSError, StopIteration, ValueError, IndexError, csv.Error):
        return {}
