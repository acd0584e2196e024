"""The tables of a report: blocks (document.py) from rows of results.csv.

Statistics over several tasks are of scores; what is of one task is raw.
"""

import numpy as np

from benchmark.document import literal
from benchmark.scores import score_matrix
from benchmark.stats import (
    MIN_RUNS,
    iqm,
    mean,
    median,
    optimality_gap,
    paired_difference,
    probability_of_improvement,
    stratified_bootstrap,
)


def aggregates(suite, rows, tasks, lag):
    """Two tables of one lag: what each algorithm scores over the tasks, and the differences."""
    matrices = {a: score_matrix(rows, a, lag, tasks) for a in suite.algorithms}
    lines, notes = [["algorithm", "seeds", "IQM", "median", "mean", "optimality gap"]], []
    for algorithm, (scores, seeds) in matrices.items():
        statistics = (iqm, median, mean, optimality_gap)
        lines.append([algorithm, str(len(seeds)), *(with_interval(scores, statistic, 3) for statistic in statistics)])
        if why := left_out([r for r in rows if (r["algorithm"], r["lag"]) == (algorithm, lag)], seeds, tasks):
            notes.append(("text", f"{literal(algorithm)}, left out: {why}."))
    few = [algorithm for algorithm, (scores, _) in matrices.items() if 0 < scores.size < 4]
    if few:
        notes.append(("text", f"With fewer than four scores the IQM is the mean: {literal(', '.join(few))}."))
    compared = [["difference", "mean over tasks", "higher on", "P(better)"]]
    for x, y in suite.comparisons:
        (a, a_seeds), (b, b_seeds) = matrices[x], matrices[y]
        both = [seed for seed in a_seeds if seed in b_seeds]
        if not both:
            compared.append([f"{x} - {y}", "-", "no seed has both", "-"])
            continue
        a_both, b_both = (m[[seeds.index(s) for s in both]].mean(1) for m, seeds in ((a, a_seeds), (b, b_seeds)))
        difference, low, high, wins = paired_difference(a_both, b_both)
        text = number(difference, 3, "+") + ("" if low is None else f" [{low:+.3f}, {high:+.3f}]")
        probability = with_interval((a, b), probability_of_improvement, 2)
        compared.append([f"{x} - {y}", text, f"{wins} of {len(both)} seeds", probability])
    title = f"Lag {lag}: normalised score over {len(tasks)} task{'s' if len(tasks) > 1 else ''}"
    blocks = [("heading", 3, title), ("table", lines), *notes]
    return blocks + ([("table", compared)] if len(compared) > 1 else [])


def left_out(rows, seeds, tasks):
    """Why seeds of one algorithm at one lag are not among those that have a score on every task; "" if all are."""
    ended = [r for r in rows if r["task"] in tasks and r["eval_return"] is not None and r["score"] is None]
    if not rows:
        return "it has no run at this lag"
    if any(r["final_step"] is None for r in ended):
        return "results.csv has no final_step of its runs, so that they have no normalised score"
    if ended:
        on = literal(", ".join(dict.fromkeys(r["task"] for r in ended)))
        return f"its runs on {on} have another number of steps than the reference"
    lost = {r["seed"] for r in rows} - set(seeds)
    return f"not finished on every task: seed {spell(sorted(lost))}" if lost else ""


def per_task(suite, rows):
    """Two tables over all tasks and lags: means, and paired differences."""
    lines = [["task", "lag", *suite.algorithms]]
    compared = [["task", "lag", *(f"{x} - {y}" for x, y in suite.comparisons)]]
    for task in suite.tasks:
        for lag in suite.lags:
            scores = {a: score_matrix(rows, a, lag, (task,), "eval_return") for a in suite.algorithms}
            lines.append([task, str(lag), *(seeds_mean(suite, s) for s, _ in scores.values())])
            line = [task, str(lag)]
            for x, y in suite.comparisons:
                a, b = (dict(zip(seeds, values[:, 0], strict=True)) for values, seeds in (scores[x], scores[y]))
                both = [seed for seed in a if seed in b]
                if not both:
                    line.append("-")
                    continue
                difference, low, high, wins = paired_difference([a[s] for s in both], [b[s] for s in both])
                low, high = (number(end, suite.decimals, "+") for end in (low, high))
                text = number(difference, suite.decimals, "+") + (f" [{low}, {high}]" if low else "")
                line.append(f"{text}, {wins}/{len(both)}")
            compared.append(line)
    name = suite.score_name
    blocks = [("heading", 3, f"Mean {name} of each task"), ("table", lines)]
    if suite.comparisons:
        text = "Difference of the runs with the same seed, its interval, and on how many seeds the first is higher."
        blocks += [("heading", 3, f"Paired difference in {name}"), ("text", text), ("table", compared)]
    return blocks


def learning_speed(suite, rows):
    """Tables of the area under the curve and, where a reference is known, of the steps to half of it."""
    area = [["task", "lag", *suite.algorithms]]
    half = [["task", "lag", *suite.algorithms]]
    for task in suite.tasks:
        for lag in suite.lags:
            cells = [(a, *score_matrix(rows, a, lag, (task,), "area_under_curve")) for a in suite.algorithms]
            area.append([task, str(lag), *(seeds_mean(suite, values) for _, values, _ in cells)])
            line = [task, str(lag)]
            for algorithm, _, seeds in cells:
                reached = score_matrix(rows, algorithm, lag, (task,), "steps_to_half")[0]
                line.append(f"{np.median(reached):,.0f}, {len(reached)}/{len(seeds)}" if len(reached) else "-")
            half.append(line)
    blocks = []
    if any(cell != "-" for line in area[1:] for cell in line[2:]):
        text = f"Mean height of the curve of the {suite.score_name}, from the first to the last evaluation."
        blocks += [("heading", 3, "Area under the learning curve"), ("text", text), ("table", area)]
    if any(cell != "-" for line in half[1:] for cell in line[2:]):
        text = "The first evaluation at or above the middle between a random policy and PPO without lag: median of the "
        text += "seeds that reach it, and how many do. "
        blocks += [("heading", 3, f"{suite.step_name.capitalize()} to half of the reference"), ("text", text)]
        blocks += [("table", half)]
    return blocks


def seed_table(suite, rows, task, lag):
    """Blocks: final scores seed by seed, and beneath them each comparison in words."""
    runs = {(r["algorithm"], r["seed"]): r for r in rows if (r["task"], r["lag"]) == (task, lag)}
    values = {a: {s: runs[a, s]["eval_return"] for s in suite.seeds if (a, s) in runs} for a in suite.algorithms}
    known = {a: {seed: x for seed, x in found.items() if x is not None} for a, found in values.items()}
    lines = [["seed", *suite.algorithms, *(f"{x} - {y}" for x, y in suite.comparisons)]]
    for seed in suite.seeds:
        line = [str(seed)]
        for algorithm in suite.algorithms:
            state = runs[algorithm, seed]["status"] if (algorithm, seed) in runs else "missing"
            none = "no evaluation" if state == "finished" else state
            line.append(number(known[algorithm].get(seed), suite.decimals) or none)
        for x, y in suite.comparisons:
            both = seed in known[x] and seed in known[y]
            line.append(number(known[x][seed] - known[y][seed], suite.decimals, "+") if both else "")
        lines.append(line)
    for name, statistic in (("mean", np.mean), ("IQM", lambda x: iqm(np.array(x)[:, None]))):
        found = [list(x.values()) for x in known.values()]
        if name == "IQM" and min(map(len, found)) < 4:
            continue  # it would be the mean
        counts = [of_seeds(suite, len(x)) for x in found]
        cells = [number(statistic(x), suite.decimals) + n if x else "" for x, n in zip(found, counts, strict=True)]
        lines.append([name, *cells, *("" for _ in suite.comparisons)])
    sentences = []
    mean_line = lines[len(suite.seeds) + 1]
    for column, (x, y) in enumerate(suite.comparisons, start=len(suite.algorithms) + 1):
        both = [seed for seed in suite.seeds if seed in known[x] and seed in known[y]]
        pair = [[known[a][seed] for seed in both] for a in (x, y)]
        if both:
            difference = number(np.mean(pair[0]) - np.mean(pair[1]), suite.decimals, "+")
            mean_line[column] = difference + of_seeds(suite, len(both))
        sentences.append(("text", f"{literal(f'{x} - {y}')}: {comparison(*pair, len(suite.seeds), suite.decimals)}"))
    title = f"{task}, lag {lag}: {suite.score_name} at the end"
    return [("heading", 3, title), ("table", lines), *sentences]


def comparison(x, y, seeds, decimals):
    """paired_difference of x and y in words; seeds is how many pairs there would be if no run were missing."""
    if not x:
        return "no seed has both."
    difference, low, high, wins = paired_difference(x, y)
    interval = "no interval from fewer than 3 seeds"
    if low is not None:
        interval = f"95 % bootstrap interval {number(low, decimals, '+')} to {number(high, decimals, '+')}"
    left_out = f" ({seeds - len(x)} of {seeds} seeds left out)" if len(x) < seeds else ""
    text = f"mean difference {number(difference, decimals, '+')}, {interval}"
    return f"{text}, higher on {wins} of {len(x)} seeds{left_out}."


def number(value, decimals, sign="-"):
    if value is None:
        return ""
    return f"{value:{sign}.{decimals}f}" if abs(value) < 1e9 else f"{value:{sign}.4g}"


def seeds_mean(suite, scores):
    """The mean of scores (seeds, 1) with its interval, and of how many seeds it is if some are missing."""
    text = with_interval(scores, mean, suite.decimals)
    return text + of_seeds(suite, len(scores)) if len(scores) else text


def of_seeds(suite, n):
    return "" if n == len(suite.seeds) else f" ({n} of {len(suite.seeds)} seeds)"


def with_interval(scores, statistic, decimals, sign="-"):
    """ "1.50 [1.20, 1.80]": a statistic with its bootstrap interval, or without one from fewer than 3 seeds"""
    several = scores if isinstance(scores, tuple) else (scores,)
    if not all(x.size for x in several):
        return "-"
    text = number(statistic(*several), decimals, sign)
    if min(len(x) for x in several) < MIN_RUNS:
        return text
    low, high = stratified_bootstrap(scores, statistic)
    return f"{text} [{number(low, decimals, sign)}, {number(high, decimals, sign)}]"


def spell(numbers):
    """(1, 2, 3) -> "1 to 3", (0, 15) -> "0, 15" """
    whole = len(numbers) > 2 and max(numbers) - min(numbers) + 1 == len(numbers)  # none is there twice
    return f"{min(numbers)} to {max(numbers)}" if whole else ", ".join(map(str, numbers))
