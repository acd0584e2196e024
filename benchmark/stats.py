"""Statistics of the report: pure functions of arrays, after "Deep RL at the edge of the statistical precipice"
(arXiv 2108.13264).

`scores` is an array (runs, tasks): the runs of one algorithm, a column per task. The statistics of scores also take
leading dimensions, (..., runs, tasks) -> (...), so that all resamples of a bootstrap are one call.
"""

import numpy as np

MIN_RUNS = 3  # fewer have no interval
CHUNK = 500_000  # numbers of a bootstrap that are in memory at once


def mean(scores):
    """Mean over runs and tasks: (..., runs, tasks) -> (...)"""
    return checked(scores).mean(axis=(-2, -1))[()]


def median(scores):
    """Median over tasks of each task's mean over runs: (..., runs, tasks) -> (...). Of one task, that is its mean."""
    return np.median(checked(scores).mean(axis=-2), axis=-1)[()]


def iqm(scores):
    """Interquartile mean: the mean of the middle half of all runs of all tasks, (..., runs, tasks) -> (...).

    A quarter of the scores, rounded down, is cut at each end. So of fewer than four scores it is the mean.
    """
    scores = checked(scores)
    scores = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = scores.shape[-1] // 4
    return scores[..., cut : scores.shape[-1] - cut].mean(axis=-1)[()]


def optimality_gap(scores, gamma=1.0):
    """How far the scores fall short of gamma: gamma - mean(min(score, gamma)), (..., runs, tasks) -> (...).

    Not 1 - mean: what a run has above gamma does not make up for what another lacks.
    """
    return (gamma - np.minimum(checked(scores), gamma).mean(axis=(-2, -1)))[()]


def probability_of_improvement(x, y):
    """P(a run of x scores above a run of y), a tie counting one half, averaged over tasks: Mann-Whitney's U / nm.

    x: (..., n, tasks), y: (..., m, tasks) -> (...)
    """
    x, y = checked(x), checked(y)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y must have the same tasks, not {x.shape[-1]} and {y.shape[-1]}")
    wins = np.sign(x[..., :, None, :] - y[..., None, :, :])  # (..., n, m, tasks)
    return ((wins.mean(axis=(-3, -2, -1)) + 1) / 2)[()]


def performance_profile(scores, thresholds):
    """Share of runs that score above each threshold: (..., runs, tasks), (n,) -> (..., n)"""
    return (checked(scores)[..., None] > np.asarray(thresholds)).mean(axis=(-3, -2))


def stratified_bootstrap(scores, statistic, reps=10_000, seed=0, batched=False):
    """95 % percentile interval (low, high) of statistic(scores), resampling runs within each task.

    scores: (runs, tasks), or a tuple of such arrays, resampled independently, for a statistic of several. statistic:
    takes (runs, tasks), returns a number or an array; one of this module, or any with batched=True, is called with
    leading dimensions instead of once per resample. Raises ValueError for fewer than 3 runs, of which a resample says
    nothing about the next run.
    """
    arrays = [checked(x) for x in (scores if isinstance(scores, tuple) else (scores,))]
    for x in arrays:
        if x.ndim != 2:
            raise ValueError(f"scores must be (runs, tasks), not {x.shape}")
        if len(x) < MIN_RUNS:
            raise ValueError(f"no interval from fewer than {MIN_RUNS} runs per task, here {len(x)}")
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK // int(np.prod([len(x) for x in arrays]) * arrays[0].shape[1]))
    values = []
    for start in range(0, reps, at_once):
        size = min(at_once, reps - start)
        indices = [rng.integers(len(x), size=(size, *x.shape)) for x in arrays]
        resamples = [np.take_along_axis(x[None], index, axis=1) for x, index in zip(arrays, indices, strict=True)]
        if batched or statistic in (mean, median, iqm, optimality_gap, probability_of_improvement):
            values.extend(statistic(*resamples))
        else:
            values.extend(statistic(*one) for one in zip(*resamples, strict=True))
    low, high = np.percentile(np.asarray(values), [2.5, 97.5], axis=0)
    return (float(low), float(high)) if low.ndim == 0 else (low, high)


def paired_difference(x, y, reps=10_000, seed=0):
    """Mean of x - y over seeds with its 95 % percentile bootstrap interval.

    x, y: (seeds,), the same seed at the same place. Returns (mean, low, high, wins); wins counts the seeds with x > y,
    a tie is no win. The bootstrap resamples seeds, keeping pairs. low and high are None for fewer than 3 seeds, where
    an interval means nothing; with 3 to 5 it is still narrower than the truth, so read it beside the single seeds.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size == 0:
        raise ValueError(f"x and y must be equally long, one value per seed, not {x.shape} and {y.shape}")
    difference = x - y
    if not np.isfinite(difference).all():
        raise ValueError("x and y must be finite: leave out the seeds without a result")
    low = high = None
    if difference.size >= MIN_RUNS:
        indices = np.random.default_rng(seed).integers(difference.size, size=(reps, difference.size))
        low, high = map(float, np.percentile(difference[indices].mean(axis=1), [2.5, 97.5]))
    return float(difference.mean()), low, high, int((x > y).sum())


def area_under_curve(steps, returns):
    """Mean height of a learning curve, (n,) steps and returns: trapezoids, divided by last minus first step."""
    steps, returns = curve(steps, returns, 2)
    return float(np.trapezoid(returns, steps) / (steps[-1] - steps[0]))


def steps_to_threshold(steps, returns, threshold):
    """The first of the steps (n,) at which the return reaches the threshold, None if none does."""
    steps, returns = curve(steps, returns, 1)
    reached = np.flatnonzero(returns >= threshold)
    return float(steps[reached[0]]) if reached.size else None


def curve(steps, returns, points):
    steps, returns = np.asarray(steps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if steps.ndim != 1 or steps.shape != returns.shape or steps.size < points or not (np.diff(steps) > 0).all():
        raise ValueError("a curve needs two points or more, at increasing steps" if points > 1 else "not a curve")
    return steps, returns


def checked(scores):
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim < 2 or 0 in scores.shape:
        raise ValueError(f"scores must be (runs, tasks) with one of each or more, not {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite: leave out the runs without a result")
    return scores
