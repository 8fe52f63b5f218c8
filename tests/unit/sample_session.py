"""Invented sessions for tests of what shows them. No number here was measured."""

from __future__ import annotations

import math

from fusescout.session import CandidateResult
from fusescout.session import ContenderResult
from fusescout.session import EdgeRow
from fusescout.session import EndToEnd
from fusescout.session import Environment
from fusescout.session import ErrorStats
from fusescout.session import GraphBreak
from fusescout.session import Interval
from fusescout.session import KernelRow
from fusescout.session import OpRow
from fusescout.session import ProfileInfo
from fusescout.session import Rejection
from fusescout.session import Rival
from fusescout.session import Session
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


def accepted() -> Session:
    c1, c2, c3 = gemm_gelu(), add_norm(), kept()
    c0 = c3.model_copy(
        update={
            "id": "c5",
            "chain": ["permute", "clone", "view"],
            "status": "not raced",
            "contenders": [],
            "speedup": None,
            "winner": "eager",
            "reason": "Below the threshold: at best 0.1 % of the step.",
        }
    )
    return Session(
        verdict="Patching 36 sites makes BertModel 1.14× [1.13–1.15] faster than eager and 1.06× [1.05–1.07] faster "
        "than torch.compile.",
        environment=ENVIRONMENT,
        workload=WORKLOAD,
        profile=bert_profile(),
        candidates=[c3, c2, c1, c0],
        settings={
            "run_dir": "fusescout-runs/bert-1",
            "effort": "default",
            "seed": 0,
            "threshold": 1.05,
            "include_source": False,
            "policy": [
                "Timing interleaves the contenders (ABBA) in one process; the L2 cache is flushed before each sample.",
                "Intervals are 95 % percentile bootstraps of the median over 60 rounds; clocks were not locked.",
            ],
        },
        rejections=[
            Rejection(
                chain=["scaled_dot_product_attention"],
                where="encoder.layer.*.attention.self",
                count=12,
                time_us=852,
                code="one-op",
                reason="One kernel already (cuDNN flash attention).",
            ),
            Rejection(
                chain=["linear", "linear", "linear"],
                where="encoder.layer.*.attention.self",
                count=12,
                time_us=1656,
                code="gemm-bound",
                reason="GEMM-bound: one concatenated GEMM can give at most 2 % of the step.",
            ),
            Rejection(
                chain=["embedding", "add"],
                where="embeddings",
                time_us=97,
                code="escapes",
                reason="The embedding is used outside.",
            ),
        ],
        end_to_end=EndToEnd(
            baseline=interval(7520),
            patched=interval(6580),
            speedup=Interval(mid=1.143, low=1.131, high=1.152, samples=40),
            noise=Interval(mid=1.0005, low=0.996, high=1.005),
            verified=True,
            sites_patched=36,
            error=ErrorStats(worst=0.7, contender_max=0.03, eager_max=0.028, cases=8),
            verdict="1.14× faster",
            rivals=[
                Rival(name="compile", time=interval(6980), compile_s=11.2),
                Rival(name="compile + cudagraph", time=interval(7460, 0.012), compile_s=12.0),
                Rival(name="eager + cudagraph", reason="Capture failed: the model syncs with the host."),
            ],
        ),
        stages_s={"capture": 4.1, "profile": 9.7, "tune": 152.0, "end to end": 21.3},
        cache_hits=3,
        cache_misses=28,
        warnings=["GPU clocks were not locked; the noise floor was 0.5 %."],
    )


def empty() -> Session:
    return Session(
        verdict="Nothing to fuse: the model runs no operators.",
        environment=ENVIRONMENT.model_copy(update={"tilelang": None}),
        workload=WORKLOAD.model_copy(update={"inputs": [], "parameters": 0}),
        profile=ProfileInfo(
            step=Interval(mid=0.0, low=0.0, high=0.0),
            busy_us=0,
            attributed_us=0,
            unlinked_us=0,
            coverage=0,
            launches=0,
            host_bound=False,
            idle_share=0,
            runs=0,
            graphs=0,
        ),
    )


def all_kept() -> Session:
    """Framework code stays everywhere; host-bound on top, with more candidates than a terminal shows."""
    base = accepted()
    end = base.end_to_end
    assert end is not None
    return base.model_copy(
        update={
            "verdict": "Keep the framework's code: no contender beats it beyond the noise.",
            "candidates": [kept().model_copy(update={"id": f"k{i}"}) for i in range(14)],
            "profile": base.profile.model_copy(
                update={
                    "host_bound": True,
                    "idle_share": 0.341,
                    "breaks": [GraphBreak(reason="call to print()", where="bert.py:31")],
                }
            ),
            "end_to_end": end.model_copy(update={"patched": None, "speedup": None, "sites_patched": 0}),
            "warnings": [f"warning {k}" for k in range(7)],
        }
    )


def with_drop() -> Session:
    base = accepted()
    end = base.end_to_end
    assert end is not None
    speedup = Interval(mid=1.001, low=0.994, high=1.008, samples=40)
    return base.model_copy(
        update={
            "candidates": [dropped(), add_norm()],
            "verdict": "No difference end to end: 1.00× [0.99–1.01].",
            "end_to_end": end.model_copy(
                update={"dropped": ["c4"], "speedup": speedup, "verified": False, "patched": interval(7512)}
            ),
        }
    )


def hostile() -> Session:
    """Every text a user's model can choose is an attack on some format, and some numbers are not numbers."""
    odd = Interval(mid=math.nan, low=-math.inf, high=math.inf)
    candidate = gemm_gelu().model_copy(
        update={
            "id": HOSTILE,
            "chain": [HOSTILE, "x" * 400],
            "reason": HOSTILE,
            "winner": HOSTILE,
            "speedup": odd,
            "share": math.nan,
            "pays_back_calls": math.inf,
            "time_us": math.inf,
            "sites": [Site(graph=0, nodes=["a"], module=HOSTILE, source="SECRET_LINE")],
            "contenders": [
                contender(HOSTILE, 10.0, variant={HOSTILE: HOSTILE}, reason=HOSTILE, repro=HOSTILE),
                contender("eager", 10.0, time=odd, bound_share=math.nan),
            ],
        }
    )
    op = OpRow(
        graph=0,
        node=HOSTILE,
        op=HOSTILE,
        module=HOSTILE,
        source="SECRET_LINE",
        shapes=HOSTILE,
        time_us=math.nan,
        share=math.inf,
        kernels=1,
        flops=math.nan,
        bytes=math.inf,
    )
    profile = bert_profile(1).model_copy(
        update={
            "ops": [op, op.model_copy(update={"node": "b", "time_us": 5.0, "share": 0.5})],
            "step": odd,
            "coverage": math.nan,
            "edges": [
                EdgeRow(source=HOSTILE, target="b"),
                EdgeRow(source="b", target=HOSTILE),
                EdgeRow(source="gone", target="b"),
            ],
            "kernels": [KernelRow(name=HOSTILE * 8, calls=1, time_us=math.inf, share=math.nan)],
            "breaks": [GraphBreak(reason=HOSTILE, where=HOSTILE)],
        }
    )
    return accepted().model_copy(
        update={
            "verdict": HOSTILE,
            "candidates": [candidate],
            "profile": profile,
            "warnings": [HOSTILE],
            "stages_s": {HOSTILE: math.nan},
            "settings": {HOSTILE: HOSTILE, "policy": HOSTILE, "run_dir": HOSTILE},
            "workload": WORKLOAD.model_copy(update={"model": HOSTILE, "target": HOSTILE, "inputs": [HOSTILE]}),
            "rejections": [Rejection(chain=[HOSTILE], where=HOSTILE, code=HOSTILE, reason=HOSTILE, time_us=math.nan)],
            "end_to_end": EndToEnd(
                baseline=odd,
                patched=odd,
                speedup=odd,
                noise=odd,
                composition=HOSTILE,
                verdict=HOSTILE,
                rivals=[Rival(name=HOSTILE, time=interval(3.0)), Rival(name=HOSTILE, reason=HOSTILE)],
            ),
        }
    )


def large(ops: int = 2000) -> Session:
    """A flat model of many unlike modules, where neither folding nor collapsing by depth helps."""
    rows = [
        OpRow(
            graph=k * 3 // ops,
            node=f"n{k}",
            op=f"op{k % 40}",
            module=f"m{k}_{k % 7}.{'ab'[k % 2]}.c{k}",
            time_us=1.0 + k % 11,
            share=1 / ops,
            kernels=1,
        )
        for k in range(ops)
    ]
    edges = [EdgeRow(source=f"n{k}", target=f"n{k + 3}", graph=k * 3 // ops) for k in range(ops - 3)]
    base = accepted()
    many = [kept().model_copy(update={"id": f"k{i}", "chain": ["add", "mul"] * 30}) for i in range(200)]
    return base.model_copy(
        update={
            "profile": base.profile.model_copy(update={"ops": rows, "edges": edges}),
            "candidates": many,
            "rejections": [base.rejections[0]] * 300,
        }
    )


SAMPLES = {
    "empty": empty,
    "accepted": accepted,
    "all_kept": all_kept,
    "with_drop": with_drop,
    "hostile": hostile,
    "large": large,
}
