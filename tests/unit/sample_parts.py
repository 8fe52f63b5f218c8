"""Invented pieces of sessions (environment, candidates, a BERT-like profile) for tests. No number was measured."""

from __future__ import annotations

from fusescout.session import CandidateResult
from fusescout.session import ContenderResult
from fusescout.session import EdgeRow
from fusescout.session import Environment
from fusescout.session import ErrorStats
from fusescout.session import Interval
from fusescout.session import KernelRow
from fusescout.session import OpRow
from fusescout.session import ProfileInfo
from fusescout.session import Site
from fusescout.session import WorkloadInfo

ENVIRONMENT = Environment(
    fusescout="0.1.0",
    date="2026-11-30",
    python="3.12.3",
    torch="2.11.0+cu130",
    tilelang="0.1.15",
    nvcc="13.0",
    driver="580.82",
    os="Linux",
    device_kind="cuda",
    device_name="NVIDIA H200",
    cores=132,
    copy_gb_per_s=4310.0,
    tflops={"bfloat16": 742.0, "float32": 51.0},
    launch_us=3.1,
)
WORKLOAD = WorkloadInfo(
    target="bert.py",
    model="BertModel",
    mode="inference",
    device="cuda",
    dtype="bfloat16",
    inputs=["input_ids int64[32,512]", "attention_mask int64[32,512]"],
    parameters=109_482_240,
    command="fusescout analyze bert.py",
)
HOSTILE = '</script><img src=x onerror="alert(1)"> [bold]x[/usr/x] `a|b` \x1b[2J\u202e --> {{ 7*7 }} 名前'


def interval(mid: float, spread: float = 0.01, samples: int = 60) -> Interval:
    return Interval(mid=mid, low=mid * (1 - spread), high=mid * (1 + spread), samples=samples)


def contender(name: str, us: float, **more: object) -> ContenderResult:
    base: dict[str, object] = {
        "name": name,
        "status": "ok",
        "time": interval(us),
        "bound_share": 15.0 / us if us else 0.0,
        "backends": ["cuda"],
        "error": ErrorStats(worst=0.5, contender_max=0.0078, eager_max=0.0081, cases=24),
    }
    return ContenderResult.model_validate(base | more)


def gemm_gelu(layers: int = 12) -> CandidateResult:
    contenders = [
        contender("eager", 190.2, lines=0),
        contender(
            "framework",
            181.0,
            variant={"call": "_addmm_activation"},
            status="unsupported",
            time=None,
            error=None,
            reason="_addmm_activation has the tanh gelu only, the model uses the exact one.",
        ),
        contender(
            "inductor",
            188.9,
            variant={"mode": "max-autotune"},
            compile_s=11.4,
            tried=2,
            lines=0,
            rests_on=["torch.compile"],
        ),
        contender(
            "tilelang",
            168.6,
            variant={"block_M": 128, "block_N": 256, "stages": 3, "schedule": "coop"},
            compile_s=46.0,
            tried=19,
            lines=96,
            rests_on=["TileLang 0.1 (pre-1.0)"],
            repro="kernels/c1/tilelang.py",
            error=ErrorStats(worst=0.5, contender_max=0.0078, eager_max=0.0081, cases=24, against="unrounded"),
        ),
        contender(
            "cuda",
            0.0,
            status="crashed",
            time=None,
            error=None,
            reason="The child process died: unspecified launch failure.",
        ),
    ]
    return CandidateResult(
        id="c1",
        key="a1" * 32,
        family="gemm_epilogue",
        chain=["linear", "gelu"],
        sites=[
            Site(
                graph=0,
                nodes=[f"l{k}_fc", f"l{k}_gelu"],
                module=f"encoder.layer.{k}.intermediate",
                source="modeling_bert.py:348 SECRET_LINE",
            )
            for k in range(layers)
        ],
        inputs=["bfloat16[16384,768]", "bfloat16[3072,768]", "bfloat16[3072]"],
        outputs=["bfloat16[16384,3072]"],
        time_us=2282.0,
        share=0.303,
        bound_us=1250.0,
        gain_bound_us=870.0,
        launches_removed=12,
        flops=9.3e11,
        bytes=1.5e9,
        status="accepted",
        reason="tilelang is 1.12× faster than inductor, the best other way, at an error within the allowed.",
        winner="tilelang",
        speedup=Interval(mid=1.12, low=1.11, high=1.13, samples=60),
        speedup_over_eager=Interval(mid=1.128, low=1.119, high=1.137, samples=60),
        pays_back_calls=183_000.0,
        contenders=contenders,
    )


def add_norm(layers: int = 12) -> CandidateResult:
    contenders = [
        contender("eager", 61.2),
        contender("inductor", 33.8, compile_s=4.2, tried=1, rests_on=["torch.compile"]),
        contender(
            "tilelang",
            24.3,
            variant={"rows": 2, "threads": 128},
            compile_s=21.0,
            tried=9,
            lines=64,
            rests_on=["TileLang 0.1 (pre-1.0)"],
            repro="kernels/c2/tilelang.py",
        ),
    ]
    return CandidateResult(
        id="c2",
        key="b2" * 32,
        family="rowwise",
        chain=["add", "layer_norm"],
        sites=[
            Site(
                graph=0,
                nodes=[f"l{k}_add{j}", f"l{k}_ln{j}"],
                module=f"encoder.layer.{k}.{m}",
                source="modeling_bert.py:401",
            )
            for k in range(layers)
            for j, m in ((1, "attention.output"), (2, "output"))
        ],
        inputs=["bfloat16[16384,768]", "bfloat16[16384,768]"],
        outputs=["bfloat16[16384,768]"],
        time_us=1468.0,
        share=0.195,
        bound_us=421.0,
        gain_bound_us=1040.0,
        launches_removed=24,
        status="accepted",
        winner="tilelang",
        reason="tilelang beats inductor; adding and normalising in one pass saves a read and a write of 25 MB a site.",
        speedup=Interval(mid=1.39, low=1.37, high=1.41, samples=60),
        speedup_over_eager=Interval(mid=2.52, low=2.48, high=2.55, samples=60),
        pays_back_calls=51_000.0,
        contenders=contenders,
    )


def kept() -> CandidateResult:
    return CandidateResult(
        id="c3",
        key="c3" * 32,
        family="gemm_epilogue",
        chain=["linear", "tanh"],
        sites=[Site(graph=0, nodes=["pool_fc", "pool_tanh"], module="pooler")],
        inputs=["bfloat16[32,768]"],
        outputs=["bfloat16[32,768]"],
        time_us=14.1,
        share=0.0019,
        bound_us=2.2,
        gain_bound_us=6.0,
        launches_removed=1,
        status="kept",
        winner="eager",
        reason="No contender beats eager beyond the noise: the chain is bound by its launch.",
        speedup=Interval(mid=1.01, low=0.98, high=1.04, samples=60),
        contenders=[
            contender("eager", 14.1),
            contender("inductor", 14.3, compile_s=3.0),
            contender(
                "tilelang",
                14.9,
                status="wrong",
                reason="Worst error is 3.2 times the allowed one.",
                error=ErrorStats(worst=3.2, contender_max=0.05, eager_max=0.008, cases=24, deterministic=False),
            ),
        ],
    )


def dropped() -> CandidateResult:
    return gemm_gelu().model_copy(
        update={
            "id": "c4",
            "key": "d4" * 32,
            "status": "dropped",
            "reason": "In the whole model its gain is gone.",
            "pays_back_calls": None,
        }
    )


def bert_profile(layers: int = 12) -> ProfileInfo:
    ops: list[OpRow] = []
    edges: list[EdgeRow] = []

    def op(node: str, name: str, module: str, us: float, *inputs: str, bound: str = "memory") -> str:
        ops.append(
            OpRow(
                graph=0,
                node=node,
                op=name,
                module=module,
                source="modeling_bert.py:1 SECRET_LINE",
                shapes="bfloat16[16384,768]",
                time_us=us,
                share=us / 7160,
                kernels=int(us > 0),
                flops=1e9 if bound == "compute" else 0,
                bytes=5e7,
                bound=bound,
                bound_share=0.6,
            )
        )
        edges.extend(EdgeRow(source=i, target=node) for i in inputs)
        return node

    h = op("emb_w", "embedding", "embeddings.word_embeddings", 60)
    h = op("emb_ln", "layer_norm", "embeddings.LayerNorm", 24, op("emb_add", "add", "embeddings", 37, h))
    for k in range(layers):
        p = f"encoder.layer.{k}"
        qkv = [
            op(f"l{k}_{x}", "linear", f"{p}.attention.self.{x}", 46, h, bound="compute")
            for x in ("query", "key", "value")
        ]
        ctx = op(f"l{k}_sdpa", "scaled_dot_product_attention", f"{p}.attention.self", 71, *qkv, bound="compute")
        out = op(f"l{k}_proj", "linear", f"{p}.attention.output.dense", 47, ctx, bound="compute")
        add = op(f"l{k}_add1", "add", f"{p}.attention.output", 37, out, h)
        mid = op(f"l{k}_ln1", "layer_norm", f"{p}.attention.output.LayerNorm", 24, add)
        fc = op(f"l{k}_fc", "linear", f"{p}.intermediate.dense", 117, mid, bound="compute")
        act = op(f"l{k}_gelu", "gelu", f"{p}.intermediate.intermediate_act_fn", 73, fc)
        out = op(f"l{k}_fc2", "linear", f"{p}.output.dense", 120, act, bound="compute")
        add = op(f"l{k}_add2", "add", f"{p}.output", 37, out, mid)
        h = op(f"l{k}_ln2", "layer_norm", f"{p}.output.LayerNorm", 24, add)
    first = op("pool_sel", "select", "pooler", 0, h, bound="free")
    op("pool_tanh", "tanh", "pooler.activation", 4, op("pool_fc", "linear", "pooler.dense", 10, first, bound="launch"))
    kernels = [
        KernelRow(
            name="nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT", calls=12, time_us=1404, share=0.196, nodes=["l0_fc"]
        ),
        KernelRow(
            name="nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", calls=60, time_us=3660, share=0.511, nodes=["l0_fc2"]
        ),
        KernelRow(
            name="void at::native::vectorized_elementwise_kernel<8, "
            "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() "
            "const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >",
            calls=12,
            time_us=876,
            share=0.122,
            nodes=["l0_gelu"],
        ),
        KernelRow(
            name="cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
            calls=12,
            time_us=852,
            share=0.119,
        ),
        *(KernelRow(name=f"small_kernel_{k}", calls=1, time_us=9.0, share=0.001) for k in range(9)),
    ]
    return ProfileInfo(
        step=interval(7520),
        busy_us=7160,
        attributed_us=6945,
        unlinked_us=215,
        coverage=0.97,
        launches=194,
        host_bound=False,
        idle_share=0.048,
        runs=3,
        graphs=1,
        ops=ops,
        kernels=kernels,
        edges=edges,
        trace="trace.json.gz",
    )
