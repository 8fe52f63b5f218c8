"""Capture on real models: what is kept is right, and the model is as it was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gradients import gradients
from gradients import same
from torch import nn

from fusescout.capture import Capture
from fusescout.capture import capture
from fusescout.capture.activations import record
from fusescout.capture.encode import normalise
from fusescout.capture.protect import copy_tensor
from fusescout.workload import Workload

transformers = pytest.importorskip("transformers")


class Untouched:
    """Everything about a model that a capture must not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state = {k: v.clone() for k, v in model.state_dict().items()}
        self.facts = self._facts()
        self.random = torch.get_rng_state()

    def _facts(self) -> Any:
        modules = {name: (type(m), m.training, sorted(vars(m)), m.forward) for name, m in self.model.named_modules()}
        tensors = {k: (id(t), sorted(vars(t)), t.grad) for k, t in self.model.state_dict(keep_vars=True).items()}
        return modules, tensors

    def check(self) -> None:
        assert self._facts() == self.facts
        assert all(torch.equal(self.model.state_dict()[k], v) for k, v in self.state.items())
        assert torch.equal(torch.get_rng_state(), self.random)


def captured(model: nn.Module, *args: Any, mode: str = "inference", **kwargs: Any) -> Capture:
    model.train(mode == "training")
    before = Untouched(model)
    result = capture(Workload(model, args, kwargs, mode))
    before.check()
    return result


def tiny(name: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    shared = {"vocab_size": 101, "attn_implementation": attention}
    if name == "gpt2":
        sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **shared))
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**sizes, **shared))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, **shared))


MODELS = [("gpt2", "sdpa"), ("bert", "eager"), ("llama", "sdpa")]


@pytest.mark.parametrize(("name", "attention"), MODELS)
def test_transformer_inference(name: str, attention: str) -> None:
    model = tiny(name, attention)
    ids = torch.randint(0, 101, (2, 9))
    result = captured(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert (len(result.graphs), result.breaks, result.warnings) == (1, (), ())
    graph = result.graphs[0].graph
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        assert any(torch.equal(wanted, got) for got in result.graphs[0].module(*result.graphs[0].inputs))
    whole = {n.op for n in graph.nodes}
    assert {"gpt2": {"addmm", "layer_norm"}, "bert": {"linear", "gelu"}, "llama": {"linear", "silu"}}[name] <= whole
    assert ("scaled_dot_product_attention" in whole) == (attention == "sdpa")
    assert {n.module for n in graph.nodes} <= {m for m, _ in model.named_modules()}
    assert all(f"modeling_{name}.py:" in n.source for n in graph.nodes if n.op in ("linear", "layer_norm", "embedding"))
    assert sum(n.is_parameter for n in graph.nodes) >= len(list(model.parameters())) - 2
    assert not any(n.is_parameter for n in graph.nodes if n.name.endswith("input_ids_"))


@pytest.mark.parametrize(("name", "attention"), [("gpt2", "eager"), ("bert", "sdpa"), ("llama", "sdpa")])
def test_transformer_training_gradients(name: str, attention: str) -> None:
    model = tiny(name, attention)
    ids = torch.randint(0, 101, (2, 9))
    result = captured(model, input_ids=ids, mode="training")
    assert (len(result.graphs), result.warnings) == (1, ())
    graph = result.graphs[0]
    shape = (2, 9, 101 if name != "bert" else 32)
    eager, wanted = gradients(model, lambda: model(input_ids=ids)[0])
    ours, got = gradients(model, lambda: next(t for t in graph.module(*graph.inputs) if t.shape == shape))
    assert torch.equal(eager, ours)
    assert all(same(a, b) for a, b in zip(wanted, got, strict=True))
    assert any(g is not None and bool(g.any()) for g in got)
    assert any(n.op == "dropout" for n in graph.graph.nodes) == (name in ("gpt2", "bert"))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.act(self.norm(self.conv(x))))


def test_batch_norm_eval_and_train() -> None:
    model, x = Conv(), torch.randn(2, 3, 8, 8)
    quiet = captured(model, x).graphs[0]
    assert [n.op for n in quiet.graph.nodes if n.is_op] == ["conv2d", "batch_norm", "relu"]
    assert not any(n.mutates for n in quiet.graph.nodes)  # the written value is seen by nobody else
    graph = captured(model, x, mode="training").graphs[0]
    assert {"batch_norm", "dropout"} <= {n.op for n in graph.graph.nodes}
    assert [n.op for n in graph.graph.nodes if n.mutates] == ["add_", "batch_norm"]
    eager = gradients(model, lambda: model(x))
    ours = gradients(model, lambda: graph.module(*graph.inputs)[0])
    assert torch.equal(eager[0], ours[0])
    assert all(same(a, b) for a, b in zip(eager[1], ours[1], strict=True))
    graph.module(*graph.inputs)
    assert model.norm.num_batches_tracked == 1
    assert bool(model.norm.running_mean.any())


def test_record_keeps_strides_and_puts_buffers_back() -> None:
    model = Conv()
    graph = captured(model, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), mode="training").graphs[0]
    before = Untouched(model)
    values = record(graph, {"conv2d", "batch_norm"})
    before.check()
    assert values["conv2d"].stride() == graph.graph.by_name["conv2d"].out.stride != (144, 36, 6, 1)
    assert bool((values["batch_norm"] < 0).any())  # taken before the in-place ReLU wrote over it
    with pytest.raises(KeyError, match="nothing"):
        record(graph, {"nothing"})


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        for block in self.blocks:
            x = torch.relu(block(x)) * times
        return x + 1 if x.sum() > -1e9 else x


def test_graph_breaks_are_listed_in_order_with_their_place() -> None:
    result = captured(Breaking(), torch.randn(3, 4), times=2)
    assert len(result.graphs) >= 3
    assert [g.index for g in result.graphs] == list(range(len(result.graphs)))
    places = [n.module for g in result.graphs for n in g.graph.nodes if n.op == "linear"]
    assert places == ["first", "blocks.0", "blocks.1"]
    assert len(result.breaks) == 2
    assert all("test_capture.py:" in b.where and b.reason for b in result.breaks)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.fc(x)


def test_breaks_in_children_keep_full_module_names_and_the_users_compilations() -> None:
    model, x = nn.Sequential(Child(), Child()), torch.randn(2, 4)
    compiled: list[int] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(1)
        return gm.forward

    users = torch.compile(model, backend=backend)
    users(x)
    count = len(compiled)
    model.eval()
    for _ in range(2):
        result = captured(model, x)
        # Both children share one compiled graph: their weights are its inputs.
        assert [n.module for g in result.graphs for n in g.graph.nodes if n.op == "linear"] == ["0.fc"]
        assert [g.calls for g in result.graphs] == [2]
    model.train()
    users(x)
    assert len(compiled) == count


@dataclass
class Out:
    y: torch.Tensor
    nothing: None
    pair: dict[str, torch.Tensor]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, other: torch.Tensor, *, scale: float, n: int, skip: Any = None) -> Out:
        a, b = self.head(self.embed(ids) + self.embed(other)).max(-1)
        return Out(a[:n] * scale, skip, {"b": b, "same": a})


def test_kwargs_dataclass_tied_weights_and_one_input_twice() -> None:
    model, ids = Odd(), torch.randint(0, 11, (4,))
    result = captured(model, ids, ids, scale=0.5, n=3)
    graph = result.graphs[0]
    assert sum(n.target == "input" and not n.is_parameter for n in graph.graph.nodes) == 1
    assert sum(n.is_parameter for n in graph.graph.nodes) == 1
    pair = graph.graph.by_name["max_1"]
    assert isinstance(pair.out, tuple) and [s.dtype for s in pair.out if s] == ["float32", "int64"]
    assert [n.target for n in graph.graph.nodes if "max_1" in n.inputs] == ["getitem", "getitem"]
    with torch.no_grad():
        assert any(torch.equal(t, model(ids, ids, scale=0.5, n=3).y) for t in graph.module(*graph.inputs))


class Impossible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")


def test_what_cannot_be_captured_gives_a_reason_and_user_errors_stay_theirs() -> None:
    result = captured(Impossible(), torch.randn(2, 4))
    assert result.graphs == () and result.warnings
    with pytest.raises(ZeroDivisionError, match="mine"):
        capture(Workload(Raises(), (torch.randn(2),)))


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        self.seen += 1
        x.mul_(2)
        cache.append(x)
        return self.fc(x) * self.seen


def test_arguments_and_buffers_that_the_model_writes_stay_as_given() -> None:
    x, cache = torch.ones(2, 4), []
    result = captured(Caches(), x, cache)
    assert torch.equal(x, torch.ones(2, 4)) and cache == []
    given = [
        t for n, t in zip(result.graphs[0].graph.nodes, result.graphs[0].inputs, strict=False) if not n.is_parameter
    ]
    assert any(torch.equal(t, torch.ones(2, 4)) for t in given)


def test_copy_keeps_overlap_and_misalignment() -> None:
    base = torch.arange(64.0)
    for view in (base[1:9], base.as_strided((3, 4), (0, 2), 3), base[:0], base[::2].reshape(4, 8).t(), base[5]):
        copy_ = copy_tensor(view)
        assert (copy_.shape, copy_.stride()) == (view.shape, view.stride())
        assert torch.equal(copy_, view) and copy_.data_ptr() % 16 == (view.data_ptr() % 16 if view.numel() else 0)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].blocks.0.fc", "blocks.0.fc"),
        ("L['self']._modules['blocks']._modules['0'].fc", "blocks.0.fc"),
        ("L['model'].layers[3].mlp", "layers.3.mlp"),
        ("L['fn']", ""),
    ],
)
def test_module_paths(path: str, name: str) -> None:
    assert normalise(path) == name
