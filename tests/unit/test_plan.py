"""Plan files: round trip, and what a damaged one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from graphs import Builder
from graphs import spec

from fusescout.errors import PlanMismatch
from fusescout.errors import PlanUnreadable
from fusescout.plan import Entry
from fusescout.plan import Plan


def plan() -> Plan:
    b = Builder()
    y = b.op("relu", spec(4, 4), b.input(spec(4, 4)))
    subgraph = b.graph(y).subgraph([y])[0]
    entry = Entry(
        id="pointwise-1", family="pointwise", chain=["relu"], subgraph=subgraph.to_json(), contender="tilelang",
        variant={"template": "pointwise", "block": 256}, sites=3,
    )  # fmt: skip
    return Plan(target="m.py", mode="inference", device_kind="cpu", device_name="x", torch="2.13.0", entries=[entry])


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()
    assert Plan.load(tmp_path) == plan(), "the run folder will do"
    assert Plan.load(tmp_path).entries[0].key == plan().entries[0].key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[]", "plan_version is None"),
        ('{"plan_version": 99}', "plan_version is 99"),
        ('{"plan_version": 1}', "field target"),
    ],
)
def test_a_damaged_plan_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanUnreadable, match=says):
        Plan.load(tmp_path / "plan.json")


def test_a_damaged_sub_graph_is_found_at_loading(tmp_path: Path) -> None:
    raw = json.loads(plan().model_dump_json())
    raw["entries"][0]["subgraph"] = '{"inputs": 3}'
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    with pytest.raises(PlanUnreadable, match="sub-graph is damaged"):
        Plan.load(tmp_path)


def test_a_missing_plan_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanUnreadable, match="No such file"):
        Plan.load(tmp_path / "nowhere.json")


def test_entries_can_be_taken_out() -> None:
    assert plan().without({"pointwise-1"}).entries == []
    assert plan().composed("inductor").composition == "inductor"


def test_plans_of_several_shapes_merge_into_one() -> None:
    b = Builder()
    y = b.op("relu", spec(64, 4), b.input(spec(64, 4)))
    larger = plan().entries[0].model_copy(update={"id": "b", "subgraph": b.graph(y).subgraph([y])[0].to_json()})
    other = plan().model_copy(update={"entries": [larger, plan().entries[0]], "composition": "inductor"})
    both = plan().merged(other)
    assert [e.id for e in both.entries] == ["pointwise-1", "b"]
    assert both.composition == "eager"
    assert plan().emptied().merged(other).composition == "inductor", "an empty plan has no say"
    left = plan().emptied().composed("inductor")
    assert left.merged(plan().emptied()) == plan().emptied().merged(left) == left, "one leaves the model to Inductor"
    assert both.merged(plan().emptied()) == both
    for change in ({"device_name": "y"}, {"mode": "training"}, {"memory_format": "channels_last"}):
        with pytest.raises(PlanMismatch, match=str(*change.values())):
            plan().merged(other.model_copy(update=change))
