"""Intervals against oracles written out in plain Python, and their statistical promises."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from fusescout.stats import median_interval
from fusescout.stats import ratio

times = st.lists(st.floats(min_value=0.01, max_value=1e6), min_size=2, max_size=40)


def test_mid_is_the_plain_median() -> None:
    rng = random.Random(3)
    samples = [rng.lognormvariate(3, 0.2) for _ in range(31)]
    assert median_interval(samples).mid == pytest.approx(statistics.median(samples))
    assert median_interval(samples).samples == 31


def test_interval_matches_a_bootstrap_written_out() -> None:
    rng = random.Random(5)
    samples = [rng.gauss(100, 5) for _ in range(25)]
    medians = sorted(statistics.median(rng.choices(samples, k=25)) for _ in range(4000))
    found = median_interval(samples)
    assert found.low == pytest.approx(medians[100], abs=1.0)
    assert found.high == pytest.approx(medians[3899], abs=1.0)


@settings(max_examples=40, deadline=None)
@given(times, st.floats(min_value=1e-3, max_value=1e3))
def test_scale_invariance(samples: list[float], scale: float) -> None:
    other = samples[::-1]
    plain = ratio(samples, other, resamples=300)
    scaled = ratio([s * scale for s in samples], [s * scale for s in other], resamples=300)
    assert (scaled.mid, scaled.low, scaled.high) == pytest.approx((plain.mid, plain.low, plain.high))
    grown = median_interval([s * scale for s in samples], resamples=300)
    assert grown.low == pytest.approx(median_interval(samples, resamples=300).low * scale)


@settings(max_examples=40, deadline=None)
@given(times)
def test_low_mid_high_are_ordered_and_within_the_samples(samples: list[float]) -> None:
    found = median_interval(samples, resamples=200)
    assert min(samples) <= found.low <= found.mid <= found.high <= max(samples)


def test_an_a_a_run_contains_one_about_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(0)
    runs, hits = 400, 0
    for k in range(runs):
        drift = 1 + 0.3 * np.linspace(0, 1, 40)
        a, b = drift * rng.lognormal(3, 0.05, (2, 40))
        found = ratio(list(a), list(b), resamples=400, seed=k)
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / runs <= 0.995


def test_pairing_removes_drift_that_both_share() -> None:
    rng = np.random.default_rng(1)
    drift = np.where(np.arange(60) % 2 == 0, 1.0, 4.0)  # a bimodal machine
    base = 100 * drift * rng.lognormal(0, 0.01, 60)
    found = ratio(list(1.2 * base * rng.lognormal(0, 0.005, 60)), list(base))
    assert 1.1 < found.low <= found.high < 1.3


def test_the_verdict_is_repeatable_and_rounds_are_paired() -> None:
    old, new = [10.0, 12.0, 11.0, 10.5], [5.0, 6.0, 5.5]
    assert ratio(old, new) == ratio(old, new)
    assert ratio(old, new).samples == 3
    assert ratio(old, new).mid == pytest.approx(2.0)


@pytest.mark.parametrize("bad", [[], [float("nan")], [1.0, float("inf")]])
def test_unusable_samples_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        median_interval(bad)


def test_a_zero_time_has_no_ratio() -> None:
    with pytest.raises(ValueError, match="above zero"):
        ratio([1.0], [0.0])
