"""The whole analysis on the CPU, on real models: what it says must be consistent and leave no trace in the model.

Timings on a shared machine prove nothing, so nothing here depends on who wins; the plan that was tried is applied.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusescout
from fusescout import analysis
from fusescout import races
from fusescout.analysis import Outcome
from fusescout.nest import tensors
from fusescout.plan import Entry
from fusescout.plan import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def conv_net() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from conv_net import ConvNet

    torch.manual_seed(0)
    return ConvNet(width=16, blocks=2), (torch.randn(4, 3, 96, 96),), {}


def gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    pytest.importorskip("transformers")
    from hf_models import gpt2 as make

    model, inputs = make(2, 128, n_layer=2, n_embd=128, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0)
    return model, (), inputs


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenMP's waiting threads make everything ten times slower where other processes use the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for name in ("conv_net", "hf_models"):
        sys.modules.pop(name, None)


def state(model: nn.Module) -> dict[str, Any]:
    """All that an analysis must not change."""
    return {
        "values": {k: v.clone() for k, v in model.state_dict().items()},
        "identity": [id(t) for t in (*model.parameters(), *model.buffers())],
        "attributes": {n: set(vars(m)) for n, m in model.named_modules()},
        "training": [m.training for m in model.modules()],
        "gradients": [p.grad for p in model.parameters()],
        "random": torch.get_rng_state(),
    }


def unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = state(model)
    for name in ("identity", "attributes", "training"):
        assert before[name] == after[name], name
    assert all(torch.equal(v, after["values"][k]) for k, v in before["values"].items())
    assert all(a is b for a, b in zip(before["gradients"], after["gradients"], strict=True))
    assert torch.equal(before["random"], after["random"])


def consistent(outcome: Outcome) -> None:
    session, verdict = outcome.session, outcome.session.end_to_end
    assert session.profile.coverage >= 0.95
    assert session.profile.attributed_us + session.profile.unlinked_us > 0
    ids = {c.id for c in session.candidates}
    for candidate in session.candidates:
        assert 0 <= candidate.share <= 1
        assert 0 <= candidate.gain_bound_us <= candidate.time_us
        for one in candidate.contenders:
            if one.time is not None:
                assert 0 < one.time.low <= one.time.mid <= one.time.high
        ran = {c.name: c.status for c in candidate.contenders}
        assert ran["eager"] == "ok"
        assert "wrong" not in (ran["eager"], ran["tilelang"]), candidate.contenders
        if candidate.status == "accepted":
            assert candidate.speedup is not None
            assert candidate.speedup.low >= 1.05
    assert verdict.baseline.low > 0
    assert {e.id for e in outcome.plan.entries} <= ids
    assert bool(outcome.plan.entries) == (verdict.sites_patched > 0)
    if verdict.sites_patched:
        assert verdict.verified
        accepted = {c.id for c in session.candidates if c.status == "accepted"}
        assert {e.id for e in outcome.plan.entries} <= accepted


@pytest.mark.parametrize(("make", "top"), [(conv_net, 6), (gpt2, 2)])
def test_a_model(make: Any, top: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = make()
    with torch.no_grad():
        expected = list(tensors(model.eval()(*args, **kwargs)))
    tried: list[Plan] = []
    compare = analysis.compare
    monkeypatch.setattr(races, "_forgotten", lambda *_: False)  # on a busy machine some are: `test_recall.py`
    monkeypatch.setattr(analysis, "compare", lambda w, plan, *a, **k: tried.append(plan) or compare(w, plan, *a, **k))
    settings = {"effort": "quick", "rounds": 3, "top": top, "runs": 3, "cache_dir": tmp_path / "cache", "device": "cpu"}

    before = state(model)
    outcome = fusescout.analyze(model, args, kwargs, output=tmp_path / "run", **settings)
    unchanged(before, model)
    consistent(outcome)
    assert outcome.session.candidates
    assert outcome.session.cache_misses == len(outcome.session.candidates)

    if make is conv_net:  # more candidates of more kinds than the other model has
        again = fusescout.analyze(model, args, kwargs, **settings)
        consistent(again)
        if {c.id for c in again.session.candidates} == {c.id for c in outcome.session.candidates}:
            assert again.session.cache_misses == 0, "the same machine races nothing twice"

    plan = _of_kernels(outcome, tried[0])
    assert plan.entries, "a TileLang kernel must have passed its check"
    plan.save(tmp_path / "plan.json")
    with torch.no_grad(), fusescout.patched(model.eval(), tmp_path / "plan.json") as handle:
        got = list(tensors(model(*args, **kwargs)))
        assert handle.counters.sites > 0, handle.counters.fallbacks
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    unchanged(before, model.train(before["training"][0]))


def _of_kernels(outcome: Outcome, base: Plan) -> Plan:
    """The kernels that passed, whoever won: from the captured graphs, as the session names them."""
    from fusescout.regions import find_regions

    entries = []
    for candidate in outcome.session.candidates:
        kernel = next(c for c in candidate.contenders if c.name == "tilelang")
        if kernel.status == "ok":
            graph = next(g for g in GRAPHS if any(r.nodes == tuple(candidate.sites[0].nodes) for r in find_regions(g)))
            subgraph, _ = graph.subgraph(candidate.sites[0].nodes)
            entries.append(
                Entry(
                    id=candidate.id,
                    family=candidate.family,
                    chain=candidate.chain,
                    subgraph=subgraph.to_json(),
                    contender="tilelang",
                    variant=kernel.variant,
                    sites=len(candidate.sites),
                )
            )
    return base.model_copy(update={"entries": entries})


GRAPHS: list[Any] = []


@pytest.fixture(autouse=True)
def _keep_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    GRAPHS.clear()
    rank = analysis.rank
    monkeypatch.setattr(analysis, "rank", lambda graphs, *a: GRAPHS.extend(graphs) or rank(graphs, *a))
