"""Two folders of results, run by run: what a change has done to the same task, algorithm, lag and seed."""

import numpy as np

from benchmark.document import literal, to_markdown
from benchmark.results import PACKAGES, key_of, load, spell_key
from benchmark.runs import Refused
from benchmark.scores import same_steps
from benchmark.stats import paired_difference
from benchmark.tables import number


def compare(before, after, fail_below=None):
    """(what to print, exit code). The code is 1 where the mean of after - before over all pairs is below `fail_below`,
    or a run that `before` has is missing in `after` or has another last step; without `fail_below` it is 0."""
    (_, suite, rows), (_, _, others) = load(before), load(after)
    known = [{key_of(r): r for r in found if r["eval_return"] is not None} for found in (rows, others)]
    unequal = [key for key in known[0] if key in known[1] and not equally_long(known[0][key], known[1][key])]
    pairs = [(known[0][key], known[1][key]) for key in known[0] if key in known[1] and key not in unequal]
    if not pairs:
        alike = "of the same task, algorithm, lag and seed" + (" and number of steps" if unequal else "")
        raise Refused(f"{before} and {after} have no finished run {alike}")
    lines = [["task", "lag", "algorithm", "before", "after", "after - before", "95 % interval", "higher on"]]
    groups = {}
    for a, b in pairs:
        groups.setdefault((a["task"], a["lag"], a["algorithm"]), []).append((a["eval_return"], b["eval_return"]))
    for (task, lag, algorithm), values in groups.items():
        old, new = np.array(values).T
        lines.append([task, str(lag), algorithm, *cells(new, old, suite.decimals)])
    old, new = np.array([(a["eval_return"], b["eval_return"]) for a, b in pairs]).T
    if len(groups) > 1:
        lines.append(["all", "", "", *cells(new, old, suite.decimals)])
    blocks = [("heading", 2, f"{suite.score_name} in {after} less that in {before}"), ("table", lines)]
    lost, added = (sorted(known[i].keys() - known[1 - i].keys()) for i in (0, 1))
    for what, keys in ((f"Only in {before}", lost), (f"Only in {after}", added), ("Of another length", unequal)):
        if keys:
            names = literal("; ".join(spell_key(known[what == f"Only in {after}"][key]) for key in keys[:3]))
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            blocks.append(("warning", f"**{literal(what)}, left out:** {names}{more}"))
    for package in ("commit", *PACKAGES):
        found = [" and ".join(sorted({r[package] for r in side if r[package]})) for side in zip(*pairs, strict=True)]
        if all(found) and found[0] != found[1]:
            blocks.append(("warning", f"**Another {package}:** {found[0]} before, {found[1]} after"))
    same = [a["command"] == b["command"] for a, b in pairs if a["command"] and b["command"]]
    if not all(same):
        text = f"**{len(same) - sum(same)} pairs were run with different flags,** so more than the code may differ"
        blocks.append(("warning", text))
    text, mean = to_markdown(blocks), float((new - old).mean())
    if fail_below is None:
        return text, 0
    failed = mean < fail_below or bool(lost) or bool(unequal)
    why = f"mean difference {mean:+.6g} of {len(pairs)} pairs, limit {fail_below:g}"
    why += f", {len(lost)} runs of {before} are missing" if lost else ""
    why += f", {len(unequal)} have another last step" if unequal else ""
    return f"{text}\n{'failed' if failed else 'passed'}: {why}", int(failed)


def equally_long(a, b):
    return a["final_step"] is None or b["final_step"] is None or same_steps(a["final_step"], b["final_step"])


def cells(new, old, decimals):
    difference, low, high, wins = paired_difference(new, old)
    interval = "" if low is None else f"{number(low, decimals, '+')} to {number(high, decimals, '+')}"
    means = [number(x.mean(), decimals) for x in (old, new)]
    return [*means, number(difference, decimals, "+"), interval or "none", f"{wins} of {len(new)}"]
