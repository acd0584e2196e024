"""The report of a folder of runs: report.html, report.md, results.csv and the pictures; two folders compared; and the
reference scores. Functions return Markdown. Statistics over several tasks are of scores, what is of one task is raw.
"""

import base64
import csv
import html
import io
import math
import re
import shlex
from collections import Counter

import numpy as np

from benchmark import pictures, stats
from benchmark.results import PACKAGES, PATH, aligned, by_cell, key_of, load, same_steps, spell_key, write_results
from benchmark.runner import run_suite
from benchmark.runs import replace_file
from benchmark.suites import CHEAP, MUJOCO, PPO, Refused, Suite

PRINTED = 4  # tables of single seeds that are printed, not only written
LISTED = 20  # runs that are named one by one
EPISODES = 100  # of the random policy
REFERENCE_COLUMNS = ("task", "steps", "final_step", "random", "ppo", "ppo_std", "episodes", "seeds", "commit")
REFERENCE_COLUMNS += (*PACKAGES, "command")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1.5rem; overflow-wrap: break-word; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb; } p, li { max-width: 52rem; } img { max-width: 100%; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; } td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left !important; }
code { background: #f1f1f1; overflow-wrap: anywhere; } .toc li { display: inline; margin-right: 1.2rem; }
blockquote { border-left: 5px solid #D55E00; margin: 1rem 0; padding: .1rem 1rem; background: #fff6ef; }
"""


def write_report(out):
    """Write report.html, report.md, results.csv and pictures into the folder `out` (a Path); returns what to print."""
    name, suite, rows = load(out)
    if ours := (out / "suite.json").exists():
        write_results(out, rows)
    scores = {lag: aligned(suite, rows, lag) for lag in suite.lags}
    finals, ended = (
        by_cell(suite, rows, "eval_return"),
        {(r["task"], r["lag"]) for r in rows if r["status"] == "finished"},
    )
    panels = [(task, lag) for task in suite.tasks for lag in suite.lags if (task, lag) in ended]
    overall = [part for lag in suite.lags for part in aggregates(suite, lag, *scores[lag])]
    single = [part for panel in panels for part in seed_table(suite, rows, finals, *panel)]
    each, warnings = per_task(suite, finals), missing(rows) + mixed(rows)
    lags, others = draw(suite, rows, finals, scores, out)
    title = f"# {literal(f'{name} {suite.options}' if suite.options else f'{name}: {suite.description}')}"
    parts = [title, summary(suite, rows), *warnings, "## Result", *lags, headline(overall), *overall, *each]
    parts += [*others, *learning_speed(suite, rows, finals), "## Seed by seed", *single]
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


def code(text):
    return literal(text) if "`" in text else f"`{text}`"


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


def number(value, decimals, sign="-", scale=None):
    """With so many decimals, and more where the value, or another `scale`, would have fewer than two digits but 0."""
    scale = abs(scale or value)
    if scale and not 1e-6 < scale < 1e9:
        return f"{value:{sign}.3g}"
    return f"{value:{sign}.{max(decimals, 1 - math.floor(math.log10(scale))) if 0 < scale < 1 else decimals}f}"


def with_ends(value, low, high, decimals, sign="-"):
    """ "1.50 [1.20, 1.80]", or without an interval where that is None"""
    if low is None:
        return number(value, decimals, sign)
    value, low, high = (number(x, decimals, sign, max(map(abs, (value, low, high)))) for x in (value, low, high))
    return f"{value} [{low}, {high}]"


def estimate(statistic, decimals, *scores, sign="-"):
    """A statistic of scores (runs, tasks) with its interval, or without one where a task has fewer than 3 runs."""
    ends = None, None
    if min(stats.counts(x).min() for x in scores) >= stats.MIN_RUNS:
        ends = stats.stratified_bootstrap(scores, statistic)
    return with_ends(statistic(*scores), *ends, decimals, sign)


def spell(numbers):
    """(1, 2, 3) -> "1 to 3", (0, 15) -> "0, 15" """
    whole = len(numbers) > 2 and max(numbers) - min(numbers) + 1 == len(numbers)  # none is there twice
    return f"{min(numbers)} to {max(numbers)}" if whole else ", ".join(map(str, numbers))


def of_seeds(suite, n):
    return "" if n == len(suite.seeds) else f" ({n} of {len(suite.seeds)} seeds)"


def summary(suite, rows):
    finished = sum(row["status"] == "finished" for row in rows)
    return f"""Algorithms: {len(suite.algorithms)}, tasks: {len(suite.tasks)}, lags {spell(suite.lags)}, seeds \
{spell(suite.seeds)}: **{finished} of {len(rows)} runs finished.** The {suite.score_name} is that of the policy being \
trained, after the last update. Brackets hold 95 % bootstrap intervals; nothing has one from fewer than 3 seeds."""


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
    if seeds.sum() < 4:
        parts.append("With fewer than four scores the IQM is the mean.")
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


def learning_speed(suite, rows, finals):
    """Tables of the area under the curve and, where a reference is known, of the steps to half of it."""
    area, half = (by_cell(suite, rows, key) for key in ("area_under_curve", "steps_to_half"))

    def cell(*key):
        if key not in half:
            return "-"
        reached, ended = (np.isfinite(found[key]).sum() for found in (half, finals))
        return f"{np.nanmedian(half[key]):,.0f}, {reached}/{ended}"

    parts = ["## Speed of learning"] if area or half else []
    if area:
        text = f"Mean height of the curve of the {suite.score_name}, from the first to the last evaluation."
        parts += ["### Area under the learning curve", text, means(suite, area)]
    if half:
        text = "The first evaluation at or above the middle between a random policy and PPO without lag: median of the "
        text += "seeds that reach it, and how many do."
        parts += [f"### {suite.step_name.capitalize()} to half of the reference", text]
        parts.append(grid(suite, [*suite.algorithms], cell))
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
        known = values[np.isfinite(values)]
        form = suite.decimals, sign, max(abs(known), default=0)
        for line, seed, x in zip(lines, suite.seeds, values, strict=True):
            line.append(number(x, *form) if x == x else states.get((title, seed), none))
        last.append(number(known.mean(), *form) + of_seeds(suite, len(known)) if len(known) else "")
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
    curves = """Thick: mean over seeds, of the steps that all of them reach, interpolated between evaluations; \
shaded: its 95 % bootstrap interval; thin: single seeds. With many algorithms the means alone are drawn."""
    pairs = """Each point is a pair of runs with the same task, lag and seed. Above the grey line the algorithm \
named on the vertical axis is better."""
    profile = "Share of runs that end above each score, with 95 % bootstrap intervals; higher is better."
    forward = """Left: total variation between the policy being updated and the one the update started from, mean \
over its gradient steps. Right: share of points that VACO's filter drops. Means over tasks and seeds."""
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
    text = (
        f"> **Incomplete: {len(lost)} of {len(rows)} runs are not finished** ({states}). Means say of how many seeds."
    )
    return [text, "\n".join(lines)]


def origins(rows):
    """{"commit": Counter({value: runs}), ...} of the finished runs: what should be the same for all."""
    keys = ("commit", *PACKAGES, "machine")
    return {key: Counter(r[key] or "unknown" for r in rows if r["status"] == "finished") for key in keys}


def mixed(rows):
    """Warnings where finished runs differ in more than the suite says: a difference may then come from that."""
    warnings = []
    for key, found in origins(rows).items():
        values = "; ".join(f"{literal(value)} ({n} runs)" for value, n in found.items())
        if len(found) > 1:
            warnings.append(f"> **Mixed {key}, so the runs are not strictly comparable:** {values}")
    for task in dict.fromkeys(row["task"] for row in rows):
        steps = Counter(r["final_step"] for r in rows if r["task"] == task and r["final_step"] is not None)
        if steps and not same_steps(min(steps), max(steps)):
            values = "; ".join(f"{value:,.0f} ({n} runs)" for value, n in steps.items())
            warnings.append(f"> **Mixed last steps of {literal(task)}, so its runs are not comparable:** {values}")
    return warnings


def provenance(name, suite, rows, out):
    """What is needed to obtain the same numbers."""
    lines = []
    if out:
        command = f"python -m benchmark run {name} {suite.options}".strip()
        lines.append(f"command: {code(f'{command} --out {shlex.quote(str(out))}')}")
    for algorithm in suite.algorithms:
        commands = [row["command"] for row in rows if row["algorithm"] == algorithm and row["status"] == "finished"]
        if commands and commands[0]:
            lines.append(f"{literal(algorithm)}, one of {len(commands)} runs: {code(commands[0])}")
    lines += [f"{key}: {literal(' and '.join(found)) or 'unknown'}" for key, found in origins(rows).items()]
    if memory := [round(row["peak_rss_mb"]) for row in rows if row["peak_rss_mb"]]:
        lines.append(f"peak memory of a run: {min(memory)} to {max(memory)} MB")
    text = (
        "intervals: percentile bootstrap, 10,000 resamples (2,000 for the bands in pictures) of the seeds of each task"
    )
    lines.append(f"{text}; of paired differences, of the pairs")
    return "\n".join(f"- {line}" for line in lines)


def compare(before, after, fail_below=None):
    """(what to print, exit code). The code is 1 where the mean of after - before over all pairs of runs with the same
    task, algorithm, lag and seed is below `fail_below`, or a run of `before` is missing in `after` or has another last
    step; without `fail_below` it is 0."""
    (_, suite, rows), (_, _, others) = load(before), load(after)
    old, new = ({key_of(r): r for r in found if r["eval_return"] is not None} for found in (rows, others))
    steps = {key: (old[key]["final_step"], new[key]["final_step"]) for key in old if key in new}
    unequal = [key for key, ends in steps.items() if None not in ends and not same_steps(*ends)]
    pairs = {key: (old[key], new[key]) for key in steps if key not in unequal}
    if not pairs:
        raise Refused(f"{before} and {after} have no finished run of the same task, algorithm, lag, seed and last step")
    groups = {}
    for (task, algorithm, lag, _), (a, b) in pairs.items():
        groups.setdefault((task, str(lag), algorithm), []).append((a["eval_return"], b["eval_return"]))
    everything = [values for group in groups.values() for values in group]
    lines = [["task", "lag", "algorithm", "before", "after", "after - before", "higher on"]]
    for key, values in [*groups.items(), *([(("all", "", ""), everything)] if len(groups) > 1 else [])]:
        a, b = zip(*values, strict=True)
        *ends, wins = stats.paired_difference(b, a)
        means = [number(np.mean(x), suite.decimals) for x in (a, b)]
        lines.append([*key, *means, with_ends(*ends, suite.decimals, "+"), f"{wins} of {len(values)}"])
    parts = [f"## {literal(f'{suite.score_name} in {after} less that in {before}')}", table(lines)]
    lost, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    for what, keys in ((f"Only in {before}", lost), (f"Only in {after}", added), ("Of another length", unequal)):
        if keys:
            names = "; ".join(spell_key(old.get(key) or new[key]) for key in keys[:3])
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            parts.append(f"> **{literal(what)}, left out:** {literal(names)}{more}")
    if other := sum(a["command"] != b["command"] for a, b in pairs.values() if a["command"] and b["command"]):
        parts.append(f"> **{other} pairs were run with different flags,** so more than the code may differ")
    if fail_below is None:
        return "\n\n".join(parts), 0
    difference = float(np.mean([b - a for a, b in everything]))
    failed = difference < fail_below or bool(lost) or bool(unequal)
    why = f"mean difference {difference:+.6g} of {len(pairs)} pairs, limit {fail_below:g}"
    why += f", {len(lost)} runs of {before} are missing" if lost else ""
    why += f", {len(unequal)} have another last step" if unequal else ""
    return "\n\n".join([*parts, f"{'failed' if failed else 'passed'}: {why}"]), int(failed)


def measure(path, out, tasks, steps, seeds, command, workers=None):
    """Run PPO without lag in `out`, then merge the tasks of which all seeds are finished into the CSV at `path`, each
    with the mean return of a random policy: 1 and 0 of normalised scores. Returns the exit code."""
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    if any(row.keys() != set(REFERENCE_COLUMNS) for row in rows):
        raise Refused(f"{path} is not a file of reference scores; its columns are {', '.join(REFERENCE_COLUMNS)}")
    old = {(row["task"], row["steps"]): row for row in rows}
    settings = CHEAP | {"total-timesteps": steps, "num-evals": 10, "eval-episodes": 20}
    text = f"PPO without lag after {steps:,} steps, the score of 1"
    suite = Suite(text, {"PPO": PPO}, tuple(tasks or MUJOCO), (0,), tuple(seeds), settings)
    if (exit_code := run_suite("reference", suite, out, command, workers)) > 1:
        return exit_code
    rows = load(out)[2]
    for task in suite.tasks:
        found = [r for r in rows if r["task"] == task and r["seed"] in suite.seeds and r["eval_return"] is not None]
        random, ppo = random_return(task), [row["eval_return"] for row in found]
        if len(ppo) < len(suite.seeds) or not random < np.mean(ppo):
            text = f"{len(ppo)} of {len(suite.seeds)} runs finished with a return, which must be above that of a random"
            print(f"{task}: no reference, {text} policy, {random:.1f}")
            continue
        row = {"task": task, "steps": steps, "final_step": int(found[0]["final_step"]), "random": random}
        row |= {"ppo": float(np.mean(ppo)), "ppo_std": float(np.std(ppo, ddof=1)) if len(ppo) > 1 else ""}
        row |= {"episodes": EPISODES, "seeds": " ".join(map(str, suite.seeds)), "command": command}
        row |= {k: " and ".join(dict.fromkeys(r[k] or "unknown" for r in found)) for k in ("commit", *PACKAGES)}
        old[task, str(steps)] = row
        print(f"{task}, {steps:,} steps: random {random:.1f}, PPO {np.mean(ppo):.1f} ({len(ppo)} seeds)")
    content = io.StringIO()
    writer = csv.DictWriter(content, REFERENCE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(old[key] for key in sorted(old, key=lambda key: (key[0], int(key[1]))))
    replace_file(path, content.getvalue())
    print(f"written: {path}")
    return exit_code


def random_return(task, episodes=EPISODES, seed=0):
    """Mean return of episodes with actions drawn uniformly within their bounds, which must be finite."""
    import gymnasium as gym
    import mujoco

    mujoco.set_mju_user_warning(lambda text: None)  # else it writes MUJOCO_LOG.TXT into the working directory
    env = gym.make(task)
    if not np.isfinite([env.action_space.low, env.action_space.high]).all():
        raise Refused(f"{task}: a random policy needs actions with bounds, not {env.action_space}")
    env.action_space.seed(seed)
    returns = []
    for start in np.random.SeedSequence(seed).generate_state(episodes).tolist():
        env.reset(seed=start)
        rewards, done = [], False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            rewards.append(reward)
            done = terminated or truncated
        returns.append(sum(rewards))
    return float(np.mean(returns))
