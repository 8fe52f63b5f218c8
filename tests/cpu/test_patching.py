"""Patching a live model: what changes, what must not, and how it comes back.

Plans here name the "eager" contender, which computes the chain with the framework's operators: the rewriting, the
operators, guards and counters are the real ones, and no compiler is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusescout.capture import capture
from fusescout.errors import PlanMismatch
from fusescout.patching import Patched
from fusescout.patching import patch
from fusescout.patching import patched
from fusescout.plan import Entry
from fusescout.plan import Plan
from fusescout.probe import describe_device
from fusescout.regions import find_regions
from fusescout.workload import build


class Net(nn.Module):
    """Linear, two pointwise operators, a residual that is used twice, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.act = nn.GELU(approximate="tanh")
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        h = x + self.drop(self.act(self.fc(x)) * 0.5)
        return {"y": self.norm(h) * scale, "h": h}


def make_plan(
    model: nn.Module, x: torch.Tensor, mode: str = "inference", families: tuple[str, ...] = ("rowwise",)
) -> Plan:
    found = capture(build(model, (x,), mode=mode))
    entries = {}
    for captured in found.graphs:
        for region in find_regions(captured.graph):
            if region.family in families:
                subgraph, _ = captured.graph.subgraph(region.nodes)
                entries[subgraph.key] = Entry(
                    id=f"{region.family}-{subgraph.key[:8]}", family=region.family, chain=list(subgraph.chain),
                    subgraph=subgraph.to_json(), contender="eager", variant={}, sites=1,
                )  # fmt: skip
    return Plan(
        target="net", mode=mode, device_kind="cpu", device_name=describe_device("cpu").name, torch=torch.__version__,
        entries=list(entries.values()),
    )  # fmt: skip


@pytest.fixture
def model() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def test_a_patched_model_gives_eagers_numbers_and_undo_restores_it(model: nn.Module) -> None:
    plan = make_plan(model, X)
    assert plan.entries
    before = dict(vars(model))
    with torch.no_grad():
        expected = model(X)
        handle = patch(model, plan)
        got = model(X)
        assert handle.counters.sites == 1
        for name in expected:
            assert torch.equal(expected[name], got[name])
        handle.undo()
        handle.undo()
    assert set(vars(model)) - {"_compiled_call_impl"} == set(before) - {"_compiled_call_impl"}
    assert getattr(model, "_compiled_call_impl", None) is None


def test_class_parameters_and_state_dict_stay_as_they_were(model: nn.Module) -> None:
    keys, kind, identity = list(model.state_dict()), type(model), [id(p) for p in model.parameters()]
    with patched(model, make_plan(model, X)), torch.no_grad():
        model(X)
        assert (list(model.state_dict()), type(model), [id(p) for p in model.parameters()]) == (keys, kind, identity)


def test_another_instance_of_the_class_is_not_touched(model: nn.Module) -> None:
    other = Net().eval()
    with patched(model, make_plan(model, X)) as handle, torch.no_grad():
        other(X)
        assert handle.counters.captures == 0


def test_new_shapes_run_right_and_are_counted(model: nn.Module) -> None:
    with patched(model, make_plan(model, X)) as handle, torch.no_grad():
        for rows in (1, 2, 17, 64, 4, 1):
            x = torch.randn(rows, 16)
            expected = _plain(model, lambda x=x: model(x))
            assert torch.equal(model(x)["y"], expected["y"])
        assert handle.counters.sites == 1, "only the planned shape is replaced"
        assert handle.counters.fallbacks, "the other shapes are counted"


def _plain(model: nn.Module, call: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    held, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        return call()
    finally:
        model._compiled_call_impl = held


def test_changed_weights_are_followed(model: nn.Module) -> None:
    with patched(model, make_plan(model, X)), torch.no_grad():
        model(X)
        model.norm.weight.mul_(3)
        assert torch.equal(model(X)["y"], _plain(model, lambda: model(X))["y"])
        model.norm.bias.data = torch.full((16,), 7.0)
        assert torch.equal(model(X)["y"], _plain(model, lambda: model(X))["y"])
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
        assert torch.equal(model(X)["y"], _plain(model, lambda: model(X))["y"])


def test_train_eval_train_keeps_dropout_alive(model: nn.Module) -> None:
    with patched(model, make_plan(model, X)):
        model(X)
        model.train()
        assert not torch.equal(model(X)["y"], model(X)["y"])
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(X)["y"], model(X)["y"])


def test_hooks_inside_the_chain_still_run(model: nn.Module) -> None:
    seen: list[torch.Size] = []
    with patched(model, make_plan(model, X)), torch.no_grad():
        model(X)
        hook = model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out.shape) or out * 2)
        assert torch.equal(model(X)["y"], _plain(model, lambda: model(X))["y"])
        assert len(seen) >= 2
        hook.remove()
        assert torch.equal(model(X)["y"], _plain(model, lambda: model(X))["y"])


def test_a_copy_is_unpatched_and_keywords_work(model: nn.Module) -> None:
    with patched(model, make_plan(model, X)), torch.no_grad():
        assert torch.equal(model(X, scale=2.0)["y"], model(x=X)["y"] * 2)
        twin = copy.deepcopy(model)
        assert getattr(twin, "_compiled_call_impl", None) is None
        assert torch.equal(twin(X)["y"], model(X)["y"])


@pytest.mark.parametrize("composition", ["eager", "inductor"])
def test_gradients_of_a_training_plan_are_eagers(composition: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().train()
    model.drop.p = 0.0
    plan = make_plan(model, X, mode="training", families=("rowwise", "pointwise", "gemm_epilogue"))
    x = X.clone().requires_grad_()

    def gradients() -> list[torch.Tensor]:
        out = model(x)
        loss = (out["y"] * torch.arange(64.0).view(4, 16)).sum() + out["h"].square().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    expected = gradients()
    handle = patch(model, plan, composition=composition)
    got = gradients()
    handle.undo()
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


def test_an_inference_plan_leaves_a_training_call_to_the_framework(model: nn.Module) -> None:
    with patched(model, make_plan(model, X)) as handle:
        x = X.clone().requires_grad_()
        model(x)["y"].sum().backward()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert handle.counters.sites == 0


def test_a_plan_of_another_device_is_refused(model: nn.Module) -> None:
    plan = make_plan(model, X)
    with pytest.raises(PlanMismatch, match="some other chip"):
        patch(model, plan.model_copy(update={"device_name": "some other chip"}))
    assert getattr(model, "_compiled_call_impl", None) is None


def test_an_entry_that_can_not_be_built_falls_back(model: nn.Module) -> None:
    plan = make_plan(model, X)
    broken = plan.model_copy(update={"entries": [e.model_copy(update={"contender": "nobody"}) for e in plan.entries]})
    with patched(model, broken) as handle, torch.no_grad():
        assert torch.equal(model(X)["y"], _plain(model, lambda: model(X))["y"])
        assert any("nobody" in reason for reason in handle.counters.fallbacks.values())


def test_two_patches_nest(model: nn.Module) -> None:
    plan = make_plan(model, X)
    outer: Patched = patch(model, plan)
    inner = patch(model, plan)
    inner.undo()
    assert model._compiled_call_impl is outer._ours
    outer.undo()
    assert model._compiled_call_impl is None


def test_torch_compile_finds_the_back_end_and_carries_out_a_plan(model: nn.Module, tmp_path: Path) -> None:
    plan = make_plan(model, X)
    plan.save(tmp_path / "plan.json")
    with torch.no_grad():
        for given in (plan, str(tmp_path / "plan.json"), tmp_path):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="fusescout", options={"plan": given})
            assert torch.equal(compiled(X)["y"], model(X)["y"])
        torch._dynamo.reset()
        with pytest.raises(Exception, match="it needs a plan"):
            torch.compile(model, backend="fusescout")(X)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="does not know plam"):
            torch.compile(model, backend="fusescout", options={"plan": plan, "plam": 1})(X)


def test_inductor_is_built_outside_of_the_capture_that_it_serves(model: nn.Module, monkeypatch: Any) -> None:
    """In Dynamo's tracing context the example's sizes became symbols without a source, and torch 2.11 refused."""
    contexts = []
    compile_fx = torch._inductor.compile_fx.compile_fx

    def spy(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_fx(*args, **kwargs)
        contexts.append(torch._guards.TracingContext.get().fake_mode)
        return compiled

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", spy)
    plan = make_plan(model, X, families=("rowwise",))
    entries = [e.model_copy(update={"contender": "inductor", "variant": {"mode": "default"}}) for e in plan.entries]
    with torch.no_grad():
        expected = model(X)["y"]
        with patched(model, plan.model_copy(update={"entries": entries})) as handle:
            torch.testing.assert_close(model(X)["y"], expected)
    assert handle.counters.sites > 0
    assert contexts
    for mode in contexts:
        assert mode is not None
        assert not mode.shape_env.var_to_range, "each size is a number"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_patches_are_undone_in_any_order(model: nn.Module, order: tuple[int, ...]) -> None:
    plan = make_plan(model, X)
    handles = [patch(model, plan) for _ in range(3)]
    for k in order:
        assert "_compiled_call_impl" in vars(model)
        handles[k].undo()
    assert "_compiled_call_impl" not in vars(model)


def test_many_models_of_one_class_are_all_patched() -> None:
    torch._dynamo.reset()
    models = [Net().eval() for _ in range(11)]
    plan = make_plan(models[0], X)
    handles = [patch(m, plan) for m in models]
    with torch.no_grad():
        for model in models:
            model(X)
    assert [h.counters.sites for h in handles] == [1] * 11
