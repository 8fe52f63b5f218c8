"""Every GEMM schedule on a real GPU: tails, few rows, few tiles, one k-step, and all kinds of operands."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from config_spread import spread
from fusescout.templates import gated_mlp
from fusescout.templates import gemm_epilogue
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusescout import reference
from fusescout.capture.encode import encode_graph
from fusescout.contenders.compile_cuda import compile_cuda
from fusescout.device import Device
from fusescout.tolerance import Allowance

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
DEADLINE_S = 20


def conv1d(x, w, b):
    return torch.addmm(b, x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[1])


def residual(x, w, b, r):
    return F.linear(x, w, b) + r


def tanh_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def before_and_after(x, w, b):
    return (h := F.linear(x, w, b)), F.gelu(h)


def gated(x, g, u):
    return F.silu(F.linear(x, g)) * F.linear(x, u)


def turned(x, w, r):
    return torch.mm(x.t(), w).relu() + r


def packed(x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def two_of_few(x, w, b, r):
    return (h := F.linear(x, w, b)), F.gelu(h) + r


def one_query(q, k, m):
    return q @ k.transpose(-1, -2) * 0.125 + m


def table_and_column(x, w, b, p, c):
    return (F.linear(x, w, b) + p) * c


def scores(q, k, m):
    return (q.view(4, 500, 12, 64).transpose(1, 2) @ k.view(4, 500, 12, 64).permute(0, 2, 3, 1)) * 0.125 + m


def batched(b, x, w, r):
    return torch.baddbmm(b, x, w).sigmoid() + r


def column_by_column(x, w, b, r):
    return r.transpose(-1, -2) + F.linear(x, w, b)


def tokens(x, w, b):
    return F.gelu(F.linear(x.transpose(1, 2), w, b))


def features(x, w, b):
    return F.relu(F.linear(x, w, b))


CASES = {
    "several tiles for each block": (tanh_gelu, (4104, 776), (1544, 776), (1544,)),
    "residual": (residual, (4104, 776), (1544, 776), (1544,), (4104, 1544)),
    "residual, odd columns": (residual, (100, 72), (203, 72), (203,), (100, 203)),
    "one k-step": (lambda x, w, b: F.relu(F.linear(x, w, b)), (300, 64), (200, 64), (200,)),
    "one row": (lambda x, w, b: F.silu(F.linear(x, w, b)), (1, 1032), (4096, 1032), (4096,)),
    "Conv1D": (lambda x, w, b: F.gelu(conv1d(x, w, b)), (3, 700, 776), (776, 1032), (1032,)),
    "position table and column": (table_and_column, (8, 100, 768), (768, 768), (768,), (1, 100, 768), (8, 1, 1)),
    "two results": (before_and_after, (1000, 776), (520, 776), (520,)),
    "heads side by side, and a mask": (scores, (4, 500, 768), (4, 500, 768), (4, 1, 1, 500)),
    "batch, tails everywhere, residual": (batched, (6, 1, 1544), (6, 1000, 776), (6, 776, 1544), (6, 1000, 1544)),
    "one weight for a batch of strided rows": (lambda x, w: F.relu(x.transpose(0, 1) @ w), (300, 5, 264), (264, 520)),
    "gated": (gated, (2100, 776), (1032, 776), (1032, 776)),
    "gated, packed": (packed, (2100, 776), (2064, 776), (2064,)),
    "gated, one row": (gated, (1, 2056), (1032, 2056), (1032, 2056)),
    "gated, packed, 13 rows": (packed, (13, 2056), (2056, 2056), (2056,)),
    "eight rows, residual, tails": (residual, (2, 4, 4100), (1001, 4100), (1001,), (2, 4, 1001)),
    "three rows, odd sizes": (residual, (3, 1031), (77, 1031), (77,), (3, 77)),
    "five rows, Conv1D": (lambda x, w, b: F.gelu(conv1d(x, w, b)), (5, 2056), (2056, 1000), (1000,)),
    "five rows, odd Conv1D": (lambda x, w, b: F.gelu(conv1d(x, w, b)), (5, 515), (515, 203), (203,)),
    "one query for each head": (one_query, (2, 12, 1, 64), (2, 12, 500, 64), (2, 1, 1, 500)),
    "16 rows": (lambda x, w: F.silu(F.linear(x, w)), (16, 4096), (4096, 4096)),
    "16 rows, float16": (lambda x, w: F.silu(F.linear(x, w)), (16, 4096), (1024, 4096)),
    "13 rows, Conv1D": (lambda x, w, b: F.gelu(conv1d(x, w, b)), (13, 4104), (4104, 1000), (1000,)),
    "60 rows, two results, odd columns": (two_of_few, (60, 2056), (1001, 2056), (1001,), (60, 1001)),
    "classifier head": (lambda x, w, b: F.relu(F.linear(x, w, b)), (64, 2048), (1000, 2048), (1000,)),
    "transposed input": (turned, (776, 2104), (776, 1544), (2104, 1544)),
    "transposed input, 24 rows": (turned, (2056, 24), (2056, 1000), (24, 1000)),
    "results column by column": (column_by_column, (9, 196, 776), (520, 776), (520,), (9, 520, 196)),
    "one matrix, column by column": (column_by_column, (2104, 264), (520, 264), (520,), (520, 2104)),
    "residual column by column": (lambda x, w, r: F.linear(x, w) + r.t(), (300, 264), (520, 264), (520, 300)),
    "transposed behind, with residual": (
        lambda x, w, b, r: r.transpose(1, 2) + F.linear(x, w, b).transpose(1, 2),
        (7, 768, 384),
        (196, 384),
        (196,),
        (7, 768, 196),
    ),
    "transposed tokens, prepared weight": (tokens, (5, 196, 776), (384, 196), (384,)),
    "13 features": (features, (4100, 13), (520, 13), (520,)),
    "415 features, prepared weight": (features, (4100, 415), (1000, 415), (1000,)),
    "415 features, both copied": (features, (4100, 415), (1000, 415), (1000,)),
    "odd sizes in a batch": (lambda x, w: torch.bmm(x, w).sigmoid(), (6, 515, 301), (6, 301, 203)),
    "few tiles, residual": (residual, (500, 4096), (1000, 4096), (1000,), (500, 1000)),
}


@pytest.fixture(scope="module")
def device():
    properties = torch.cuda.get_device_properties(0)
    return Device("cuda", properties.name, "sm_90a", properties.multi_processor_count)


def synchronize():
    """Wait for the GPU, but not for ever: a wrong barrier hangs the kernel, and with it this process."""
    done = torch.cuda.Event()
    done.record()
    start = time.monotonic()
    while not done.query():
        if time.monotonic() - start > DEADLINE_S:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)  # the others go on: xdist names this test and starts a new worker
            pytest.exit("A kernel hangs.", returncode=3)
        time.sleep(0.001)


def launch(run, kernel, inputs, outputs):
    """Run once; scratch begins as NaN, so that what is read before it is written shows."""
    tensors = {"input": inputs, "output": outputs}
    given = []
    for p in kernel.params:
        if p.role == "scratch":
            elements = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride, strict=True))
            whole = torch.full((elements,), torch.nan, dtype=getattr(torch, p.dtype), device="cuda")
            given.append(whole.as_strided(p.shape, p.stride))
        else:
            given.append(tensors[p.role][p.index].as_strided(p.shape, p.stride))
    run(*given)


def prepared(template, chain, config, inputs):
    """(what the kernel computes, its inputs), with a weight that is made once where the config wants one."""
    if "weight" not in config:
        return chain, inputs
    split = template.prepared(chain, config)
    made = reference.build(split.prepare)([inputs[k] for k in split.sources])
    return split.steady, [*(inputs[k] for k in split.kept), *made]


@pytest.mark.parametrize("name", CASES)
def test_every_kind_is_as_close_to_the_truth_as_eager(name, device, tmp_path_factory):
    function, *shapes = CASES[name]
    template = gated_mlp if function in (gated, packed) else gemm_epilogue
    torch.manual_seed(0)
    dtype = torch.float16 if "float16" in name else torch.bfloat16
    inputs = [(torch.randn(s, device="cuda") / (s[-1] ** 0.5 if "float16" in name else 1)).to(dtype) for s in shapes]
    graph = encode_graph(make_fx(function, pre_dispatch=True)(*inputs), 0)
    places = [n.name for n in graph.nodes if not n.is_op]
    chain, names = graph.subgraph([n.name for n in graph.nodes if n.is_op])
    ordered = [inputs[places.index(n)] for n in names]
    if "prepared" in name:
        chain = replace(chain, inputs=tuple(replace(s, constant=s.shape == tuple(shapes[1])) for s in chain.inputs))
    assert template.supports(chain, device) is None
    eager, truth = reference.build(chain)(ordered), reference.build(chain, "float64")(ordered)
    allowed = [Allowance(e, t) for e, t in zip(eager, truth, strict=True)]
    configs = spread(template.configs(chain, device))
    folder = tmp_path_factory.getbasetemp()
    forms = [prepared(template, chain, c, ordered) for c in configs]
    kernels = [template.kernel(form, c, device) for c, (form, _) in zip(configs, forms, strict=True)]
    with ThreadPoolExecutor(16) as pool:
        compiled = list(pool.map(lambda k: compile_cuda(k, device, folder), kernels))
    wrong = {}
    for config, (_, given), kernel, run in zip(configs, forms, kernels, compiled, strict=True):
        outputs, again = ([torch.full_like(e, torch.nan) for e in eager] for _ in range(2))
        for made in (outputs, again):
            launch(run, kernel, given, made)
        synchronize()
        reasons = [a.judge(o).reason for a, o in zip(allowed, outputs, strict=True)]
        if not all(torch.equal(o, a) for o, a in zip(outputs, again, strict=True)):
            reasons.append("two runs differ")
        if any(reasons):
            wrong[str(config)] = reasons
    assert not wrong
