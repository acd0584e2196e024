"""Statistics of the benchmark: numbers worked by hand, all resamples listed, and rliable where it can be imported."""

import itertools

import numpy as np
import pytest

from benchmark import stats
from benchmark.stats import (
    iqm,
    optimality_gap,
    paired_difference,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)

SCORES = np.array([[0, 1], [0.5, 2], [1, 3], [2, 4]])  # four runs, two tasks


def test_aggregates_by_hand():
    assert optimality_gap(SCORES) == 1 - (0 + 1 + 0.5 + 1 + 1 + 1 + 1 + 1) / 8 == 0.1875
    assert iqm(SCORES) == (1 + 1 + 2 + 2) / 4 == 1.5
    assert stats.mean(SCORES) == 13.5 / 8
    assert stats.median(SCORES) == (3.5 / 4 + 10 / 4) / 2
    assert optimality_gap(SCORES, gamma=2.0) == 2 - (0 + 0.5 + 1 + 2 + 1 + 2 + 2 + 2) / 8
    assert isinstance(iqm(SCORES), float)


def test_iqm_of_fewer_than_four_scores_is_the_mean():
    assert iqm([[0.0], [1.0], [8.0]]) == 3.0
    assert iqm([[0.0], [1.0], [3.0], [8.0]]) == 2.0
    assert iqm(np.arange(7)[:, None]) == 3.0  # 7 // 4 = 1 is cut at each end


def test_probability_of_improvement_by_hand():
    x, y = [[1.0, 0.0], [2.0, 5.0]], [[1.0, 9.0], [0.0, 9.0], [1.5, 5.0]]
    # task 0: 1 beats 0, ties 1, loses to 1.5; 2 beats all: 4.5 of 6. task 1: 5 ties 5, all else lost: 0.5 of 6
    assert probability_of_improvement(x, y) == pytest.approx((4.5 / 6 + 0.5 / 6) / 2)
    assert probability_of_improvement(y, x) == pytest.approx(1 - (4.5 / 6 + 0.5 / 6) / 2)
    assert probability_of_improvement(x, x) == 0.5


def test_profile_by_hand():
    assert performance_profile(SCORES, [-1, 0, 1, 4]).tolist() == [1, 7 / 8, 4 / 8, 0]


@pytest.mark.parametrize("statistic", [iqm, stats.mean, stats.median, optimality_gap])
def test_leading_dimensions_are_separate(statistic):
    batch = np.random.default_rng(0).normal(size=(5, 2, 6, 3))
    each = [[statistic(scores) for scores in row] for row in batch]
    np.testing.assert_allclose(statistic(batch), each, rtol=1e-12)
    other = batch + 0.3
    wins = [[probability_of_improvement(a, b) for a, b in zip(*rows, strict=True)] for rows in zip(batch, other)]  # noqa: B905
    np.testing.assert_allclose(probability_of_improvement(batch, other), wins, rtol=1e-12)


def test_bootstrap_against_all_resamples():
    """One task of three runs has 27 resamples, equally likely; the extreme ones have 3.7 % each."""
    means = [np.mean(resample) for resample in itertools.product([0.0, 3.0, 9.0], repeat=3)]
    assert stratified_bootstrap(stats.mean, np.array([[0.0], [3.0], [9.0]])) == (min(means), max(means))


def test_bootstrap_is_stratified_by_task():
    scores = np.array([[0.0, 1000.0]] * 4)  # no spread within a task: whatever is drawn, the mean is the same
    assert stratified_bootstrap(stats.mean, scores) == (500.0, 500.0)
    low, high = stratified_bootstrap(stats.mean, scores + np.arange(4)[:, None])
    assert 500 < low < 501.5 < high < 503
    # tasks are drawn independently: narrower by sqrt 2 than if whole rows were drawn
    one = stratified_bootstrap(stats.mean, np.arange(10.0)[:, None])
    two = stratified_bootstrap(stats.mean, np.arange(10.0)[:, None].repeat(2, 1))
    assert (two[1] - two[0]) / (one[1] - one[0]) == pytest.approx(0.5**0.5, rel=0.05)


def test_bootstrap_of_any_statistic_in_any_chunks(monkeypatch):
    scores = np.random.default_rng(1).normal(size=(5, 3))
    known = stratified_bootstrap(iqm, scores, reps=200)
    assert stratified_bootstrap(iqm, scores, reps=200) == known
    assert stratified_bootstrap(iqm, scores, reps=200, seed=1) != known
    monkeypatch.setattr(stats, "CHUNK", 150)
    low, high = stratified_bootstrap(iqm, scores, reps=2000)
    assert (low, high) == pytest.approx(known, abs=0.15)
    profile = stratified_bootstrap(lambda x: performance_profile(x, [-1, 0, 1]), scores, reps=100)
    assert [x.shape for x in profile] == [(3,), (3,)]


def test_bootstrap_of_two_samples():
    x, y = np.arange(6.0)[:, None], np.arange(6.0)[:, None] + 1
    low, high = stratified_bootstrap(probability_of_improvement, x, y)
    assert 0 <= low < probability_of_improvement(x, y) < high < 1


NAN = np.nan
RAGGED = np.array([[0, NAN], [4, 1], [NAN, NAN], [8, 3], [NAN, 5]])  # runs 0 4 8 and 1 3 5


def test_tasks_with_other_numbers_of_runs_by_hand():
    """Two tasks: four runs, and two. A run of the second weighs twice as much as one of the first."""
    scores = np.array([[0.0, 1.0], [2.0, 9.0], [3.0, NAN], [4.0, NAN]])
    assert stats.mean(scores) == stats.median(scores) == (9 / 4 + 10 / 2) / 2
    assert optimality_gap(scores, gamma=3) == 3 - (8 / 4 + 4 / 2) / 2
    # sorted, with weights 1 to 8 parts: 0 (1), 1 (2), 2 (1), 3 (1), 4 (1), 9 (2); a quarter is 2 parts: 0 and 9 are cut
    assert iqm(scores) == pytest.approx((2 * 1 + 2 + 3 + 4) / 5)
    # task 0: of 4 runs 2 are above 2.5; task 1: 1 of 2
    assert probability_of_improvement(scores, [[2.5, 2.5], [NAN, 2.5]]) == (2 / 4 + 1 / 2) / 2
    assert performance_profile(scores, [2.5]).tolist() == [(2 / 4 + 1 / 2) / 2]


def test_missing_runs_stand_anywhere_and_are_never_drawn():
    full = np.array([[0.0, 1], [4, 3], [8, 5]])
    for statistic in (iqm, stats.mean, stats.median, optimality_gap):
        assert statistic(RAGGED) == statistic(full)
        low, high = stratified_bootstrap(statistic, RAGGED)
        assert (low, high) == pytest.approx(stratified_bootstrap(statistic, full), abs=0.25)
    assert stratified_bootstrap(stats.mean, np.array([[0.0, 1000], [0, 1000], [0, 1000], [0, NAN]])) == (500, 500)
    with pytest.raises(ValueError, match="fewer than 3 runs per task, here 2"):
        stratified_bootstrap(iqm, RAGGED[:4])


def test_coverage_of_the_interval():
    """Of many samples of 20 normal scores, about 95 % of the intervals hold the true mean, 0."""
    rng = np.random.default_rng(0)
    held = [low <= 0 <= high for low, high in (
        stratified_bootstrap(stats.mean, rng.normal(size=(20, 1)), reps=500) for _ in range(400)
    )]  # fmt: skip
    assert 0.89 < np.mean(held) < 0.97


@pytest.mark.parametrize("runs", [1, 2])
def test_no_bootstrap_of_fewer_than_three_runs(runs):
    with pytest.raises(ValueError, match="fewer than 3 runs"):
        stratified_bootstrap(iqm, np.zeros((runs, 4)))


@pytest.mark.parametrize("scores", [[1.0, 2.0], [], [[]], [[0.0, np.nan]], [[np.inf]]])
def test_scores_of_another_kind_are_refused(scores):
    for statistic in (iqm, stats.mean, stats.median, optimality_gap):
        with pytest.raises(ValueError, match="scores must be"):
            statistic(scores)


def test_tasks_must_agree():
    with pytest.raises(ValueError, match="same tasks"):
        probability_of_improvement(np.zeros((2, 3)), np.zeros((2, 1)))


def test_paired_difference_by_hand():
    mean, low, high, wins = paired_difference([3.0, 5.0, 1.0, 8.0], [1.0, 6.0, 1.0, 2.0])  # 2, -1, 0, 6
    assert (mean, wins) == (1.75, 2)  # a tie is no win
    assert -1 <= low < mean < high <= 6
    assert paired_difference([3.0, 5.0, 1.0, 8.0], [1.0, 6.0, 1.0, 2.0]) == (mean, low, high, wins)
    assert paired_difference([1.0, 6.0, 1.0, 2.0], [3.0, 5.0, 1.0, 8.0])[0] == -1.75


def test_paired_difference_of_three_seeds_against_all_resamples():
    difference = np.array([0.0, 3.0, 9.0])
    means = [np.mean(resample) for resample in itertools.product(difference, repeat=3)]  # 27, equally likely
    _, low, high, _ = paired_difference(difference, np.zeros(3))
    assert (low, high) == (min(means), max(means))  # each end has probability 1/27, more than 2.5 %


def test_paired_difference_keeps_pairs():
    x = np.array([100.0, 2000.0, 30000.0])  # the seeds differ much, the difference not at all
    assert paired_difference(x, x - 5) == (5.0, 5.0, 5.0, 3)


@pytest.mark.parametrize("seeds", [1, 2])
def test_no_interval_from_fewer_than_three_seeds(seeds):
    assert paired_difference(np.full(seeds, 2.0), np.full(seeds, 1.0)) == (1.0, None, None, seeds)


@pytest.mark.parametrize(
    ("x", "y"), [([1.0], [1.0, 2.0]), ([], []), ([[1.0, 2.0]], [[1.0, 2.0]]), ([1.0, np.nan], [1.0, 1.0])]
)
def test_paired_difference_refuses_what_is_not_paired(x, y):
    with pytest.raises(ValueError, match="x and y"):
        paired_difference(x, y)


def test_against_rliable():
    """rliable 1.2 needs pandas < 3."""
    metrics = pytest.importorskip("rliable.metrics", exc_type=ImportError)
    library = pytest.importorskip("rliable.library", exc_type=ImportError)
    rng = np.random.default_rng(0)
    for runs, tasks in ((3, 1), (5, 2), (10, 7), (4, 10)):
        x, y = rng.normal(0.5, 1, (runs, tasks)), np.round(rng.normal(0.4, 1, (runs + 1, tasks)), 1)
        assert iqm(x) == pytest.approx(metrics.aggregate_iqm(x), abs=1e-12)
        assert stats.mean(x) == pytest.approx(metrics.aggregate_mean(x), abs=1e-12)
        assert stats.median(x) == pytest.approx(metrics.aggregate_median(x), abs=1e-12)
        assert optimality_gap(x) == pytest.approx(metrics.aggregate_optimality_gap(x), abs=1e-12)
        ours = probability_of_improvement(np.round(x, 1), y)
        assert ours == pytest.approx(metrics.probability_of_improvement(np.round(x, 1), y), abs=1e-12)
        taus = np.linspace(-1, 2, 7)
        profiles, _ = library.create_performance_profile({"x": x}, taus, reps=2)
        np.testing.assert_allclose(performance_profile(x, taus), profiles["x"], atol=1e-12)
    _, intervals = library.get_interval_estimates(
        {"x": x}, lambda s: np.array([metrics.aggregate_iqm(s), metrics.aggregate_mean(s)]), reps=3000
    )
    for column, statistic in enumerate((iqm, stats.mean)):
        ours = stratified_bootstrap(statistic, x)
        assert ours == pytest.approx(intervals["x"][:, column], abs=0.05)
