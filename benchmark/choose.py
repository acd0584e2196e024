"""A suite as the command line wants it: some of its tasks, algorithms, lags or seeds, other flags, sweeps of a flag.

--set delta=.1,.2 makes one algorithm per value of each algorithm whose script has the flag: "VACO delta .1", ...
"""

import ast
import math
import re
import shlex
from dataclasses import replace

from benchmark.runs import ROOT, Refused
from benchmark.suites import short


def choose(suite, only=None, tasks=None, lags=None, seeds=None, settings=None):
    """The suite with the words of --only, --tasks, --lags, --seeds and --set applied. Raises Refused."""
    words = {"--only": only, "--tasks": tasks, "--lags": lags, "--seeds": seeds, "--set": settings}
    options = [word for flag, given in words.items() if given for word in (flag, *given)]
    if tasks:
        suite = replace(suite, tasks=tuple(dict.fromkeys(tasks)))
    if only:
        suite = pick(suite, only)
    if lags:
        suite = replace(suite, lags=numbers("--lags", lags))
    if seeds:
        suite = replace(suite, seeds=numbers("--seeds", seeds))
    flags = [split(setting)[0] for setting in settings or ()]
    if twice := [flag for flag in flags if flags.count(flag) > 1]:
        raise Refused(f"--set {twice[0]} is there twice: give {twice[0]}=value,value to sweep")
    for setting in settings or ():
        suite = apply(suite, setting)
    if not suite.algorithms or not suite.tasks:
        raise Refused("nothing is left to run")
    return replace(suite, options=shlex.join(options))


def pick(suite, names):
    """The tasks and algorithms of these names; all tasks, or all algorithms, where none is named."""
    unknown = [name for name in names if name not in (*suite.tasks, *suite.algorithms)]
    if unknown:
        known = ", ".join((*suite.tasks, *suite.algorithms))
        raise Refused(f"--only {unknown[0]}: the suite has no such task or algorithm; it has {known}")
    tasks = tuple(task for task in suite.tasks if task in names) or suite.tasks
    algorithms = {name: value for name, value in suite.algorithms.items() if name in names} or suite.algorithms
    pairs = tuple(pair for pair in suite.pairs if set(pair) <= algorithms.keys())
    return replace(suite, tasks=tasks, algorithms=algorithms, pairs=pairs)


def numbers(flag, words):
    """["1:3", "7,9"] -> (1, 2, 3, 7, 9)"""
    found = []
    for word in ",".join(words).split(","):
        match = re.fullmatch(r"(\d{1,10})(?::(\d{1,10}))?", word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + 10_000:
            raise Refused(f"{flag} {word}: give numbers from 0 such as 1,2,5 or a range such as 1:5")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def split(setting):
    """ "--num_envs=8" -> ("num-envs", "8")"""
    flag, _, text = setting.removeprefix("--").partition("=")
    if not flag or not text:
        raise Refused(f"--set {setting}: give flag=value, or flag=value,value to sweep")
    return flag.replace("_", "-"), text


def apply(suite, setting):
    """The suite with flag=value for all algorithms whose script has the flag, or one algorithm per value."""
    flag, text = split(setting)
    instead = {suite.task_flag: "--tasks", "lag": "--lags", "seed": "--seeds", "run-dir": "--out"}
    if flag in instead:
        raise Refused(f"--set {flag}: use {instead[flag]}")
    if flag == "resume":
        raise Refused("--set resume: what is not finished is resumed anyway")
    fields = {script: script_fields(script) for script, _ in suite.algorithms.values()}
    knowing = [name for name, (script, _) in suite.algorithms.items() if flag in fields[script]]
    if not knowing:
        raise Refused(
            f"--set {flag}: no such flag of {', '.join(fields)}; python {next(iter(fields))} --help lists them"
        )
    if own := [name for name in knowing if flag in suite.algorithms[name][1]]:
        raise Refused(f"--set {flag}: the suite itself sets it for {own[0]}; leave that out with --only")
    kinds = {fields[suite.algorithms[name][0]][flag] for name in knowing}
    values = [parse(flag, value, kind) for value in text.split(",") for kind in sorted(kinds)[:1]]
    if len(set(values)) < len(values):
        raise Refused(f"--set {setting} has a value twice")
    if len(values) == 1:
        algorithms = {
            name: (script, extra | {flag: values[0]} if name in knowing else extra)
            for name, (script, extra) in suite.algorithms.items()
        }
        return replace(suite, algorithms=algorithms)
    if len(set(map(spell, values))) < len(values):
        raise Refused(f"--set {setting}: two of the values have the same six digits, so that their names would be one")
    names = {(name, i): f"{name} {flag} {spell(value)}" for name in knowing for i, value in enumerate(values)}
    algorithms = {}
    for name, (script, extra) in suite.algorithms.items():
        for i, value in enumerate(values) if name in knowing else ((0, None),):
            algorithms[names.get((name, i), name)] = (script, extra | ({flag: value} if name in knowing else {}))
    pairs = []
    for x, y in suite.comparisons:  # the same value of both, or each value of the one that has the flag
        pairs += [(names.get((x, i), x), names.get((y, i), y)) for i in range(len(values))]
    if len(suite.algorithms) == 1:
        (name,) = suite.algorithms
        pairs = [(names[name, i], names[name, 0]) for i in range(1, len(values))]
    return replace(suite, algorithms=algorithms, pairs=tuple(dict.fromkeys(pairs)))


def spell(value):
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return short(value) if isinstance(value, float) else str(value)


def script_fields(script):
    """{flag: annotation} of the class Args of a script, read without importing it."""
    try:
        tree = ast.parse((ROOT / script).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise Refused(f"{script} cannot be read: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            return {field.target.id.replace("_", "-"): ast.unparse(field.annotation) for field in fields}
    raise Refused(f"{script} has no class Args, so that its flags are not known: write the suite in suites.py")


def parse(flag, text, annotation):
    """The text as the type of the flag. Raises Refused where it is none."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    if "None" in kinds and text.lower() == "none":
        return None
    if kinds[0].startswith("Literal"):
        allowed = ast.literal_eval(kinds[0].removeprefix("Literal"))
        if text in allowed:
            return text
        raise Refused(f"--set {flag}={text}: choose one of {', '.join(allowed)}")
    try:
        if kinds[0] == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kinds[0] == "int":
            number = float(text.replace("_", ""))
            if number != int(number) or abs(number) > 1e15:
                raise ValueError
            return int(number)
        if kinds[0] == "float" and not math.isfinite(float(text)):
            raise ValueError
        return float(text) if kinds[0] == "float" else text
    except (KeyError, ValueError, OverflowError):
        kind = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kinds[0]]
        raise Refused(f"--set {flag}={text}: give {kind}") from None
