"""Every template lowers and assembles for Hopper without a GPU, and spills no registers."""

import pytest
import torch
from attention_cases import ATTENTION
from row_cases import PIECES
from row_cases import ROWS
from row_cases import WIDE
from row_cases import WINDOWED
from template_cases import POINTWISE
from template_cases import ROWWISE
from template_cases import Case
from template_cases import randn

from fusescout.contenders.compile_cuda import cubin_report
from fusescout.contenders.pointwise_convolution import as_product
from fusescout.contenders.tilelang import TileLang
from fusescout.device import Device
from fusescout.environment import nvcc_path
from fusescout.ir import Op
from fusescout.ir import Ref
from fusescout.ir import Subgraph
from fusescout.ir import TensorSpec
from fusescout.registry import load

pytestmark = pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")

HOPPER = Device("cuda", "NVIDIA H200", "sm_90a", 132)
TEMPLATES = load().templates
SHAPES = POINTWISE + ROWWISE + ROWS + WIDE + PIECES + WINDOWED + ATTENTION
CHOSEN = (
    "bias_gelu", "mask", "transposed", "layer_norm", "masked_softmax", "extremes", "softmax_channels",
    "wide_group_norm", "wide_cross_entropy", "partly_rotary", "max_pool_overlap", "bias",
)  # fmt: skip


def report(case, dtype, which=0):
    graph, _ = case.traced(dtype=dtype)
    template = next(t for t in TEMPLATES.values() if case.family == t.FAMILY and t.supports(graph, HOPPER) is None)
    return cubin_report(template.kernel(graph, template.configs(graph, HOPPER)[which], HOPPER))


def report_of(case, chosen):
    """Of the first configuration of the row template that is `chosen`."""
    graph, template = case.traced(dtype=torch.bfloat16)[0], TEMPLATES["rowwise"]
    return cubin_report(template.kernel(graph, next(filter(chosen, template.configs(graph, HOPPER))), HOPPER))


@pytest.mark.parametrize("case", [c for c in SHAPES if c.name in CHOSEN], ids=lambda c: c.name)
def test_assembles_without_spills(case):
    found = report(case, torch.bfloat16)
    assert found.spilled_bytes == 0
    assert 0 < found.registers <= 255


def test_contiguous_operands_are_read_and_written_16_bytes_at_a_time():
    case = Case("bias_gelu", "pointwise", lambda x, b: torch.relu(x + b), lambda: (randn(64, 768), randn(768)))
    source = report(case, torch.bfloat16).source
    assert source.count("*(uint4*)") >= 3 + 2  # two loads and a store, each with its register side
    assert "if (" not in source[source.rindex('extern "C"') :]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_operand_that_every_vector_repeats_is_gathered(dtype):
    """TileLang's gather of bfloat16 calls a function that its headers don't have."""
    (case,) = (c for c in POINTWISE if c.name == "outer")
    assert ("__pack_bfloat162(in0[" in report(case, dtype).source) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("columns", [50257, 128256])
def test_rows_too_wide_for_registers_are_walked_in_chunks_of_vectors_at_any_address(columns):
    wide = Case("vocabulary", "rowwise", lambda x: x.log_softmax(-1), lambda: (randn(4, columns),))
    found = report_of(wide, lambda c: c.get("unroll") and c["threads"] >= 512)
    assert "for (int k = 0;" in found.source
    assert found.source.count("(uint4*)(in0 +") >= 4  # both passes, in the loop and around it
    assert found.source.count("max(n2[") == 2 * (2 + (columns == 50257))  # one maximum a thread and chunk
    assert found.spilled_bytes == 0


def test_wide_rows_in_shared_memory_are_copied_in_vectors_that_each_thread_takes_itself():
    wide = Case("vocabulary", "rowwise", lambda x: x.log_softmax(-1), lambda: (randn(4, 50257),))
    found = report_of(wide, lambda c: c.get("stash") == 13)
    fetches = [line for line in found.source.splitlines() if line.strip().startswith("fs_fetch(")]
    assert len(fetches) == 13
    clipped = [line for line in fetches if not line.endswith(", 16);")]  # the last vector may reach beyond the tensor
    assert len(clipped) == 1
    assert found.source.count("  fs_arrived<") == found.source.count("  fs_fetch(")
    assert found.spilled_bytes == 0


def test_blocks_that_stay_ask_for_the_next_row_first():
    case = Case("norm", "rowwise", lambda x: torch.nn.functional.layer_norm(x, (3000,)), lambda: (randn(8192, 3000),))
    found = report_of(case, lambda c: c.get("grid"))
    assert found.source.index("for (int turn") < found.source.rindex("(uint4*)(in0 +") < found.source.index("AllReduce")
    assert found.spilled_bytes == 0


def test_rows_side_by_side_are_read_across():
    case = Case("classes", "rowwise", lambda x: x.softmax(1), lambda: (randn(2, 32, 64, 64),))
    assert report(case, torch.bfloat16).source.count("(uint4*)(in0 +") == 1


def test_chains_that_use_values_often_go_through_registers():
    def chain(x):
        for _ in range(16):
            x = x * x + x
        return x

    found = report(Case("chain", "pointwise", chain, lambda: (randn(5001),)), torch.float32)
    assert found.spilled_bytes == 0
    assert len(found.source) < 60_000


def test_a_1x1_convolution_with_batch_norm_and_residual_assembles_without_spills():
    """The widest chain of ResNet-50 at batch 64, as the matrix product it is raced as."""
    image = TensorSpec((64, 256, 56, 56), "bfloat16", (256 * 56 * 56, 1, 56 * 256, 256))
    row = TensorSpec((256,), "bfloat16", (1,), constant=True)
    x = TensorSpec((64, 64, 56, 56), "bfloat16", (64 * 56 * 56, 1, 56 * 64, 64))
    weight = TensorSpec((256, 64, 1, 1), "bfloat16", (64, 1, 1, 1), constant=True)
    ops = (
        Op("aten.conv2d.default", (Ref(0), Ref(1)), (), image),
        Op("aten.batch_norm.default", (Ref(7), *map(Ref, range(2, 6)), False, 0.1, 1e-5, True), (), image),
        Op("aten.add.Tensor", (Ref(8), Ref(6)), (), image),
        Op("aten.relu.default", (Ref(9),), (), image),
    )
    contender = TileLang()
    graph = Subgraph((x, weight, row, row, row, row, image), ops, (10,))
    product, variants = as_product(graph), contender.variants(graph, HOPPER, "quick")
    assert not isinstance(product, str)
    assert not isinstance(variants, str)
    variant = variants[0]
    found = cubin_report(contender.kernel(product.inner, variant, HOPPER))
    assert found.spilled_bytes == 0
    assert 0 < found.registers <= 255
