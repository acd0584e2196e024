"""Statistics of the report: pure functions of arrays, after "Deep RL at the edge of the statistical precipice"
(arXiv 2108.13264).

`scores` is an array (runs, tasks): the runs of one algorithm, a column per task, NaN where a task has fewer runs than
others. Each task counts the same, however many runs it has. The statistics of scores also take leading dimensions,
(..., runs, tasks) -> (...), so that all resamples of a bootstrap are one call.
"""

import numpy as np

MIN_RUNS = 3  # fewer have no interval
CHUNK = 500_000  # numbers of a bootstrap that are in memory at once


def mean(scores):
    """Mean over tasks of each task's mean over runs: (..., runs, tasks) -> (...)"""
    return np.nanmean(checked(scores), axis=-2).mean(axis=-1)[()]


def median(scores):
    """Median over tasks of each task's mean over runs: (..., runs, tasks) -> (...). Of one task, that is its mean."""
    return np.median(np.nanmean(checked(scores), axis=-2), axis=-1)[()]


def iqm(scores):
    """Interquartile mean: the mean of the middle half of all runs of all tasks, (..., runs, tasks) -> (...).

    Cut are the scores that lie within the lowest or the highest quarter of the weight, a run of a task with n runs
    having the weight 1/n. With as many runs of each task, that is a quarter of all scores at each end, rounded down; of
    fewer than four scores it is the mean.
    """
    scores = checked(scores)
    weights = np.where(np.isnan(scores), 0, scores.shape[-2] / counts(scores)[..., None, :])
    scores, weights = (x.reshape(*x.shape[:-2], -1) for x in (np.nan_to_num(scores), weights))
    order = np.argsort(scores, axis=-1)
    scores, weights = (np.take_along_axis(x, order, axis=-1) for x in (scores, weights))
    upto = weights.cumsum(axis=-1)
    total = upto[..., -1:]
    kept = weights * (upto > total / 4 + 1e-9) * (total - upto + weights > total / 4 + 1e-9)
    return ((kept * scores).sum(axis=-1) / kept.sum(axis=-1))[()]


def optimality_gap(scores, gamma=1.0):
    """How far the scores fall short of gamma: gamma - mean(min(score, gamma)), (..., runs, tasks) -> (...).

    Not 1 - mean: what a run has above gamma does not make up for what another lacks.
    """
    return gamma - mean(np.minimum(checked(scores), gamma))


def probability_of_improvement(x, y):
    """P(a run of x scores above a run of y), a tie counting one half, averaged over tasks: Mann-Whitney's U / nm.

    x: (..., n, tasks), y: (..., m, tasks) -> (...)
    """
    x, y = checked(x), checked(y)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y must have the same tasks, not {x.shape[-1]} and {y.shape[-1]}")
    wins = np.sign(x[..., :, None, :] - y[..., None, :, :])  # (..., n, m, tasks)
    return ((np.nanmean(wins, axis=(-3, -2)).mean(axis=-1) + 1) / 2)[()]


def performance_profile(scores, thresholds):
    """Share of runs that score above each threshold, mean over tasks: (..., runs, tasks), (n,) -> (..., n)"""
    scores = checked(scores)
    above = (scores[..., None] > np.asarray(thresholds)).sum(axis=-3)
    return (above / counts(scores)[..., None]).mean(axis=-2)


def stratified_bootstrap(statistic, *scores, reps=10_000, seed=0):
    """95 % percentile interval (low, high) of statistic(*scores), resampling runs within each task.

    scores: arrays (runs, tasks), resampled independently. statistic: (resamples, runs, tasks) of each -> (resamples,)
    or (resamples, n), as those above. Raises ValueError for a task with fewer than 3 runs.
    """
    arrays = [checked(x) for x in scores]
    if (fewest := min(counts(x).min() for x in arrays)) < MIN_RUNS:
        raise ValueError(f"no interval from fewer than {MIN_RUNS} runs per task, here {fewest}")
    arrays = [np.take_along_axis(x, np.isnan(x).argsort(axis=0, kind="stable"), axis=0) for x in arrays]  # NaN last
    rng, values = np.random.default_rng(seed), []
    at_once = max(1, CHUNK // int(np.prod([len(x) for x in arrays]) * arrays[0].shape[1]))
    for start in range(0, reps, at_once):
        size, resamples = min(at_once, reps - start), []
        for x in arrays:
            drawn = np.take_along_axis(x[None], rng.integers(counts(x), size=(size, *x.shape)), axis=1)
            resamples.append(np.where(np.isnan(x), np.nan, drawn))
        values.extend(statistic(*resamples))
    low, high = np.percentile(np.asarray(values), [2.5, 97.5], axis=0)
    return (float(low), float(high)) if low.ndim == 0 else (low, high)


def paired_difference(x, y, reps=10_000, seed=0):
    """Mean of x - y over seeds with its 95 % percentile bootstrap interval: (mean, low, high, wins).

    x, y: (seeds,), the same seed at the same place. wins counts the seeds with x > y, a tie is no win. low and high
    are None for fewer than 3 seeds; with 3 to 5 they are still narrower than the truth.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size == 0 or not np.isfinite(x - y).all():
        raise ValueError(f"x and y must be finite and equally long, one value per seed, not {x.shape} and {y.shape}")
    low = high = None
    if x.size >= MIN_RUNS:
        indices = np.random.default_rng(seed).integers(x.size, size=(reps, x.size))
        low, high = map(float, np.percentile((x - y)[indices].mean(axis=1), [2.5, 97.5]))
    return float((x - y).mean()), low, high, int((x > y).sum())


def counts(scores):
    """Runs of each task: (..., runs, tasks) -> (..., tasks)"""
    return (~np.isnan(scores)).sum(axis=-2)


def checked(scores):
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim < 2 or 0 in scores.shape or np.isinf(scores).any() or not counts(scores).all():
        raise ValueError(f"scores must be (runs, tasks), finite, with a run of each task, not of shape {scores.shape}")
    return scores
