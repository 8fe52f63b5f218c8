"""Bars with interval whiskers as inline SVG: one bar per table row, all on the scale of their table.

A bar stretches with its cell (no text inside, strokes don't scale), so tables stay readable on any width, in print
and with scripts off. It repeats numbers that stand beside it in text, so screen readers skip it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup

from fusescout.session import Interval

LONGEST = 6.0
"""A bar longer than this many times the shortest is cut, with a gap, so that it doesn't flatten the others."""


def scale(intervals: Iterable[Interval | None]) -> float:
    """The value at full width, for `bar`."""
    known = [i for i in intervals if i is not None and math.isfinite(i.mid) and i.mid > 0]
    if not known:
        return 1.0
    ends = [i.high if math.isfinite(i.high) else i.mid for i in known]
    return min(max(ends), LONGEST * min(i.mid for i in known))


def bar(interval: Interval | None, full: float, style: str = "") -> Markup:
    """A bar of the middle with a whisker from low to high; class `style` colours it."""
    if interval is None or not math.isfinite(interval.mid):
        return Markup("")
    cut = interval.mid > full
    width, low, high = (_place(v, full) for v in (interval.mid, interval.low, interval.high))
    shape = Markup('<rect class="{}" y="5" height="10" width="{}"/>').format(style, width)
    if cut:
        shape += Markup('<rect class="gap" x="92" y="4" height="12" width="2"/>')
    elif math.isfinite(interval.low) and math.isfinite(interval.high):
        shape += Markup('<path class="halo" d="{0}"/><path class="whisker" d="{0}"/>').format(
            f"M{low} 10H{high}M{low} 6V14M{high} 6V14"
        )
    return Markup(
        '<svg class="bar" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(shape)


def share(fraction: float) -> Markup:
    """A thin bar in the hot colour: a part of the whole."""
    width = _place(fraction, 1.0) if math.isfinite(fraction) else 0
    return Markup(
        '<svg class="bar" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="hot" y="7" height="6" width="{}"/></svg>'
    ).format(width)


def _place(value: float, full: float) -> float:
    return round(100 * min(max(value / full, 0.0), 1.0), 2) if math.isfinite(value) else 100.0
