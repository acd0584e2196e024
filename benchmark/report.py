"""The report of a folder of runs: report.html, report.md, results.csv and the pictures.

Everything is computed from the rows of results.csv, and the curves from the evals.csv and metrics.csv of the runs.
"""

import shlex
from collections import Counter

from benchmark import pictures
from benchmark.document import literal, to_html, to_markdown
from benchmark.results import PACKAGES, describe, load, spell_key, write_results
from benchmark.runs import ROOT, flag_list, read_json, replace_file
from benchmark.scores import add_scores, read_references, same_steps, scored_tasks
from benchmark.tables import aggregates, learning_speed, per_task, seed_table, spell

PRINTED = 4  # tables of single seeds that are printed, not only written
LISTED = 20  # runs that are named one by one


def write_report(out):
    """Write report.html, report.md, results.csv and pictures into the folder `out` (a Path); returns what to print."""
    name, suite, rows = load(out)
    if (out / "suite.json").exists():
        write_results(out, rows)
    add_scores(rows, read_references())
    tasks = scored_tasks(rows)
    warnings = missing(suite, rows) + mixed(rows)
    panels = [(task, lag) for task in suite.tasks for lag in suite.lags]
    overall = [block for lag in suite.lags for block in aggregates(suite, rows, tasks, lag)] if tasks else []
    title = f"{name} {suite.options}" if suite.options else f"{name}: {suite.description}"
    blocks = [("heading", 1, title), ("text", summary(suite, rows)), *warnings]
    first, others = draw(suite, rows, tasks, out)
    blocks += [("heading", 2, "Result"), *first, *headline(suite, rows, tasks, overall), *per_task(suite, rows)]
    if others:
        blocks += [("heading", 2, "Pictures"), *others]
    if speed := learning_speed(suite, rows):
        blocks += [("heading", 2, "Speed of learning"), *speed]
    blocks += [("heading", 2, "Seed by seed")]
    single = {panel: seed_table(suite, rows, *panel) for panel in panels}
    blocks += [block for panel in panels for block in single[panel]]
    blocks += [("heading", 2, "How it was measured"), *provenance(name, suite, rows, out)]
    replace_file(out / "report.md", to_markdown(blocks))
    replace_file(out / "report.html", to_html(blocks, out))

    printed = [block for panel in panels for block in single[panel]] if len(panels) <= PRINTED else []
    printed = printed or overall or per_task(suite, rows)
    written = ["report.html", "report.md", *(["results.csv"] if (out / "suite.json").exists() else []), "*.png"]
    return f"{to_markdown([*printed, *warnings])}\nwritten: {', '.join(f'{out}/{file}' for file in written)}"


def summary(suite, rows):
    finished = sum(row["status"] == "finished" for row in rows)
    parts = [f"{len(suite.algorithms)} algorithms", f"{len(suite.tasks)} tasks", f"lags {spell(suite.lags)}"]
    parts = [part.removesuffix("s") if part.startswith("1 ") else part for part in parts]
    text = f"{', '.join(parts)}, seeds {spell(suite.seeds)}: **{finished} of {len(rows)} runs finished.** "
    if known(rows):
        text += f"The {suite.score_name} is that of the policy being trained, after the last update. "
    return text + "Brackets hold 95 % bootstrap intervals; nothing has one from fewer than 3 seeds."


def known(rows):
    """Whether all runs are of scripts that are here, so that the report can say how they score and pair."""
    return all(row["script"] and (ROOT / row["script"]).is_file() for row in rows)


def headline(suite, rows, tasks, overall):
    """The normalised scores over all tasks, or why there are none."""
    if not tasks:
        why = "benchmark/reference_scores.csv has no row for these tasks at this number of steps"
        if all(row["final_step"] is None for row in rows):
            why = "final_step is not in results.csv, so that no reference can be looked up"
        return [("text", f"Raw scores only, which cannot be averaged over tasks: {why}.")]
    text = "Normalised scores: 0 is a random policy, 1 our PPO without lag after as many steps "
    text += "(benchmark/reference_scores.csv). "
    if len(tasks) < len(suite.tasks):
        named = literal(", ".join(tasks))
        text += f"**Over {len(tasks)} of {len(suite.tasks)} tasks, those with a reference:** {named}. "
    text += "IQM: mean of the middle half of all runs of all tasks. Median: of the tasks' means. "
    text += "Optimality gap: how far scores fall short of 1, lower is better. P(better): the probability that a run "
    text += (
        "of the first scores higher than one of the second on the same task. An interval without width says that no "
    )
    text += "resample differs, as when one side always wins; it is no certainty."
    return [("text", text), *overall]


# ------------------------------------------------------------------------------------------------------------ pictures


def draw(suite, rows, tasks, out):
    """Draw into the folder; returns the blocks of score against lag, and those of the other pictures."""
    if not any(row["eval_return"] is not None for row in rows):
        return [("text", "No run has finished with an evaluation, so there is no picture.")], []

    name, blocks = suite.score_name, []

    def add(files, caption, title=None):
        if files:
            blocks.extend([("heading", 3, title)] if title else [])
            blocks.extend(("picture", file, caption if file == files[0] else "continued") for file in files)

    text = f"Score against lag: mean {name} after the last update, with 95 % bootstrap interval; small dots are single "
    add(pictures.draw_lags(suite, rows, tasks, out / "lag.png"), text + "seeds.")
    result, blocks = blocks, []
    text = "Thick: mean over seeds"
    text += "; shaded: its 95 % bootstrap interval" if len(suite.algorithms) <= pictures.BANDS else ""
    text += "; thin: single seeds." if len(suite.algorithms) <= pictures.THIN else "."
    add(pictures.draw_curves(suite, rows, out / "curves.png"), text, "Learning curves")
    text = "Each point is a pair of runs with the same task, lag and seed. Above the grey line the algorithm named on "
    text += "the vertical axis is better."
    add(pictures.draw_pairs(suite, rows, tasks, out / "pairs.png"), text, "Seed against seed")
    if tasks or len(suite.tasks) == 1:
        chosen, key = (tasks, "score") if tasks else (suite.tasks, "eval_return")
        text = "Share of runs that end above each score"
        text += ", with 95 % bootstrap intervals" if len(suite.algorithms) <= pictures.BANDS else ""
        files = pictures.draw_profile(suite, rows, chosen, key, out / "profile.png")
        add(files, text + "; higher is better.", "Performance profile")
    text = "Left: total variation between the policy being updated and the one the update started from, mean over "
    text += "its gradient steps. Right: share of points that VACO's filter drops. Means over tasks and seeds."
    add(pictures.draw_filter(suite, rows, out / "filter.png"), text, "Forward lag and filter")
    return result, blocks


# ---------------------------------------------------------------------------------------------------------- provenance


def missing(suite, rows):
    """Blocks that list the runs which are not in the tables."""
    blocks, lines = [], [f"{literal(spell_key(r))}: {r['status']}" for r in rows if r["status"] != "finished"]
    if lines:
        counts = Counter(r["status"] for r in rows if r["status"] != "finished")
        counts = ", ".join(f"{count} {state}" for state, count in counts.items())
        text = f"**Incomplete: {len(lines)} of {len(rows)} runs are not finished** ({counts}). "
        text += "Means are of the seeds that are, and say how many where some are not."
        more = [f"and {len(lines) - LISTED} more: results.csv has all"] if len(lines) > LISTED else []
        blocks += [("warning", text), ("list", lines[:LISTED] + more)]
    everything = len(suite.algorithms) * len(suite.tasks) * len(suite.lags) * len(suite.seeds)
    if everything > len(rows):
        text = f"**{everything - len(rows)} of {everything} combinations of algorithm, task, lag and seed** have no "
        blocks.append(("warning", text + "row in results.csv: they are shown as missing."))
    return blocks


def origins(rows):
    """{"commit": Counter({value: runs}), ...} of the finished runs: what should be the same for all."""
    keys = ("commit", *PACKAGES, "machine")
    return {key: Counter(r[key] or "unknown" for r in rows if r["status"] == "finished") for key in keys}


def mixed(rows):
    """Warnings where finished runs differ in more than the suite says: a difference may then come from that."""
    warnings, unknown = [], {}
    for key, counts in origins(rows).items():
        if (count := counts.pop("unknown", 0)) and counts:
            unknown.setdefault(count, []).append(key)
        if len(counts) > 1:
            found = "; ".join(f"{literal(value)} ({count} runs)" for value, count in counts.items())
            warnings.append(("warning", f"**Mixed {key}, so the runs are not strictly comparable:** {found}"))
    for count, keys in unknown.items():
        warnings.append(("warning", f"**Not known of {count} runs,** and so perhaps not the same: {', '.join(keys)}"))
    for task in {r["task"]: None for r in rows}:
        steps = Counter(r["final_step"] for r in rows if r["task"] == task and r["final_step"] is not None)
        if steps and not same_steps(min(steps), max(steps)):
            text = "; ".join(f"{value:,.0f} ({count} runs)" for value, count in steps.items())
            warnings.append(
                ("warning", f"**Mixed last steps of {literal(task)}, so its runs are not comparable:** {text}")
            )
    for algorithm in {r["algorithm"]: None for r in rows}:
        # Flags the suite leaves out have the defaults of the script, and those may have changed between two runs.
        finished = [r for r in rows if r["algorithm"] == algorithm and r["status"] == "finished"]
        configs = [r["folder"] / "config.json" for r in finished]
        args = [read_json(path).get("args") or {} for path in configs if path.exists()]
        keys = {key for a in args for key in a} - {"env_id", "task", "lag", "seed", "run_dir", "resume"}
        differing = sorted(key for key in keys if len({describe(a.get(key)) for a in args}) > 1)
        if differing:
            text = f"**Mixed settings of {literal(algorithm)}, so its runs are not comparable:** {', '.join(differing)}"
            warnings.append(("warning", text))
    return warnings


def provenance(name, suite, rows, out):
    """What is needed to obtain the same numbers."""
    lines = []
    if (out / "suite.json").exists():
        options = f" {suite.options}" if suite.options else ""
        lines.append(f"command: `python -m benchmark run {name}{options} --out {shlex.quote(str(out))}`")
        lines.append(f"settings: `{shlex.join(flag_list(suite.settings))}`, unless an algorithm has its own")
    for algorithm in suite.algorithms:
        commands = [row["command"] for row in rows if row["algorithm"] == algorithm and row["command"]]
        if commands:
            lines.append(f"{literal(algorithm)}, one of {len(commands)} runs: `{commands[0]}`")
    lines += [f"{key}: {literal(' and '.join(counts)) or 'unknown'}" for key, counts in origins(rows).items()]
    share = "share starts, noise, policy ages and minibatch order"
    if not known(rows):
        share = "are compared; whether they share starts and noise, results.csv does not say"
    lines.append(f"pairs: runs with the same task, lag and seed {share}")
    lines.append(
        "intervals: percentile bootstrap, 10,000 resamples (2,000 for the bands in pictures) of the seeds, within each "
        "task; of paired differences, of the pairs"
    )
    return [("list", lines)]
