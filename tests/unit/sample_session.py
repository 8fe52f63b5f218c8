"""Invented sessions for tests of what shows them. No number here was measured."""

from __future__ import annotations

import math

from sample_parts import ENVIRONMENT
from sample_parts import HOSTILE
from sample_parts import WORKLOAD
from sample_parts import add_norm
from sample_parts import bert_profile
from sample_parts import contender
from sample_parts import dropped
from sample_parts import gemm_gelu
from sample_parts import interval
from sample_parts import kept

from fusescout.session import EdgeRow
from fusescout.session import EndToEnd
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
                Rival(name="patched, rest eager", time=interval(6580), compile_s=3.1),
                Rival(name="patched, rest inductor", time=interval(6810), compile_s=14.0),
                Rival(name="compile", time=interval(6980), compile_s=11.2),
                Rival(name="compile + CUDA graphs", time=interval(7460, 0.012), compile_s=12.0),
                Rival(
                    name="compile max-autotune", reason="RuntimeError: Capture failed: the model syncs with the host."
                ),
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
