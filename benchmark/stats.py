"""Statistics of the report: pure functions of arrays."""

import numpy as np


def paired_difference(x, y, reps=10_000, seed=0):
    """Mean of x - y over seeds with its 95 % percentile bootstrap interval (arXiv 2108.13264 on why not a point alone).

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
    if difference.size >= 3:
        indices = np.random.default_rng(seed).integers(difference.size, size=(reps, difference.size))
        low, high = map(float, np.percentile(difference[indices].mean(axis=1), [2.5, 97.5]))
    return float(difference.mean()), low, high, int((x > y).sum())


def area_under_curve(steps, returns):
    """Mean height of a learning curve, (n,) steps and returns: trapezoids, divided by last minus first step."""
    steps, returns = np.asarray(steps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if steps.ndim != 1 or steps.shape != returns.shape or steps.size < 2 or not (np.diff(steps) > 0).all():
        raise ValueError("a curve needs two points or more, at increasing steps")
    return float(np.trapezoid(returns, steps) / (steps[-1] - steps[0]))
