"""Draw the collapsed op graph as SVG: data flows from top to bottom, heat is time, skip edges run along the side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from fusescout.report import facts
from fusescout.report import numbers as n
from fusescout.report.opgraph import Box
from fusescout.report.opgraph import Collapsed

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN, LANE, HEAD = 282, 26, 16, 22, 22, 9, 16
COLUMNS, LANES, LABEL_CHARS = 4, 8, 26


@dataclass(frozen=True, slots=True)
class Mark:
    """How a candidate is marked in its boxes: its number in the report, and whether that stands out."""

    text: str
    best: bool


Place = tuple[int, int, int]
"""(row, left edge, top edge), the edges in pixels."""


def draw(graph: Collapsed, marks: Mapping[str, Mark]) -> Markup:
    """The graph as one `<svg>`, or nothing for an empty one.

    Each box links to `#box-<index>`; `marks` are by candidate id.
    """
    if not graph.boxes:
        return Markup("")
    places = _layout(graph)
    lanes = _lanes(graph, places)
    side = max(x for _, x, _ in places) + WIDTH
    width = side + MARGIN + LANE * (1 + max(lanes.values(), default=0))
    height = max(y for _, _, y in places) + HEIGHT + MARGIN
    shapes = [_frame(places, fold, width - 6) for fold in graph.folds]
    shapes += [_edge(places, edge, lanes.get(edge), side) for edge in graph.edges]
    hottest = max(box.share for box in graph.boxes)
    shapes += [_box(box, k, places[k], hottest, marks) for k, box in enumerate(graph.boxes)]
    return Markup(
        '<svg class="graph" role="group" aria-label="Op graph, {} boxes; the same boxes are listed below as text" '
        'width="{}" height="{}" viewBox="0 0 {} {}">{}</svg>'
    ).format(len(graph.boxes), width, height, width, height, Markup("").join(shapes))


def _layout(graph: Collapsed) -> list[Place]:
    """Each box below all it reads from, at most four in a row; a fold has its rows for itself."""
    before: dict[int, list[int]] = defaultdict(list)
    for source, target in graph.edges:
        before[target].append(source)
    starts, ends = {f[0] for f in graph.folds}, {f[1] for f in graph.folds}
    rows: list[list[int]] = []
    row_of: list[int] = []
    heads: set[int] = set()
    floor = 0
    for k in range(len(graph.boxes)):
        if k in starts:
            floor = len(rows)
            heads.add(floor)
        row = max([floor, *(row_of[source] + 1 for source in before[k])])
        while row < len(rows) and len(rows[row]) >= COLUMNS:
            row += 1
        while len(rows) <= row:
            rows.append([])
        rows[row].append(k)
        row_of.append(row)
        floor = len(rows) if k in ends else floor
    widest = max(len(row) for row in rows)
    left = {k: MARGIN + (2 * x + widest - len(row)) * (WIDTH + GAP_X) // 2 for row in rows for x, k in enumerate(row)}
    tops, top = [], MARGIN
    for row in range(len(rows)):
        top += HEAD if row in heads else 0
        tops.append(top)
        top += HEIGHT + GAP_Y
    return [(row_of[k], left[k], tops[row_of[k]]) for k in range(len(graph.boxes))]


def _lanes(graph: Collapsed, places: list[Place]) -> Mapping[tuple[int, int], int]:
    """A lane at the side for each edge that jumps over rows; lanes are shared where edges don't overlap."""
    free_from = [0] * LANES
    lanes: dict[tuple[int, int], int] = {}
    for source, target in sorted(graph.edges, key=lambda e: (places[e[0]][0], places[e[1]][0])):
        top, bottom = places[source][0], places[target][0]
        if bottom > top + 1:
            lane = next((i for i in range(LANES) if free_from[i] <= top), LANES - 1)
            free_from[lane] = max(free_from[lane], bottom)
            lanes[source, target] = lane
    return lanes


def _frame(places: list[Place], fold: tuple[int, int, int], right: int) -> Markup:
    first, last, times = fold
    tops = [places[k][2] for k in range(first, last + 1)]
    top = min(tops) - GAP_Y // 2 - HEAD + 4
    height = max(tops) + HEIGHT + GAP_Y // 2 - 3 - top
    return Markup(
        '<rect class="fold" x="6" y="{}" width="{}" height="{}" rx="4"/><text class="times" x="14" y="{}">× {}</text>'
    ).format(top, right - 6, height, top + 16, times)


def _edge(places: list[Place], edge: tuple[int, int], lane: int | None, side: int) -> Markup:
    (_, left, top), (_, to_left, to_top) = places[edge[0]], places[edge[1]]
    if lane is None:
        x, y, to_x = left + WIDTH // 2, top + HEIGHT, to_left + WIDTH // 2
        shape = Markup('<path class="edge" d="M{0} {1}C{0} {2} {3} {2} {3} {4}"/>')
        return shape.format(x, y, (y + to_top) // 2, to_x, to_top)
    x, y, to_x, to_y = left + WIDTH, top + HEIGHT // 2, to_left + WIDTH, to_top + HEIGHT // 2
    out = side + MARGIN // 2 + LANE * lane
    return Markup('<path class="edge" d="M{0} {1}H{2}Q{3} {1} {3} {4}V{5}Q{3} {6} {2} {6}H{7}"/>').format(
        x, y, out - 5, out, y + 5, to_y - 5, to_y, to_x
    )


def _box(box: Box, index: int, place: Place, hottest: float, marks: Mapping[str, Mark]) -> Markup:
    _, x, y = place
    heat = round(0.6 * (max(box.share, 0.0) / hottest) ** 0.7, 3) if hottest > 0 else 0
    ids = Markup("").join(
        Markup('<tspan class="{}">#{} </tspan>').format("best" if mark.best else "quiet", mark.text)
        for mark in [marks[i] for i in box.candidates if i in marks][:3]
    )
    title = f"{facts.clean(box.label)}: {facts.chain_text([op.op for op in box.ops])}, {n.duration(box.time_us)}"
    frame = Markup('x="{}" y="{}" width="{}" height="{}" rx="3"').format(x, y, WIDTH, HEIGHT)
    return Markup(
        '<a href="#box-{}"><title>{}</title><rect class="paper" {}/><rect class="box" {} fill-opacity="{}"/>'
        '<text x="{}" y="{}">{}</text><text class="right" x="{}" y="{}">{}{}</text></a>'
    ).format(
        index,
        title,
        frame,
        frame,
        heat,
        x + 8,
        y + 17,
        _label(box),
        x + WIDTH - 8,
        y + 17,
        ids,
        n.percent(box.share),
    )


def _label(box: Box) -> str:
    """The end of a module path, two parts with a name; where there is no name, what it runs."""
    label = facts.clean(box.label)
    parts = [label] if "…" in label else label.split(".")
    named = [k for k, part in enumerate(parts) if part and part != "*" and not part.isdigit()]
    if not named:
        return facts.shorten(f"{label or '(top level)'} {facts.chain_text([op.op for op in box.ops])}", LABEL_CHARS)
    return facts.shorten(".".join(parts[min(named[-2:][0], len(parts) - 2) if len(parts) > 1 else 0 :]), LABEL_CHARS)
