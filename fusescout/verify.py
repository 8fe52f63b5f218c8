"""Does a contender compute what eager computes? The truth is the sub-graph in float64; `tolerance.py` has the rule.

Cases: captured activations, fresh normal inputs, the captured distribution and its values in another order, everything
scaled by 1e-3 and by 1e3, NaN and both infinities placed in each floating input, constant rows. In every case the
outputs must have eager's number, dtype, shape and strides, share no memory with the inputs (unless eager's do) nor with
one another, and the inputs must keep every byte, also those between their elements. Memory that outputs may be
given is poisoned before each run. A second run must agree bit by bit, or the result says it isn't deterministic.
Where a contender errs more than eager allows, the other evaluations that the framework may make (`admissible`) are run
too, and count if they err as much: then the result says against which of them it passed. Where it gives another of
NaN and the infinities than eager, both are run on finite inputs, which show if rounding decides that (`infinities`).
A case on which eager gives no finite number proves nothing; each output needs one that does. Running out of memory is
a failure. In training every gradient is held to the same rule, with random upstream gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from functools import partial

import torch
from torch import Tensor

from fusescout.admissible import Evaluation
from fusescout.admissible import evaluations
from fusescout.contenders.base import Runner
from fusescout.infinities import Infinities
from fusescout.inputs import InputSource
from fusescout.inputs import raw
from fusescout.ir import Subgraph
from fusescout.memory import filled_by_torch
from fusescout.memory import poisoned
from fusescout.memory import sharing
from fusescout.memory import untouched
from fusescout.reference import build
from fusescout.room import out_of_memory
from fusescout.session import ErrorStats
from fusescout.tolerance import EAGER
from fusescout.tolerance import Allowance
from fusescout.tolerance import Errors
from fusescout.tolerance import Sample

SAMPLED = 4096
"""Eager's error is sampled on at least this many elements (in at most `DRAWS` more draws of the inputs)."""
DRAWS = 8
KEEP_BYTES, KEEP_SHARE = 1 << 30, 4
"""What eager and the truth of all cases may take: so much on the CPU, that part of a GPU's free memory. What is not
kept is computed anew for each variant; ten cases of 8192 x 50257 bf16 scores take 41 GB."""
NO_GRADIENTS = "it has no gradients"
_RANDOM = ("rand", "bernoulli", "normal", "multinomial", "uniform", "exponential", "poisson", "native_dropout", "rrelu")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found. `reason` is empty if the contender passed, else `status` says what it is then."""

    reason: str
    stats: ErrorStats

    @property
    def status(self) -> str:
        """ "ok" | "wrong" | "unsupported" (it has no backward, and gradients were asked for)."""
        return "ok" if not self.reason else "unsupported" if NO_GRADIENTS in self.reason else "wrong"


def randomness(graph: Subgraph) -> str | None:
    """Why the sub-graph can't be checked since it draws random numbers, or None."""
    for op in graph.ops:
        drops = op.name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout")
        named = dict(op.kwargs)
        probability = named.get("p", op.args[1] if len(op.args) > 1 else 0.0)
        training = named.get("train", op.args[2] if len(op.args) > 2 else True)
        if drops and training and probability:
            return f"{op.name} in training draws random numbers."
        if "attention" in op.name and named.get("dropout_p", op.args[4] if len(op.args) > 4 else 0.0):
            return f"{op.name} with dropout draws random numbers."
        if op.name.startswith(_RANDOM):
            return f"{op.name} draws random numbers."
    return None


class Verifier:
    """Checks contenders of one sub-graph. Eager and the truth are computed once per case and kept while small.

    Args:
        graph: the sub-graph.
        captured: its inputs as seen at run time, or None.
        device: "cpu", "cuda" or "cuda:N".
        seed: base of all random inputs.
        gradients: check the gradients of every input that requires one as well.
    """

    def __init__(
        self, graph: Subgraph, captured: Sequence[Tensor] | None, device: str, seed: int = 0, gradients: bool = False
    ) -> None:
        self.graph, self.device, self.gradients = graph, device, gradients
        self.inputs = InputSource(graph, captured, device, seed)
        self.eager, self._truth = build(graph), build(graph, "float64")
        self._kept: dict[str, list[Allowance]] = {}
        self._made: dict[str, list[Tensor]] = {}
        self._samples: dict[tuple[str, str], list[Sample]] = {}
        self._infinities = Infinities(self.eager, self.truth, self._fits)
        self._room = torch.cuda.mem_get_info(device)[0] // KEEP_SHARE if device.startswith("cuda") else KEEP_BYTES

    def truth(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._truth([_double(t) for t in inputs]))

    @cached_property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """What the framework may make of the sub-graph beside eager."""
        return evaluations(self.graph, self.device)

    def check(self, run: Runner, level: str) -> Outcome:
        """Run a contender through the cases of `level` ("quick" or "full"); never raises for what it does wrong."""
        tally = _Tally(len(self.graph.outputs))
        for case in self.inputs.names(level):
            try:
                reason = self._check_case(run, case, tally, first=tally.cases == 0)
                if not reason and self.gradients and case in ("captured", "normal", "shuffled"):
                    reason = self._check_gradients(run, case, tally)
            except Exception as error:  # isolation boundary: whatever a contender raises is its failure
                reason = "it ran out of memory" if out_of_memory(error) else f"it raised {_line(error)}"
            if reason:
                self._made.pop(case, None)  # it may have written to them
                return tally.outcome(f"On {case} inputs {reason}.")
        if missing := tally.unproven():
            return tally.outcome(f"Output {missing[0]} is proved by no case: eager gave no finite value on any.")
        return tally.outcome("")

    def _check_case(self, run: Runner, case: str, tally: _Tally, first: bool) -> str:
        inputs = self._inputs(case)
        allowances = self._allowances(case, inputs)
        before = [raw(t).clone() for t in inputs]
        with torch.no_grad():
            with poisoned(self.graph.output_specs, self.device):
                outputs = tuple(run(inputs))
            if reason := self._structure(inputs, outputs, allowances) or untouched(inputs, before):
                return reason
            sample = partial(self._sample, case, inputs, allowances)
            excused = partial(self._infinities.undetermined, case, inputs)
            found = _judge(outputs, allowances, self._others(case, sample), excused)
            tally.add(found)
            if first and not any(e.reason for e in found):
                with poisoned(self.graph.output_specs, self.device):
                    again = tuple(run(inputs))
                tally.deterministic &= all(map(_same_bits, outputs, again))
                if reason := untouched(inputs, before):
                    return reason
                found += _judge(again, allowances, self._others(case, sample), excused)
                with filled_by_torch():
                    again = tuple(run(inputs))
                if reason := untouched(inputs, before):
                    return reason
                found += _judge(again, allowances, self._others(case, sample), excused)
        return next((f"output {k % len(allowances)} has {e.reason}" for k, e in enumerate(found) if e.reason), "")

    def _inputs(self, case: str) -> list[Tensor]:
        """Inputs of a case, made once while there is room: a contender that writes to them is found out and ends it."""
        if case in self._made:
            return self._made[case]
        inputs = self.inputs.make(case)
        if self._fits(inputs):
            self._made[case] = inputs
        return inputs

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        size = sum(t.untyped_storage().nbytes() for t in tensors)
        if size > self._room:
            return False
        self._room -= size
        return True

    def _allowances(self, case: str, inputs: list[Tensor]) -> list[Allowance]:
        if case in self._kept:
            return self._kept[case]
        with torch.no_grad():
            eager, truth = self.eager(inputs), self.truth(inputs)
            allowances = [Allowance(e, t) for e, t in zip(eager, truth, strict=True)]
            for more in self._draws(case, allowances):
                for allowance, e, t in zip(allowances, self.eager(more), self.truth(more), strict=True):
                    allowance.add(e, t)
        if self._fits([t for a in allowances for t in (a.eager, a.truth)]):
            self._kept[case] = allowances
        return allowances

    def _draws(self, case: str, allowances: Sequence[Allowance]) -> Iterator[list[Tensor]]:
        """More inputs of a case, for outputs of few elements."""
        fewest = min((a.eager.numel() for a in allowances if a.eager.numel()), default=SAMPLED)
        for draw in range(1, min(DRAWS, math.ceil(SAMPLED / fewest))):
            yield self.inputs.make(case, draw)

    def _others(self, case: str, sample: Callable[[Evaluation], list[Sample]]) -> Iterator[list[Sample]]:
        """How far the other evaluations are from the truth on a case: each is run when it is asked for, and once."""
        for evaluation in self.evaluations:
            try:
                if (case, evaluation.name) not in self._samples:
                    self._samples[case, evaluation.name] = sample(evaluation)
            except Exception:  # isolation boundary: what can't be run, for want of memory say, is no measure
                continue
            yield self._samples[case, evaluation.name]

    def _sample(
        self, case: str, inputs: list[Tensor], allowances: Sequence[Allowance], evaluation: Evaluation
    ) -> list[Sample]:
        samples = [Sample(o, a.truth, evaluation.name) for o, a in zip(evaluation(inputs), allowances, strict=True)]
        for more in self._draws(case, allowances):
            for sample, o, t in zip(samples, evaluation(more), self.truth(more), strict=True):
                sample.add(o, t)
        return samples

    def _structure(self, inputs: list[Tensor], outputs: tuple[Tensor, ...], allowances: list[Allowance]) -> str:
        if len(outputs) != len(allowances):
            return f"it gave {len(outputs)} outputs where eager gives {len(allowances)}"
        expected = [a.eager for a in allowances]
        for k, (out, want) in enumerate(zip(outputs, expected, strict=True)):
            if out.dtype != want.dtype:
                return f"output {k} is {out.dtype} where eager gives {want.dtype}"
            if out.shape != want.shape:
                return f"output {k} has shape {tuple(out.shape)} where eager gives {tuple(want.shape)}"
            if out.device.type != want.device.type:
                return f"output {k} is on {out.device}"
            if _strides(out) != _strides(want):
                return f"output {k} has strides {out.stride()} where eager gives {want.stride()}"
        memory, allowed = sharing(inputs, outputs), self._eager_sharing(inputs)
        if extra := sorted(memory - allowed):
            return f"{extra[0][0]} shares memory with {extra[0][1]}"
        return ""

    def _eager_sharing(self, inputs: list[Tensor]) -> set[tuple[str, str]]:
        if not hasattr(self, "_shared"):
            self._shared = sharing(inputs, tuple(self.eager(inputs)))
        return self._shared

    def _check_gradients(self, run: Runner, case: str, tally: _Tally) -> str:
        inputs = self.inputs.make(case)
        wanted = [k for k, s in enumerate(self.graph.inputs) if s.requires_grad and inputs[k].is_floating_point()]
        if not wanted:
            return ""
        eager = gradients(self.eager, inputs, wanted)
        truth = gradients(self._truth, [_double(t) for t in inputs], wanted)
        before = [raw(t).clone() for t in inputs]
        with poisoned([self.graph.inputs[k] for k in wanted], self.device):
            mine = gradients(run, inputs, wanted)
        if mine is None or eager is None or truth is None:
            return NO_GRADIENTS if mine is None else "eager has no gradients"
        for k, got, e in zip(wanted, mine, eager, strict=True):
            if got.dtype != e.dtype or got.shape != e.shape:
                return f"the gradient of input {k} is {got.dtype}{list(got.shape)}, eager's {e.dtype}{list(e.shape)}"
        if reason := untouched(inputs, before):
            return reason
        allowances = [Allowance(e, t) for e, t in zip(eager, truth, strict=True)]

        def sample(evaluation: Evaluation) -> list[Sample]:
            with evaluation.mode():
                found = gradients(evaluation.run, inputs, wanted) or ()
            return [Sample(g, a.truth, evaluation.name) for g, a in zip(found, allowances, strict=True)]

        found = _judge(mine, allowances, self._others(f"gradients of {case}", sample))
        tally.add(found, outputs=False)
        wrong = ((k, e.reason) for k, e in zip(wanted, found, strict=True) if e.reason)
        return next((f"the gradient of input {k} has {reason}" for k, reason in wrong), "")


def _judge(
    outputs: Sequence[Tensor],
    allowances: Sequence[Allowance],
    others: Iterator[list[Sample]],
    excused: Callable[[int], Tensor | None] = lambda output: None,
) -> list[Errors]:
    """Hold outputs against eager's error; other evaluations are asked for while that of those so far is too small."""
    pairs = enumerate(zip(allowances, outputs, strict=True))
    found = [a.judge(o, (), partial(excused, k)) for k, (a, o) in pairs]
    beside: list[list[Sample]] = []
    while _imprecise(found) and (more := next(others, None)) is not None:
        beside.append(more)
        for k, (allowance, out) in enumerate(zip(allowances, outputs, strict=True)):
            if found[k].reason:
                found[k] = allowance.judge(out, [samples[k] for samples in beside], partial(excused, k))
    return found


def _imprecise(found: Sequence[Errors]) -> bool:
    """Whether sizes of errors are all that is wrong."""
    wrong = [e for e in found if e.reason]
    return bool(wrong) and all(e.imprecise for e in wrong)


def gradients(run: Runner, inputs: Sequence[Tensor], wanted: Sequence[int]) -> tuple[Tensor, ...] | None:
    """Gradients of `wanted` inputs for random upstream gradients; absent ones are zeros. None if no output has any."""
    leaves = [t.detach().requires_grad_(k in wanted) for k, t in enumerate(inputs)]
    with torch.enable_grad():
        outputs = [o for o in run(leaves) if o.is_floating_point()]
        if not any(o.requires_grad for o in outputs):
            return None
        upstream = []
        for k, o in enumerate(outputs):
            drawn = torch.randn(o.shape, generator=torch.Generator().manual_seed(k + 1))
            narrow = inputs[wanted[0]].dtype if o.dtype == torch.float64 else o.dtype
            upstream.append(drawn.to(narrow if narrow != torch.float64 else torch.float32).to(o))
        pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], [leaves[k] for k in wanted], [u for _, u in pairs], allow_unused=True
        )
    return tuple(torch.zeros_like(leaves[k]) if g is None else g for k, g in zip(wanted, found, strict=True))


def check_model_outputs(
    outputs: Sequence[Tensor],
    eager: Sequence[Tensor],
    truth: Sequence[Tensor],
    factor: float = 1.0,
    others: Callable[[], Iterator[list[Sample]]] = lambda: iter(()),
) -> ErrorStats | str:
    """Hold a whole model's outputs against eager and the float64 model; a sentence says what is wrong.

    There is one set of inputs only, so for outputs of few elements eager's error counts for more: by 1 + 8 / elements.
    `factor` scales what eager's error counts for; `others` gives the errors of other evaluations, one sample for each
    output, and is called where eager's is too small.
    """
    tally = _Tally(len(eager))
    if len(outputs) != len(eager):
        return f"The model gave {len(outputs)} outputs where eager gives {len(eager)}."
    for k, (out, e, t) in enumerate(zip(outputs, eager, truth, strict=True)):
        if out.dtype != e.dtype or out.shape != e.shape:
            return f"Output {k} is {out.dtype}{list(out.shape)} where eager gives {e.dtype}{list(e.shape)}."
        allowance = Allowance(e, t, slack=factor * (1 + 8 / max(e.numel(), 1)))
        (errors,) = _judge([out], [allowance], ([samples[k]] for samples in others()))
        tally.add([errors], k)
        if errors.reason:
            return f"Output {k} has {errors.reason}."
    if missing := tally.unproven():
        return f"Output {missing[0]} has no finite value, so nothing is proved."
    return tally.outcome("").stats


class _Tally:
    """Adds up what the cases found."""

    def __init__(self, outputs: int) -> None:
        self.cases, self.deterministic = 0, True
        self.worst = self.contender = self.eager = 0.0
        self.informative = [False] * outputs
        self.against: set[str] = set()

    def add(self, found: Sequence[Errors], first: int = 0, outputs: bool = True) -> None:
        self.cases += 1
        for k, errors in enumerate(found, first):
            self.worst = max(self.worst, errors.ratio)
            self.contender, self.eager = max(self.contender, errors.contender), max(self.eager, errors.eager)
            self.against |= {errors.against} - {EAGER}
            if outputs:
                self.informative[k] |= errors.informative

    def unproven(self) -> list[int]:
        return [k for k, proved in enumerate(self.informative) if not proved]

    def outcome(self, reason: str) -> Outcome:
        stats = ErrorStats(
            worst=self.worst,
            contender_max=self.contender,
            eager_max=self.eager,
            cases=self.cases,
            deterministic=self.deterministic,
            against=" and ".join(sorted(self.against)) or EAGER,
        )
        return Outcome(reason, stats)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that mean something: not those of dimensions of size one, or of empty tensors."""
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1) if tensor.numel() else ()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
