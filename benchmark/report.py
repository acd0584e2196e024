"""The report of a folder of runs: tables seed by seed, results.csv (one row per run) and a picture of the curves."""

import csv
import json
import math
import shlex
from collections import Counter

import numpy as np

from benchmark.runs import Refused, expand, final_step, flag_list, read_json, recall_suite, status
from benchmark.stats import area_under_curve, paired_difference

PACKAGES = ("python", "torch", "gymnasium", "mujoco", "numpy")
COLUMNS = ("suite", "task", "algorithm", "script", "lag", "seed", "final_step", "status", "train_return")
COLUMNS += ("eval_return", "eval_std", "area_under_curve", "sps", "commit", *PACKAGES, "machine", "command")
# Okabe and Ito's colours, told apart by colour-blind readers. The last algorithm has the same one in every picture.
LAST_COLOR, COLORS = "#D55E00", ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def write_report(out):
    """Write report.md, results.csv and curves.png into the folder `out` (a Path); returns what to print."""
    name, suite = recall_suite(out)
    rows = [read_run(name, run) for run in expand(suite, out)]
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    draw_curves(suite, rows, out / "curves.png")
    results = [table(suite, rows, task, lag) for task, lag in panels(suite)]
    warnings = missing(rows) + mixed(rows)
    parts = [f"# {name}: {suite.description}", header(name, suite, rows, out), *warnings, *results, "![](curves.png)"]
    (out / "report.md").write_text("\n\n".join(parts) + "\n")
    return "\n\n".join([*results, *warnings, f"written: {out}/report.md, {out}/results.csv, {out}/curves.png"])


def read_run(suite_name, run):
    """A run as a dict: COLUMNS, "args", "machine", "evals". None where there is nothing, or no finite number."""
    try:
        return parse_run(suite_name, run)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, csv.Error) as error:
        raise Refused(f"{run.folder} cannot be read: {error!r}") from None


def parse_run(suite_name, run):
    row = dict.fromkeys((*COLUMNS, "args")) | {"suite": suite_name, "status": status(run), "evals": []}
    row |= {key: getattr(run, key) for key in ("task", "algorithm", "script", "lag", "seed")}
    row["command"] = " ".join(["python", run.script, *flag_list(run.flags)])
    if row["status"] != "finished":
        return row
    config, result = read_json(run.folder / "config.json"), read_json(run.folder / "result.json")
    row |= {key: finite(result.get(key)) for key in ("train_return", "eval_return", "eval_std", "sps")}
    row |= {key: config.get(key) for key in ("args", "commit")} | {"machine": describe(config.get("machine"))}
    row |= {key: config.get("versions", {}).get(key) for key in PACKAGES}
    row["final_step"] = final_step(row["args"])
    row["evals"] = read_evals(run.folder / "evals.csv")
    steps, returns = [step for step, _ in row["evals"]], [value for _, value in row["evals"]]
    if len(steps) > 1 and np.isfinite(returns).all():
        row["area_under_curve"] = area_under_curve(steps, returns)
    return row


def finite(value):
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def read_evals(path):
    """[(step, score)], the first two columns; NaN where the file has no number; empty without evaluations."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [(int(step), float(score or "nan")) for step, score, *_ in list(csv.reader(file))[1:]]


def panels(suite):
    return [(task, lag) for task in suite.tasks for lag in suite.lags]


def table(suite, rows, task, lag):
    """Final scores seed by seed, and beneath them the last algorithm compared with each other one."""

    def number(value, sign="-"):
        return "" if value is None else f"{value:{sign}.{suite.decimals}f}"

    *others, last = suite.algorithms
    cells = {(r["algorithm"], r["seed"]): r for r in rows if (r["task"], r["lag"]) == (task, lag)}
    values = {a: {seed: cells[a, seed]["eval_return"] for seed in suite.seeds} for a in suite.algorithms}
    pairs = {o: [seed for seed in suite.seeds if None not in (values[last][seed], values[o][seed])] for o in others}

    lines = [["seed", *suite.algorithms, *(f"{last} - {other}" for other in others)]]
    for seed in suite.seeds:
        line = [str(seed)]
        for algorithm in suite.algorithms:
            state = cells[algorithm, seed]["status"]
            line.append(number(values[algorithm][seed]) or ("no evaluation" if state == "finished" else state))
        line += [number(values[last][seed] - values[o][seed], "+") if seed in pairs[o] else "" for o in others]
        lines.append(line)
    known = [[value for value in values[a].values() if value is not None] for a in suite.algorithms]
    lines.append(["mean", *(number(np.mean(k)) if k else "" for k in known)])
    sentences = []
    for other in others:
        x, y = ([values[a][seed] for seed in pairs[other]] for a in (last, other))
        lines[-1].append(number(np.mean(x) - np.mean(y), "+") if x else "")
        sentences.append(f"{last} - {other}: {comparison(x, y, len(suite.seeds), number)}")
    title = f"## {task}, lag {lag}: {suite.score_name} at the end"
    return "\n\n".join([title, markdown(lines), *sentences])


def comparison(x, y, seeds, number):
    """paired_difference of x and y in words; seeds is how many pairs there would be if no run were missing."""
    if not x:
        return "no seed has both."
    mean, low, high, wins = paired_difference(x, y)
    interval = "no interval from fewer than 3 seeds"
    if low is not None:
        interval = f"95 % bootstrap interval {number(low, '+')} to {number(high, '+')}"
    left_out = f" ({seeds - len(x)} of {seeds} seeds left out)" if len(x) < seeds else ""
    return f"mean difference {number(mean, '+')}, {interval}, higher on {wins} of {len(x)} seeds{left_out}."


def markdown(lines):
    """A Markdown table of rows of text, padded so that it also reads well on a terminal."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines = [lines[0], ["-" * (width - 1) + ":" for width in widths], *lines[1:]]
    return "\n".join(f"| {' | '.join(c.rjust(w) for c, w in zip(line, widths, strict=True))} |" for line in lines)


def missing(rows):
    """A warning that lists the runs which are not in the tables."""
    lines = [
        f"- {r['algorithm']}, {r['task']}, lag {r['lag']}, seed {r['seed']}: {r['status']}"
        for r in rows
        if r["status"] != "finished"
    ]
    return (
        [f"**Incomplete: {len(lines)} of {len(rows)} runs are not finished**\n\n" + "\n".join(lines)] if lines else []
    )


def origins(rows):
    """{"commit": Counter({value: runs}), ...} of the finished runs: what should be the same for all."""
    keys = ("commit", *PACKAGES, "machine")
    return {key: Counter(describe(r[key]) for r in rows if r["status"] == "finished") for key in keys}


def mixed(rows):
    """Warnings where finished runs differ in more than the suite says: a difference may then come from that."""
    warnings = []
    for key, counts in origins(rows).items():
        if len(counts) > 1:
            found = "; ".join(f"{value} ({count} runs)" for value, count in counts.items())
            warnings.append(f"**Mixed {key}, so the runs are not strictly comparable:** {found}")
    for algorithm in {r["algorithm"]: None for r in rows}:
        # Flags the suite leaves out have the defaults of the script, and those may have changed between two runs.
        args = [r["args"] for r in rows if r["algorithm"] == algorithm and r["args"]]
        keys = {key for a in args for key in a} - {"env_id", "task", "lag", "seed", "run_dir"}
        differing = sorted(key for key in keys if len({describe(a.get(key)) for a in args}) > 1)
        if differing:
            warnings.append(
                f"**Mixed settings of {algorithm}, so its runs are not comparable:** {', '.join(differing)}"
            )
    return warnings


def header(name, suite, rows, out):
    """What is needed to obtain the same numbers, as a list."""
    finished = sum(r["status"] == "finished" for r in rows)
    lines = [f"command: `python -m benchmark run {name} --out {shlex.quote(str(out))}`"]
    lines.append(f"runs: {finished} of {len(rows)} finished, seeds {', '.join(map(str, suite.seeds))}")
    lines.append(f"settings: `{' '.join(flag_list(suite.settings))}`")
    for algorithm, (script, extra) in suite.algorithms.items():
        lines.append(f"{algorithm}: `{' '.join([script, *flag_list(extra)])}`")
    lines += [f"{key}: {' and '.join(counts) or 'unknown'}" for key, counts in origins(rows).items()]
    lines.append("values: of the policy that was being trained, not of the older ones that acted")
    lines.append("interval: percentile bootstrap over seeds of the paired difference, 10,000 resamples")
    return "\n".join(f"- {line}" for line in lines)


def describe(value):
    """A value of config.json as one line: the machine may be a dict, a commit null."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "unknown" if value is None else value if isinstance(value, str) else json.dumps(value)


def draw_curves(suite, rows, path):
    """Evaluation curves, a row of panels per task and a panel per lag: thick the mean, thin the single seeds."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator

    shape = len(suite.tasks), len(suite.lags)
    size = 4.6 * shape[1] + 0.6, 3.6 * shape[0] + 0.5
    figure, axes = plt.subplots(*shape, figsize=size, sharey="row", squeeze=False, layout="constrained")
    for axis, (task, lag) in zip(axes.flat, panels(suite), strict=True):
        counts = []
        for index, algorithm in enumerate(suite.algorithms):
            cell = (task, lag, algorithm)
            curves = [dict(r["evals"]) for r in rows if (r["task"], r["lag"], r["algorithm"]) == cell and r["evals"]]
            counts.append(len(curves))
            last = index > 0 and index == len(suite.algorithms) - 1
            color = LAST_COLOR if last else COLORS[index % len(COLORS)]
            style = "-" if last else ("--", "-.", ":")[index % 3]  # told apart in grey print too
            for curve in curves:
                axis.plot(curve.keys(), curve.values(), color=color, linewidth=0.8, alpha=0.45)
            if curves:
                steps = sorted(set.intersection(*map(set, curves)))  # the mean of all seeds, or none
                mean = [np.mean([curve[step] for curve in curves]) for step in steps]
                axis.plot(steps, mean, color=color, linestyle=style, linewidth=2.6, label=algorithm)
        seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
        axis.set_title(f"{task}, lag {lag} ({seeds} seed{'s' if max(counts) != 1 else ''})")
        axis.set_xlabel(suite.step_name)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 300k, 1M
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if any(counts):
            axis.legend(frameon=False, handlelength=3)
        else:
            axis.text(0.5, 0.5, "no evaluation", ha="center", transform=axis.transAxes)
    for axis in axes[:, 0]:
        axis.set_ylabel(suite.score_name)
    figure.savefig(path, dpi=150)
    plt.close(figure)
