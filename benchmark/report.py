"""The report of a folder of runs: report.html, report.md, results.csv and the pictures; and two folders compared.
Functions return Markdown. Statistics over several tasks are of scores, what is of one task is raw.
"""

import base64
import html
import re
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from benchmark import pictures, stats
from benchmark.results import COLUMNS, PACKAGES, PATH, aligned, by_cell, key_of, load, same_steps, spell_key
from benchmark.runs import Refused, csv_text, replace_file

PRINTED = 4  # tables of single seeds that are printed, not only written
LISTED = 20  # runs that are named one by one
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1.5rem; }
p, li { max-width: 52rem; } img { max-width: 100%; } code { overflow-wrap: anywhere; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left !important; } .toc li { display: inline; margin-right: 1.2rem; }
blockquote { border-left: 5px solid #D55E00; margin: 1rem 0; padding: .1rem 1rem; background: #fff6ef; }
"""


def write_report(out: Positional[Path]):
    """Write report.html, report.md, results.csv and pictures of the finished runs, or of any results.csv."""
    name, suite, rows = load(out)
    if ours := (out / "suite.json").exists():
        replace_file(out / "results.csv", csv_text(COLUMNS, rows))
    scores = {lag: aligned(suite, rows, lag) for lag in suite.lags}
    finals = by_cell(suite, rows, "eval_return")
    ended = {(row["task"], row["lag"]) for row in rows if row["status"] == "finished"}
    panels = [(task, lag) for task in suite.tasks for lag in suite.lags if (task, lag) in ended]
    overall = [part for lag in suite.lags for part in aggregates(suite, lag, *scores[lag])]
    single = [part for panel in panels for part in seed_table(suite, rows, finals, *panel)]
    each, warnings = per_task(suite, finals), missing(rows) + mixed(rows)
    lags, others = draw(suite, rows, finals, scores, out)
    title = f"# {literal(f'{name} {suite.options}' if suite.options else f'{name}: {suite.description}')}"
    parts = [title, summary(suite, rows), *warnings, "## Result", *lags, headline(overall), *overall, *each]
    parts += [*others, "## Seed by seed", *single]
    parts += ["## How it was measured", provenance(name, suite, rows, out if ours else None)]
    text = "\n\n".join(parts) + "\n"
    replace_file(out / "report.md", text)
    replace_file(out / "report.html", to_html(text, out))
    printed = [*single, *each[2:]] if len(panels) <= PRINTED else overall or each
    written = ["report.html", "report.md", *(["results.csv"] if ours else []), "*.png"]
    return "\n\n".join([*printed, *warnings, f"written: {', '.join(f'{out}/{file}' for file in written)}"])


def literal(text):
    """A text, such as a name, of which neither Markdown nor HTML makes markup."""
    markup = r"[\\`*~|<>&]|\](?=[(\[])|(?<!\w)_|_(?!\w)|^[#\[]|^[-+](?=\s)"
    return re.sub(markup, lambda match: f"&#{ord(match[0])};", text)


def table(lines):
    """A Markdown table of rows of text, the first its header, padded so that it also reads well on a terminal."""
    lines = [[literal(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * (width - 1) + ":" for width in widths], *lines[1:]]
    return "\n".join(f"| {' | '.join(c.rjust(w) for c, w in zip(line, widths, strict=True))} |" for line in lines)


def to_html(text, folder):
    """One page that needs nothing else; pictures are read from the folder and embedded."""
    from markdown import Markdown  # a dependency of TensorBoard

    reader = Markdown(extensions=["tables", "toc"], extension_configs={"toc": {"toc_depth": "2-2"}})
    body = reader.convert(text).replace("</h1>", f"</h1>\n{reader.toc}", 1)

    def embed(match):
        return f'src="data:image/png;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    body = re.sub(r'src="([\w-]+\.png)"', embed, body)
    title = html.escape(html.unescape(text.partition("\n")[0].removeprefix("# ")))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>'
    return f"{head}\n<body>\n{body}\n</body></html>\n"


def number(value, decimals, sign="-"):
    return f"{value:{sign}.{decimals}f}" if abs(value) < 1e9 else f"{value:{sign}.3g}"


def with_ends(value, low, high, decimals, sign="-"):
    """ "1.50 [1.20, 1.80]", or without an interval where that is None"""
    value, *ends = (number(x, decimals, sign) for x in (value, low, high) if x is not None)
    return f"{value} [{', '.join(ends)}]" if ends else value


def estimate(statistic, decimals, *scores, sign="-"):
    """A statistic of scores (runs, tasks) with its interval, or without one where a task has fewer than 3 runs."""
    ends = None, None
    if min(stats.counts(x).min() for x in scores) >= stats.MIN_RUNS:
        ends = stats.stratified_bootstrap(statistic, *scores)
    return with_ends(statistic(*scores), *ends, decimals, sign)


def of_seeds(suite, n):
    return "" if n == len(suite.seeds) else f" ({n} of {len(suite.seeds)} seeds)"


def summary(suite, rows):
    finished = sum(row["status"] == "finished" for row in rows)
    lags, seeds = (", ".join(map(str, numbers)) for numbers in (suite.lags, suite.seeds))
    return f"""Algorithms: {len(suite.algorithms)}, tasks: {len(suite.tasks)}, lags {lags}, seeds {seeds}: \
**{finished} of {len(rows)} runs finished.** The {suite.score_name} is that of the policy being trained, after the \
last update. Brackets hold 95 % bootstrap intervals; nothing has one from fewer than 3 seeds."""


def headline(overall):
    """What the normalised scores are, or why there are none."""
    if not overall:
        return f"""Raw scores only, which cannot be averaged over tasks: benchmark/{PATH.name} has no row for these \
tasks at this number of steps."""
    return f"""Normalised scores: 0 is a random policy, 1 our PPO without lag after as many steps \
(benchmark/{PATH.name}). IQM: mean of the middle half of all runs of all tasks, each task with the same weight. \
Median: of the tasks' means. Optimality gap: how far scores fall short of 1, lower is better. P(better): the \
probability that a run of the first scores higher than one of the second on the same task. Tasks won: those where its \
mean is higher. An interval without width says that no resample differs, as when one side always wins."""


def aggregates(suite, lag, tasks, matrices, left_out):
    """Of one lag: what each algorithm scores over the tasks, the differences, and what is left out."""
    if not tasks:
        return []
    statistics = (stats.iqm, stats.median, stats.mean, stats.optimality_gap)
    lines = [["algorithm", "IQM", "median", "mean", "optimality gap"]]
    lines += [[a, *(estimate(f, 3, scores) for f in statistics)] for a, scores in matrices.items()]
    compared = [["difference", "mean over tasks", "tasks won", "P(better)"]]
    for x, y in [pair for pair in suite.comparisons if set(pair) <= matrices.keys()]:
        a, b = matrices[x], matrices[y]
        won = int((np.nanmean(a, axis=0) > np.nanmean(b, axis=0)).sum())
        better = estimate(stats.probability_of_improvement, 2, a, b)
        compared.append([f"{x} - {y}", estimate(stats.mean, 3, a - b, sign="+"), f"{won} of {len(tasks)}", better])
    seeds = stats.counts(next(iter(matrices.values())))
    each, plural = " or ".join(map(str, sorted(set(seeds)))), "s" if len(tasks) > 1 else ""
    parts = [f"### Lag {lag}: normalised score over {len(tasks)} task{plural}, seeds of each: {each}", table(lines)]
    if left_out:
        parts += ["Left out:", "\n".join(f"- {literal(text)}" for text in left_out)]
    return parts + ([table(compared)] if len(compared) > 1 else [])


def grid(suite, names, cell):
    """A table with a line per task and lag, and a column per name that holds cell(task, lag, name), "-" for none."""
    titles = [name if isinstance(name, str) else " - ".join(name) for name in names]
    lines = [[t, str(lag), *(cell(t, lag, name) for name in names)] for t in suite.tasks for lag in suite.lags]
    return table([["task", "lag", *titles], *(line for line in lines if set(line[2:]) != {"-"})])


def means(suite, cells):
    """Means over seeds with their intervals, and of how many seeds they are if some are missing."""

    def cell(*key):
        if key not in cells:
            return "-"
        text = estimate(stats.mean, suite.decimals, cells[key][:, None])
        return text + of_seeds(suite, np.isfinite(cells[key]).sum())

    return grid(suite, [*suite.algorithms], cell)


def per_task(suite, finals):
    """Two tables over all tasks and lags: means, and paired differences."""

    def cell(task, lag, pair):
        x, y = (finals.get((task, lag, algorithm), np.nan) for algorithm in pair)
        if not (both := np.isfinite(x - y)).any():
            return "-"
        *ends, wins = stats.paired_difference(x[both], y[both])
        return f"{with_ends(*ends, suite.decimals, '+')}, {wins}/{both.sum()}"

    parts = [f"### Mean {suite.score_name} of each task", means(suite, finals)]
    if suite.comparisons:
        text = "Mean difference of runs with the same seed, its interval, and on how many seeds the first is higher."
        parts += [f"### Paired difference in {suite.score_name}", text, grid(suite, suite.comparisons, cell)]
    return parts


def seed_table(suite, rows, finals, task, lag):
    """Final scores and their differences seed by seed, and the means of those that are there."""
    here = [row for row in rows if (row["task"], row["lag"]) == (task, lag)]
    states = {(row["algorithm"], row["seed"]): row["status"].replace("finished", "no evaluation") for row in here}
    columns = {a: finals.get((task, lag, a), np.full(len(suite.seeds), np.nan)) for a in suite.algorithms}
    columns |= {f"{x} - {y}": columns[x] - columns[y] for x, y in suite.comparisons}
    lines, last = [[str(seed)] for seed in suite.seeds], ["mean"]
    for title, values in columns.items():
        sign, none = ("-", "missing") if title in suite.algorithms else ("+", "")
        for line, seed, x in zip(lines, suite.seeds, values, strict=True):
            line.append(number(x, suite.decimals, sign) if x == x else states.get((title, seed), none))
        n = np.isfinite(values).sum()
        last.append(number(np.nanmean(values), suite.decimals, sign) + of_seeds(suite, n) if n else "")
    title = literal(f"{task}, lag {lag}: {suite.score_name} at the end")
    return [f"### {title}", table([["seed", *columns], *lines, last])]


def draw(suite, rows, finals, scores, out):
    """Draw into the folder; returns the Markdown of score against lag, and of the other pictures."""
    if not finals:
        return ["No run has finished with an evaluation, so there is no picture."], []
    views = []
    for task in suite.tasks:
        cells = {lag: [a for a in suite.algorithms if (task, lag, a) in finals] for lag in suite.lags}
        view = {lag: {a: finals[task, lag, a][:, None] for a in found} for lag, found in cells.items() if found}
        views += [(task, suite.score_name, view)] if view else []
    scored = {lag: (tasks, matrices) for lag, (tasks, matrices, _) in scores.items() if tasks}
    shared = [task for task in suite.tasks if scored and all(task in tasks for tasks, _ in scored.values())]
    view = {lag: {a: x[:, np.isin(tasks, shared)] for a, x in found.items()} for lag, (tasks, found) in scored.items()}
    overall = [(f"{len(shared)} tasks", pictures.SCORE, view)] if len(shared) > 1 else []

    def show(files, title, caption):
        return [f"### {title}", *(f"![{title}]({file})" for file in files), caption] if files else []

    lags = f"""Mean {suite.score_name} after the last update, with 95 % bootstrap interval; small dots are single \
seeds. Lag: largest age of the policy that acts. Over several tasks: those that have scores at every lag."""
    curves = "Thick: mean over seeds of the interpolated evaluations; shaded: its 95 % bootstrap interval; thin: seeds."
    pairs = "Each point: two runs with the same task, lag and seed; above the line that of the vertical axis is better."
    profile = "Share of runs that end above each score, with 95 % bootstrap intervals; higher is better."
    forward = """Left: total variation from the policy that the update started from, mean over its gradient steps. \
Right: share of points that VACO's filter drops. Means over tasks and seeds."""
    whole = overall or views[: len(views) == 1]
    return show(pictures.draw_lags(suite, overall + views, out / "lag.png"), "Score against lag", lags), [
        "## Pictures",
        *show(pictures.draw_curves(suite, rows, out / "curves.png"), "Learning curves", curves),
        *show(pictures.draw_pairs(suite, overall or views, out / "pairs.png"), "Seed against seed", pairs),
        *show(pictures.draw_profile(suite, whole, out / "profile.png"), "Performance profile", profile),
        *show(pictures.draw_filter(suite, rows, out / "filter.png"), "Forward lag and filter", forward),
    ]


def missing(rows):
    """The runs which are not in the tables."""
    lost = sorted((row for row in rows if row["status"] != "finished"), key=lambda row: row["status"] == "missing")
    if not lost:
        return []
    states = ", ".join(f"{n} {state}" for state, n in Counter(row["status"] for row in lost).items())
    lines = [f"- {literal(spell_key(row))}: {row['status']}" for row in lost[:LISTED]]
    lines += [f"- and {len(lost) - LISTED} more: results.csv has all"] if len(lost) > LISTED else []
    text = f"**Incomplete: {len(lost)} of {len(rows)} runs are not finished** ({states}). Means say of how many seeds."
    return [f"> {text}", "\n".join(lines)]


def origins(rows):
    """{"commit": Counter({value: runs}), ...} of the finished runs: what should be the same for all."""
    rows = [row for row in rows if row["status"] == "finished"]
    keys = ("commit", *PACKAGES, "machine", "final_step")
    return {key: Counter(str(row[key] or "unknown") for row in rows) for key in keys}


def mixed(rows):
    """Warnings where finished runs differ in more than the suite says: a difference may then come from that."""
    warnings = []
    for key, found in origins(rows).items():
        if len(found) > 1:
            values = "; ".join(f"{value} ({n} runs)" for value, n in found.items())
            warnings.append(f"> **Mixed {key}, so the runs are not strictly comparable:** {literal(values)}")
    return warnings


def provenance(name, suite, rows, out):
    """What is needed to obtain the same numbers."""
    lines = []
    if out:
        command = f"python -m benchmark run {name} {suite.options}".strip()
        lines.append(f"command: `{command} --out {shlex.quote(str(out))}`")
    for algorithm in suite.algorithms:
        commands = [row["command"] for row in rows if row["algorithm"] == algorithm and row["status"] == "finished"]
        if commands and commands[0]:
            lines.append(f"{literal(algorithm)}, one of {len(commands)} runs: `{commands[0]}`")
    lines += [f"{key}: {literal(' and '.join(found)) or 'unknown'}" for key, found in origins(rows).items()]
    if memory := [round(row["peak_rss_mb"]) for row in rows if row["peak_rss_mb"]]:
        lines.append(f"peak memory of a run: {min(memory)} to {max(memory)} MB")
    lines.append("intervals: percentile bootstrap, 10,000 resamples (in pictures 2,000) of the seeds of each task")
    return "\n".join(f"- {line}" for line in lines)


def compare(before: Positional[Path], after: Positional[Path]):
    """Show what changed between two folders of results: after - before, over runs of the same key and length."""
    (_, suite, rows), (_, _, others) = load(before), load(after)
    old, new = ({key_of(r): r for r in found if r["eval_return"] is not None} for found in (rows, others))
    groups, alone = {}, [row for key, row in new.items() if key not in old]
    for key, row in old.items():
        if key in new and (row["final_step"] is None or same_steps(row["final_step"], new[key]["final_step"])):
            group = row["task"], str(row["lag"]), row["algorithm"]
            groups.setdefault(group, []).append((row["eval_return"], new[key]["eval_return"]))
        else:
            alone.append(row)
    if not groups:
        raise Refused(f"{before} and {after} have no finished run of the same task, algorithm, lag, seed and last step")
    lines = [["task", "lag", "algorithm", "before", "after", "after - before", "higher on"]]
    for key, values in groups.items():
        a, b = zip(*values, strict=True)
        *difference, wins = stats.paired_difference(b, a)
        means = [number(np.mean(x), suite.decimals) for x in (a, b)]
        lines.append([*key, *means, with_ends(*difference, suite.decimals, "+"), f"{wins} of {len(values)}"])
    parts = [f"## {literal(f'{suite.score_name} in {after} less that in {before}')}", table(lines)]
    if alone:
        names = "; ".join(spell_key(row) for row in alone[:LISTED])
        parts.append(f"> **{len(alone)} runs without a partner of the same length, left out:** {literal(names)}")
    return "\n\n".join(parts)
