"""TileLang kernels from templates: CUDA through TileLang's compiler, CPU through its C source and the C++ compiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from fusescout.constants import Split
from fusescout.contenders.base import Built
from fusescout.contenders.base import Upkeep
from fusescout.contenders.binding import runner
from fusescout.contenders.binding import straight
from fusescout.contenders.compile_seconds import cold_seconds
from fusescout.contenders.convolution_tail import Tail
from fusescout.contenders.convolution_tail import as_tail
from fusescout.contenders.pointwise_convolution import Product
from fusescout.contenders.pointwise_convolution import as_product
from fusescout.contenders.preparing import prepared
from fusescout.contenders.repro import script
from fusescout.contenders.summed_rows import as_rows
from fusescout.convolution import CONVOLUTIONS
from fusescout.device import Device
from fusescout.errors import ContenderFailed
from fusescout.errors import in_a_line
from fusescout.flops import op_class
from fusescout.ir import Subgraph
from fusescout.regions import GEMMS
from fusescout.regions.pieces import WINDOWS
from fusescout.regions.rows import LOSSES
from fusescout.regions.rows import SOFTMAXES
from fusescout.registry import Registry
from fusescout.registry import load
from fusescout.template import Kernel

EFFORT = {"quick": 4, "default": 16}
"""Configurations tried per template; "max" tries all."""


class TileLang:
    """Instantiates every template that covers the sub-graph.

    Args:
        folders: more template folders.
        cache_dir: keeps compiled kernels; by default the user's cache folder.
    """

    name = "tilelang"

    def __init__(self, folders: Sequence[Path | str] = (), cache_dir: Path | None = None) -> None:
        self.folders = tuple(folders)
        self.cache_dir = cache_dir or Path(user_cache_dir("fusescout"))

    @cached_property
    def registry(self) -> Registry:
        return load([Path(folder) for folder in self.folders])

    def variants(self, graph: Subgraph, device: Device, effort: str) -> list[Mapping[str, Any]] | str:
        """`{"template": name, **config}`, the templates in turn, so that each one's best guess comes early."""
        product = _product(graph)
        if isinstance(product, str):
            return f"There is no template for this convolution: {product}."
        if isinstance(product, Tail) and device.kind == "cpu":
            return "oneDNN adds a convolution's bias itself: what follows is fused without the convolution."
        graph = product.inner if product else graph
        reasons: list[str] = []
        beside: list[str] = []
        searches: list[list[Mapping[str, Any]]] = []
        for name, template in self.registry.templates.items():
            found: list[Mapping[str, Any]] = []
            try:
                reason = template.supports(graph, device)
                if reason is None:
                    found = [{"template": name, **c} for c in template.configs(graph, device)]
            except Exception as error:  # isolation boundary: templates are anyone's code
                reason = f"it failed with {in_a_line(error)}"
            if reason is None:
                if product:  # it has a way of its own to prepare constants
                    found = [variant for variant in found if self._split(graph, variant) is None]
                searches.append(found[: EFFORT.get(effort)])
            else:
                (reasons if _is_meant(template.FAMILY, graph) else beside).append(f"{name}: {reason.rstrip('.')}")
        if not searches:
            reasons = reasons or beside
            return f"No template covers it. {'; '.join(reasons)}." if reasons else "No template is installed."
        depth = max(map(len, searches))
        return [search[k] for k in range(depth) for search in searches if k < len(search)]

    def build(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Built:
        """Generate and compile one variant."""
        start = time.perf_counter()
        product = self._product(graph, variant)
        if isinstance(product, str):
            raise ContenderFailed(f"There is no template for this convolution: {product}.")
        graph = product.inner if product else graph
        kernel = self.kernel(graph, variant, device)
        launch = self._compile(kernel, device)
        what = [kernel.source, dict(kernel.pass_configs)]
        compile_s = cold_seconds(self.cache_dir, what, device, time.perf_counter() - start)
        call = straight(graph, kernel, launch, device)
        run = runner(call, len(graph.outputs))
        if product is None:
            return Built(run, compile_s, kernel.source, call=call)
        run = product.wrapped(run)
        if product.split is None:
            return Built(run, compile_s, kernel.source)
        return prepared(product.split, run, kernel.source, compile_s)

    def kernel(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> Kernel:
        """The kernel of a variant, not yet compiled; one that prepares constants is of the steady part.

        Raises:
            ContenderFailed: the template is gone or raised.
        """
        name = variant["template"]
        templates = self.registry.templates
        if name not in templates:
            raise ContenderFailed(f"There is no template {name}.", f"Installed are: {', '.join(templates) or 'none'}.")
        config = {k: v for k, v in variant.items() if k != "template"}
        try:
            return templates[name].kernel(graph, config, device)
        except Exception as error:  # isolation boundary: templates are anyone's code
            raise ContenderFailed(f"The template {name} failed: {type(error).__name__}: {error}") from error

    def upkeep(self, graph: Subgraph, variant: Mapping[str, Any]) -> Upkeep:
        """Lines of the template a maintainer owns; the generated text is made from them."""
        import tilelang

        lines = len(self.registry.source(variant["template"]).splitlines())
        rests_on = [f"tilelang {tilelang.__version__} (pre-1.0)"]
        if split := self._split(graph, variant):
            nbytes = sum(spec.nbytes for spec in split.prepare.output_specs)
            rests_on.append(f"{nbytes / (1 << 20):.3g} MiB for prepared weights")
        return Upkeep(lines, tuple(rests_on), ("cuda", "cpu"))

    def repro(self, graph: Subgraph, variant: Mapping[str, Any], device: Device) -> str:
        """A script with the generated TileLang source; on the CPU with the C++ made from it."""
        product = self._product(graph, variant)
        inner = product.inner if isinstance(product, Product | Tail) else graph
        kernel = self.kernel(inner, variant, device)
        code = _repro_cpu(inner, kernel) if device.kind == "cpu" else _repro_cuda(inner, kernel, device)
        if isinstance(product, Product | Tail):
            code += product.source("contender")
        return script(graph, device, f"tilelang {variant['template']}", code)

    def _product(self, graph: Subgraph, variant: Mapping[str, Any]) -> Product | Tail | str | None:
        """A chain that a variant sees otherwise: as a matrix product, or with prepared constants."""
        split = self._split(graph, variant)
        return Product(split, split.steady, split.steady) if split else _product(graph)

    def _split(self, graph: Subgraph, variant: Mapping[str, Any]) -> Split | None:
        """What a variant's template wants prepared."""
        split: Callable[..., Split | None] | None = getattr(
            self.registry.templates.get(variant["template"]), "prepared", None
        )
        return split(graph, variant) if split else None

    def _compile(self, kernel: Kernel, device: Device) -> Callable[..., None]:
        if device.kind == "cpu":
            from fusescout.contenders.compile_cpu import compile_cpu

            return compile_cpu(kernel, self.cache_dir)
        from fusescout.contenders.compile_cuda import compile_cuda

        return compile_cuda(kernel, device, self.cache_dir)


def _is_meant(family: str, graph: Subgraph) -> bool:
    """Whether a family is for chains like this one: that another's templates refuse it goes without saying."""
    products = sum(op.name in GEMMS for op in graph.ops)
    meant = {"gemm_epilogue": products == 1, "gated_mlp": products == 2, "pointwise": not products}
    meant["pooling"] = any(op.name in WINDOWS for op in graph.ops)
    meant |= {"rowwise": not products, "gemm_shared_input": products > 1}
    built_in = any(op_class(op.target) == "attention" for op in graph.ops)
    meant["attention"] = built_in or (products == 2 and any(op.name in SOFTMAXES for op in graph.ops))
    meant["linear_cross_entropy"] = products == 1 and graph.ops[-1].name in LOSSES
    return meant.get(family, True)


def _product(graph: Subgraph) -> Product | Tail | str | None:
    """What a chain with a convolution is to a template: a matrix product, or what follows. None for one without."""
    if not any(op.name in CONVOLUTIONS for op in graph.ops):
        return as_rows(graph)
    product = as_product(graph)
    if isinstance(product, Product):
        return product
    tail = as_tail(graph)
    return f"{product}, and {tail}" if isinstance(tail, str) else tail


def _repro_cuda(graph: Subgraph, kernel: Kernel, device: Device) -> str:
    from fusescout.contenders.compile_cuda import target_of

    name = kernel.func.attrs["global_symbol"]
    return f"""
# ---------------------------------------------------------------- TileLang source, as generated
# TileLang reads its kernels' source, so this script must be run as a file.
import tilelang

{kernel.source}

kernel = tilelang.compile({name}, target={target_of(device)!r}, pass_configs={dict(kernel.pass_configs)!r})


def contender(*inputs):
{_repro_body(graph, kernel, "kernel", as_views=True)}
"""


def _repro_cpu(graph: Subgraph, kernel: Kernel) -> str:
    from fusescout.contenders.compile_cpu import FLAGS
    from fusescout.contenders.compile_cpu import c_source

    source, name, order = c_source(kernel)
    body = _repro_body(graph, kernel, "launch", as_views=False)
    commented = "\n".join("# " + line for line in kernel.source[kernel.source.index("@T.prim_func") :].splitlines())
    return f'''
# ---------------------------------------------------------------- TileLang source, as generated
{commented}

# ---------------------------------------------------------------- C++ that TileLang makes of it, with OpenMP added
import ctypes
import subprocess
import tempfile

SOURCE = r"""{source}"""
folder = tempfile.mkdtemp()
with open(folder + "/kernel.cpp", "w") as file:
    file.write(SOURCE)
subprocess.run(["g++", *{FLAGS!r}, "-o", folder + "/kernel.so", folder + "/kernel.cpp", "-lm"], check=True)
function = getattr(ctypes.CDLL(folder + "/kernel.so"), "{name}")


def launch(*tensors):
    function(*[ctypes.c_void_p(tensors[k].data_ptr()) for k in {order!r}], torch.get_num_threads())


def contender(*inputs):
{body}
'''


def _repro_body(graph: Subgraph, kernel: Kernel, call: str, *, as_views: bool) -> str:
    """Lines of `contender`: allocate, launch, return."""
    lines = [
        f"    out{k} = torch.empty_strided({s.shape}, {s.stride}, dtype=torch.{s.dtype}, device=DEVICE)"
        for k, s in enumerate(graph.output_specs)
    ]
    names = []
    for p in kernel.params:
        name = f"inputs[{p.index}]" if p.role == "input" else f"out{p.index}"
        if p.role == "scratch":
            name = p.name
            lines.append(
                f"    {name} = torch.empty_strided({p.shape}, {p.stride}, dtype=torch.{p.dtype}, device=DEVICE)"
            )
        names.append(f"{name}.as_strided({p.shape}, {p.stride})" if as_views else name)
    lines.append(f"    {call}({', '.join(names)})")
    outs = "".join(f"out{k}, " for k in range(len(graph.outputs)))
    return "\n".join([*lines, f"    return ({outs})"])
