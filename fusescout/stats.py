"""Intervals for timings: a percentile interval of one median, and a paired bootstrap of the ratio of two.

Contenders are timed in interleaved rounds, so round k of one belongs together with round k of another: clock ramps,
heat and neighbours on a shared machine hit both. The ratio is resampled by round for that reason, with a fixed seed,
so that the same samples always give the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusescout.session import Interval

RESAMPLES = 4000
SEED = 20240229
LEVEL = 0.95


def median_interval(
    samples: Sequence[float], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Median of `samples` and the bootstrap percentile interval of that median, in the samples' unit.

    Raises:
        ValueError: no samples, or one that isn't finite.
    """
    values = _checked(samples)
    medians = np.median(values[_draw(len(values), resamples, seed)], axis=1)
    return _interval(float(np.median(values)), medians, level, len(values))


def ratio(
    old: Sequence[float], new: Sequence[float], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """How many times as fast `new` is: median(old) / median(new), with its paired bootstrap interval.

    Args:
        old: times per round of the one that is compared against.
        new: times of the same rounds; a longer list is cut to the rounds both have.
        level: coverage of the interval.
        resamples: bootstrap resamples of the rounds.
        seed: seed of the resampling.

    Raises:
        ValueError: no common rounds, or times that aren't finite and above zero.
    """
    rounds = min(len(old), len(new))
    before, after = _checked(old[:rounds]), _checked(new[:rounds])
    if before.min() <= 0 or after.min() <= 0:
        raise ValueError("times must be above zero to have a ratio")
    draw = _draw(rounds, resamples, seed)
    ratios = np.median(before[draw], axis=1) / np.median(after[draw], axis=1)
    return _interval(float(np.median(before) / np.median(after)), ratios, level, rounds)


def _draw(rounds: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Round numbers of each resample, (resamples, rounds)."""
    return np.random.default_rng(seed).integers(0, rounds, size=(resamples, rounds))


def _interval(mid: float, resampled: NDArray[np.float64], level: float, samples: int) -> Interval:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    # A skewed sample can put its own median just outside of the percentile interval.
    return Interval(mid=mid, low=min(float(low), mid), high=max(float(high), mid), samples=samples)


def _checked(samples: Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"need at least one finite sample, got {list(samples)[:5]}")
    return values
