"""How numbers look in reports."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusescout.report import bars
from fusescout.report import facts
from fusescout.report import numbers as n
from fusescout.session import Interval


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_never_fail_and_never_use_exponents(value: float) -> None:
    interval = Interval(mid=value, low=value, high=value)
    shown = [
        n.significant(value),
        n.duration(value),
        n.percent(value),
        n.timing(interval),
        n.speedup(interval),
        n.payback(value),
        n.nbytes(value),
        n.flops(value),
        n.unit_for([value]).show(value),
        str(bars.bar(interval, bars.scale([interval]))),
    ]
    for text in shown:
        assert "nan" not in text.lower()
        assert not re.search(r"\de[+-]?\d", text)


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_three_significant_digits_are_right(value: float) -> None:
    assert math.isclose(float(n.significant(value).replace(",", "")), value, rel_tol=5.1e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (0.01234, "0.0123 µs"),
        (812.4, "812 µs"),
        (999.6, "1.00 ms"),
        (1234.0, "1.23 ms"),
        (4.56e6, "4.56 s"),
        (9.999, "10.0 µs"),
    ],
)
def test_durations_scale(value: float, text: str) -> None:
    assert n.duration(value) == text


def test_speedups_carry_their_interval() -> None:
    gain = Interval(mid=1.234, low=1.2, high=1.2649)
    assert n.speedup(gain) == "1.23× [1.20–1.26]"
    assert facts.speedup_text(gain) == "1.23× [1.20–1.26]"
    assert facts.speedup_text(Interval(mid=1.01, low=0.99, high=1.03)) == "1.01× [0.99–1.03], no difference"
    assert n.speedup(Interval(mid=math.nan, low=0, high=1)) == n.NOTHING


def test_ratio_of_separate_intervals_is_the_widest() -> None:
    ratio = n.ratio(Interval(mid=10, low=9, high=11), Interval(mid=5, low=4, high=6))
    assert ratio is not None
    assert (ratio.low, ratio.mid, ratio.high) == (9 / 6, 2.0, 11 / 4)
    assert n.ratio(Interval(mid=1, low=1, high=1), Interval(mid=0, low=0, high=0)) is None
