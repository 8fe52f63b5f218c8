"""The models of `fusescout bench models`: which builder makes each, at which size. Plain data, no torch.

Weights are random, since only shapes decide speed. `sizes` are the real ones, for a GPU; `small` are for a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the suite.

    Attributes:
        name: what the command line calls it.
        builder: "hub:function" (needs transformers) or "plain:function".
        sizes: the builder's arguments at real size.
        small: what replaces some of them on a CPU.
    """

    name: str
    builder: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    small: Mapping[str, int] = field(default_factory=dict)

    def arguments(self, small: bool) -> dict[str, int]:
        return {**self.sizes, **(self.small if small else {})}


_TEXT = {"batch": 2, "length": 64, "layers": 2, "width": 128, "heads": 4, "vocabulary": 512}
_IMAGE = {"batch": 2, "side": 64}

MODELS: tuple[Model, ...] = (
    Model("gpt2", "hub:gpt2", {"batch": 8, "length": 1024}, _TEXT),
    Model("bert", "hub:bert", {"batch": 32, "length": 512}, _TEXT),
    Model("t5-encoder", "hub:t5_encoder", {"batch": 16, "length": 512}, _TEXT),
    Model("llama-prefill", "hub:llama", {"batch": 2, "length": 2048}, {**_TEXT, "hidden": 352}),
    Model(
        "llama-decode",
        "plain:llama_decode",
        {"batch": 8, "past": 1023},
        {"batch": 2, "past": 63, "layers": 2, "width": 128, "heads": 4, "groups": 2, "hidden": 352, "vocabulary": 512},
    ),
    Model(
        "mixtral-moe",
        "hub:mixtral_block",
        {"batch": 2, "length": 2048},
        {"batch": 2, "length": 64, "width": 128, "hidden": 256},
    ),
    Model("vit-b", "hub:vit", {"batch": 64}, {**_IMAGE, "layers": 2, "width": 128, "heads": 4}),
    Model("convnext-t", "hub:convnext", {"batch": 64}, {**_IMAGE, "depth": 1}),
    Model("resnet-50", "hub:resnet", {"batch": 64}, _IMAGE),
    Model("efficientnet-b0", "hub:efficientnet", {"batch": 64}, _IMAGE),
    Model("mlp-mixer", "plain:mixer", {"batch": 64}, {**_IMAGE, "layers": 2, "width": 128}),
    Model("swin-t", "hub:swin", {"batch": 64}, {"batch": 1, "side": 224, "depth": 2}),
    Model("dit", "plain:dit", {"batch": 32}, {"batch": 2, "tokens": 64, "layers": 1, "width": 128, "heads": 4}),
    Model(
        "whisper-encoder",
        "hub:whisper_encoder",
        {"batch": 8},
        {"batch": 1, "layers": 2, "width": 128, "heads": 4, "frames": 200},
    ),
    Model("dlrm", "plain:dlrm", {"batch": 8192}, {"batch": 256, "rows": 1000, "hidden": 128}),
)
QUICK = ("gpt2", "bert", "llama-prefill", "vit-b", "convnext-t", "resnet-50")
"""What `--suite short` runs."""


def names() -> tuple[str, ...]:
    return tuple(m.name for m in MODELS)


def select(wanted: Iterable[str], suite: str = "full") -> tuple[Model, ...]:
    """The named models, or else those of a suite, "full" or "short", in the suite's order."""
    keep = set(wanted) or set(names() if suite == "full" else QUICK)
    return tuple(m for m in MODELS if m.name in keep)
