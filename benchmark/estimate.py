"""How long runs will take: from the steps per second of finished ones, else from rates that were measured."""

from datetime import timedelta
from statistics import median

from benchmark.runs import read_json, status

# Seconds on one core of the machine of README, fitted to the column sps of benchmark/results/*.csv; evaluation and the
# warm start of a language model come on top.
ENVIRONMENT_STEP, GRADIENT_STEP = 1e-4, 3e-3  # control: HalfCheetah-v5, networks of 64-64, minibatches of 64 to 256
COMPLETION, LLM_GRADIENT_STEP = 1.7e-3, 15e-3  # the GPT of 230,000 parameters
RATES = "from stated rates of one 2-core machine; it may be another on yours"


def stated_seconds(run):
    """Seconds of a run by the stated rates; None for flags that do not say its size, or that its script will refuse."""
    flags = run.flags
    gradient_steps = flags.get("num-minibatches", 1) * flags.get("update-epochs", 1)
    try:
        if "num-updates" in flags:
            batch = flags["num-prompts"] * flags["num-generations"]
            seconds = flags["num-updates"] * (batch * COMPLETION + gradient_steps * LLM_GRADIENT_STEP)
        else:
            updates = flags["total-timesteps"] / (flags["num-envs"] * flags["num-steps"])
            seconds = flags["total-timesteps"] * ENVIRONMENT_STEP + updates * gradient_steps * GRADIENT_STEP
    except (KeyError, ZeroDivisionError):
        return None
    return seconds if seconds > 0 else None


def estimate(runs):
    """({run name: seconds} of the runs that are not finished, on what that rests). Costs a look into each folder."""
    measured, seconds = {}, {}
    for run in runs:
        stated = stated_seconds(run)
        if status(run) != "finished":
            seconds[run.name] = stated
        elif stated and (sps := read_json(run.folder / "result.json").get("sps")):
            size = run.flags.get("total-timesteps")
            size = size or run.flags["num-updates"] * run.flags["num-prompts"] * run.flags["num-generations"]
            measured.setdefault(run.script, []).append(size / sps / stated)
    scripts = {run.name: run.script for run in runs}
    factor = median([x for factors in measured.values() for x in factors]) if measured else 1
    factors = {script: median(measured[script]) if script in measured else factor for script in scripts.values()}
    seconds = {name: x and x * factors[scripts[name]] for name, x in seconds.items()}
    finished = sum(map(len, measured.values()))
    return seconds, f"from the steps per second of {finished} finished runs" if finished else RATES


def duration(seconds):
    return "unknown" if seconds is None else str(timedelta(seconds=round(seconds)))
