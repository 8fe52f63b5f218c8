"""Few configurations that stand for all: nvcc takes 5 s for each, and a GEMM has up to 35."""

from collections import Counter
from collections.abc import Sequence


def spread(configs: Sequence[dict], each: int = 2) -> list[dict]:
    """The first `each` of every kind of kernel: schedule, threads, cluster, blocks a multiprocessor, way to join."""
    seen: Counter = Counter()
    kept = []
    for config in configs:
        kind = tuple(config.get(k) for k in ("schedule", "threads", "cluster", "ctas", "join"))
        seen[kind] += 1
        if seen[kind] <= each:
            kept.append(config)
    return kept
