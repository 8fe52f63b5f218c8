"""Stand-alone scripts that build, check and time one contender without FuseScout."""

from __future__ import annotations

from fusescout.device import Device
from fusescout.ir import Subgraph
from fusescout.reference import make_inputs_source
from fusescout.reference import to_source

_MAIN = '''

def error(outputs, truth):
    """Largest error over the size of the truth, of all floating outputs."""
    pairs = [(o.double(), t.double()) for o, t in zip(outputs, truth) if o.is_floating_point()]
    return max(((o - t).abs().max() / t.square().mean().sqrt()).item() for o, t in pairs) if pairs else 0.0


def once_us(call, inputs):
    if DEVICE == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE).zero_()  # clear the L2
        begin.record()
        call(*inputs)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3
    start = time.perf_counter()
    call(*inputs)
    return (time.perf_counter() - start) * 1e6


@torch.no_grad()
def main():
    inputs = make_inputs(DEVICE)
    truth = truth_float64(*inputs)
    print(f"{TITLE} on {DEVICE}, torch {torch.__version__}")
    print(f"error of eager {error(reference(*inputs), truth):.3g}, of {TITLE} {error(contender(*inputs), truth):.3g}")
    times = {"eager": [], TITLE: []}
    for _ in range(30):  # interleaved, so that drift falls on both
        times["eager"].append(once_us(reference, inputs))
        times[TITLE].append(once_us(contender, inputs))
    for name, values in times.items():
        print(f"{name:>24}: {statistics.median(values):.1f} us")


if __name__ == "__main__":
    main()
'''


def script(graph: Subgraph, device: Device, title: str, code: str) -> str:
    """Source of the script.

    Args:
        graph: the sub-graph; its own code is the reference and, in float64, the truth.
        device: what it runs on.
        title: the contender's name.
        code: defines `contender(*inputs) -> tuple`, may use `reference` and `torch`.
    """
    return "\n".join(
        [
            f'"""{title}: {" -> ".join(graph.chain)}',
            "",
            f"Inputs: {', '.join(map(str, graph.inputs))}.",
            "Written by FuseScout; needs torch only.",
            '"""',
            "",
            "import statistics",
            "import time",
            "",
            "import torch",
            "",
            f'DEVICE, TITLE = "{device.kind}", "{title}"',
            "",
            "",
            to_source(graph),
            "",
            to_source(graph, "truth_float64", dtype_override="float64"),
            "",
            make_inputs_source(graph),
            "",
            code + _MAIN,
        ]
    )
