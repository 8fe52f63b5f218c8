"""Equal rows summed for the tables of a report: by operator, by module, by kernel; small rows are folded into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

from fusescout.report.facts import finite
from fusescout.report.facts import pattern
from fusescout.session import OpRow
from fusescout.session import Session

SMALL = 0.01
"""Rows below this share of the total are folded into one."""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal rows summed: operators of one name, modules of one path pattern, kernels of one name."""

    name: str
    count: int
    time_us: float
    share: float
    kernels: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    bound: str = ""
    folded: bool = False


def by_op(session: Session) -> list[Group]:
    return fold(_grouped(session.profile.ops, lambda row: row.op))


def by_module(session: Session) -> list[Group]:
    """Innermost modules; equal layers are one row."""
    return fold(_grouped(session.profile.ops, lambda row: pattern(row.module) or "(top level)"))


def kernels(session: Session) -> list[Group]:
    return fold([Group(r.name, r.calls, r.time_us, r.share) for r in session.profile.kernels])


def fold(groups: list[Group]) -> list[Group]:
    """Sort by time; what is below 1 % becomes one row at the end."""
    groups = sorted(groups, key=lambda g: -finite(g.time_us))
    small = [g for g in groups if not finite(g.share) >= SMALL]
    if len(small) < 2:
        return groups
    other = Group(
        f"other ({len(small)} rows below 1 %)",
        sum(g.count for g in small),
        sum(finite(g.time_us) for g in small),
        sum(finite(g.share) for g in small),
        sum(g.kernels for g in small),
        sum(g.flops for g in small),
        sum(g.bytes for g in small),
        folded=True,
    )
    return [*(g for g in groups if finite(g.share) >= SMALL), other]


def _grouped(rows: Iterable[OpRow], name: Callable[[OpRow], str]) -> list[Group]:
    groups: dict[str, list[OpRow]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return [
        Group(
            key,
            len(members),
            sum(finite(m.time_us) for m in members),
            sum(finite(m.share) for m in members),
            sum(m.kernels for m in members),
            sum(finite(m.flops) for m in members),
            sum(finite(m.bytes) for m in members),
            _main_bound(members),
        )
        for key, members in groups.items()
    ]


def _main_bound(rows: Sequence[OpRow]) -> str:
    """The bound that holds for most of the rows' time."""
    weight: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        weight[row.bound] += finite(row.time_us) + 1e-9
    return max(weight, key=lambda k: weight[k], default="")
