"""How numbers look in every report: three significant digits, a unit, and an interval wherever one was measured.

All functions take NaN and infinities; what is not known is shown as an en dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from fusescout.session import Interval

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit for one column: its name and how many base units it holds."""

    name: str
    size: float

    def show(self, value: float | None, digits: int = 3) -> str:
        """The value in this unit, without the unit's name."""
        return NOTHING if value is None else significant(value / self.size, digits)

    def interval(self, interval: Interval | None) -> str:
        """ "61.8 [61.5–62.1]", without the unit's name."""
        return NOTHING if interval is None or math.isnan(interval.mid) else _bracket(interval, self.size, "")


TIMES = (Unit("µs", 1.0), Unit("ms", 1e3), Unit("s", 1e6))
BYTES = (Unit("B", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))
COUNTS = (Unit("", 1.0), Unit("k", 1e3), Unit("M", 1e6), Unit("G", 1e9), Unit("T", 1e12))
FLOPS = (Unit("FLOP", 1.0), Unit("kFLOP", 1e3), Unit("MFLOP", 1e6), Unit("GFLOP", 1e9), Unit("TFLOP", 1e12))


def unit_for(values: Iterable[float | None], units: tuple[Unit, ...] = TIMES) -> Unit:
    """The unit that suits the largest finite value."""
    finite = [abs(v) for v in values if v is not None and math.isfinite(v)]
    top = max(finite, default=0.0)
    return next((u for u in reversed(units) if top >= 0.9995 * u.size), units[0])


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits, never an exponent: "0.0123", "1.23", "1,230"."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    return f"{_rounded(value, digits):,f}"


def duration(us: float | None) -> str:
    """ "812 µs", "1.23 ms", "4.56 s"."""
    return NOTHING if us is None or math.isnan(us) else _with_unit(us, TIMES)


def nbytes(count: float) -> str:
    return _with_unit(count, BYTES)


def quantity(count: float) -> str:
    """ "109 M", "99.6 k", "812": for what is counted."""
    return _with_unit(count, COUNTS).rstrip()


def flops(count: float) -> str:
    return _with_unit(count, FLOPS)


def timing(interval: Interval | None) -> str:
    """ "1.23 ms [1.20–1.26]"."""
    if interval is None or math.isnan(interval.mid):
        return NOTHING
    unit = unit_for([interval.mid])
    return _bracket(interval, unit.size, f" {unit.name}")


def speedup(interval: Interval | None) -> str:
    """ "1.23× [1.20–1.26]"."""
    return NOTHING if interval is None or math.isnan(interval.mid) else _bracket(interval, 1.0, "×")


def undecided(interval: Interval | None) -> bool:
    """Whether 1.0 lies in the interval: no difference was shown."""
    return interval is not None and not math.isnan(interval.mid) and interval.low <= 1.0 <= interval.high


def percent(share: float | None) -> str:
    """ "12.3 %"; small shares are "<0.01 %", never a bare zero."""
    if share is None or math.isnan(share):
        return NOTHING
    if 0 < share < 1e-4:
        return "<0.01 %"
    return f"{significant(share * 100) if share >= 0.01 or not share else f'{share * 100:.2f}'} %"


def payback(calls: float | None) -> str:
    """ "pays back after 51,200 calls": three digits, as an estimate should not look exact."""
    if calls is None or math.isnan(calls):
        return ""
    return f"pays back after {significant(math.ceil(calls))} calls" if math.isfinite(calls) else "never pays back"


def ratio(old: Interval | None, new: Interval | None) -> Interval | None:
    """Old over new, with the widest interval the two allow (they were not measured as pairs)."""
    if old is None or new is None or not (new.low > 0 and new.mid > 0 and new.high > 0):
        return None
    return Interval(mid=old.mid / new.mid, low=old.low / new.high, high=old.high / new.low)


def _with_unit(value: float, units: tuple[Unit, ...]) -> str:
    unit = unit_for([value], units)
    return f"{unit.show(value)} {unit.name}"


def _bracket(interval: Interval, size: float, unit: str) -> str:
    """Middle and ends with equally many decimals, so that they can be compared by eye."""
    mid = interval.mid / size
    places = max(0, -int(_rounded(mid, 3).as_tuple().exponent)) if math.isfinite(mid) and mid else 2

    def show(value: float) -> str:
        return f"{value / size:,.{places}f}" if math.isfinite(value) else significant(value)

    return f"{show(interval.mid)}{unit} [{show(interval.low)}–{show(interval.high)}]"


def _rounded(value: float, digits: int) -> Decimal:
    """The value with `digits` significant digits, trailing zeros kept."""
    return Decimal(f"{value:.{digits - 1}e}")
