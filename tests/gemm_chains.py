"""GEMM chains as sub-graphs, run by a template on the CPU and judged against float64."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusescout import reference
from fusescout.capture.encode import encode_graph
from fusescout.contenders.compile_cpu import compile_cpu
from fusescout.device import Device
from fusescout.tolerance import Allowance

CPU = Device("cpu", "cpu", "x86_64", 2)


def subgraph(function, *inputs):
    """(sub-graph, its inputs in order) of all operators that `function` runs."""
    graph = encode_graph(make_fx(function, pre_dispatch=True)(*inputs), 0)
    places = [n.name for n in graph.nodes if not n.is_op]
    found, names = graph.subgraph([n.name for n in graph.nodes if n.is_op])
    return found, [inputs[places.index(n)] for n in names]


def meta(function, *shapes, dtype=torch.bfloat16):
    return subgraph(function, *(torch.empty(s, dtype=dtype, device="meta") for s in shapes))[0]


def run(template, graph, inputs, folder):
    kernel = template.kernel(graph, template.configs(graph, CPU)[0], CPU)
    specs = graph.output_specs
    outputs = [torch.empty_strided(o.shape, o.stride, dtype=getattr(torch, o.dtype)).fill_(torch.nan) for o in specs]
    tensors = {"input": inputs, "output": outputs}
    compile_cpu(kernel, folder, "-O0")(*(tensors[p.role][p.index].as_strided(p.shape, p.stride) for p in kernel.params))
    return outputs


def check(template, function, *inputs, folder):
    graph, ordered = subgraph(function, *inputs)
    assert template.supports(graph, CPU) is None
    outputs = run(template, graph, ordered, folder)
    eager, truth = reference.build(graph)(ordered), reference.build(graph, "float64")(ordered)
    for out, e, t in zip(outputs, eager, truth, strict=True):
        errors = Allowance(e, t, slack=2.0).judge(out)
        assert errors.ratio <= 1, errors.reason


def conv1d(x, w, b):
    return torch.addmm(b, x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[1])
