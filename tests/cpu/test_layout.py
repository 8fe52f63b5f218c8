"""A sub-graph without its views computes what it did with them: random chains, interpreted, against eager."""

import itertools

import pytest
import torch
from fusescout.templates.axes import Axes
from fusescout.templates.operators import Unsupported
from fusescout.templates.pieces import lay_out
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from template_cases import trace

from fusescout.ir import Ref
from fusescout.reference import resolve


def interpret(graph, inputs):
    """The sub-graph's outputs through `lay_out`: strided pieces in, pointwise operators, strided pieces out."""
    laid = lay_out(graph)

    def view(tensor, piece):
        start = tensor.storage_offset() + piece.offset
        return tensor.as_strided(laid.sizes, piece.strides, start)

    values = [view(inputs[p.index], p) for p in laid.inputs]
    for op in laid.graph.ops:
        args = [values[a.to] if isinstance(a, Ref) else a for a in op.args]
        values.append(resolve(op.target)(*args))
    outputs = [torch.empty_strided(s.shape, s.stride) for s in graph.output_specs]
    for piece, value in zip(laid.outputs, laid.graph.outputs, strict=True):
        view(outputs[piece.index], piece).copy_(values[value].expand(laid.sizes))
    return outputs


def factors(n):
    return [(a, n // a) for a in range(1, n + 1) if n % a == 0]


@st.composite
def chains(draw):
    """A function of one tensor, as a list of steps on its current shape."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=4))
    steps, now = [], list(shape)
    for _ in range(draw(st.integers(1, 6))):
        rank = len(now)
        kind = draw(st.sampled_from(["neg", "permute", "split", "merge", "slice", "stride", "rotate", "stack", "add"]))
        d = draw(st.integers(0, rank - 1))
        if kind == "permute":
            order = draw(st.permutations(range(rank)))
            steps.append(lambda x, o=order: x.permute(*o))
            now = [now[k] for k in order]
        elif kind == "split":
            a, b = draw(st.sampled_from(factors(now[d])))
            steps.append(lambda x, d=d, a=a, b=b: x.unflatten(d, (a, b)))
            now[d : d + 1] = [a, b]
        elif kind == "merge" and d + 1 < rank:
            steps.append(lambda x, d=d: x.flatten(d, d + 1))
            now[d : d + 2] = [now[d] * now[d + 1]]
        elif kind == "slice" and now[d] > 1:
            start = draw(st.integers(0, now[d] - 1))
            count = draw(st.integers(1, now[d] - start))
            steps.append(lambda x, d=d, s=start, c=count: x.narrow(d, s, c) * 1.5)
            now[d] = count
        elif kind == "stride" and now[d] % 2 == 0:
            steps.append(lambda x, d=d: torch.stack((x.unflatten(d, (-1, 2)).select(d + 1, 1),), 0).squeeze(0) + 1)
            now[d] //= 2
        elif kind == "rotate" and now[d] % 2 == 0:

            def rotate(x, d=d):
                left, right = x.chunk(2, d)
                return torch.cat((-right, left), d)

            steps.append(rotate)
        elif kind == "stack":
            steps.append(lambda x, d=d: torch.stack((x, x * 2), d))
            now.insert(d, 2)
        elif kind == "add":
            steps.append(lambda x: x + x.narrow(-1, 0, 1))
        else:
            steps.append(torch.neg)
    return shape, steps


@settings(max_examples=80, deadline=None)
@given(chains())
def test_random_chains_of_views(chain):
    shape, steps = chain

    def function(x):
        for step in steps:
            x = step(x)
        return x * 3.0

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = function(x)
    try:
        graph, inputs = trace(lambda x: function(x).contiguous(), (x,))
        found = interpret(graph, inputs)
    except Unsupported:
        return  # a refusal is a reason, never a wrong result
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)


def test_most_chains_are_covered():
    """The test above must not pass by refusals alone."""
    q = torch.randn(2, 5, 3, 8).transpose(1, 2)

    def rotary(q, c, s):
        left, right = q.chunk(2, -1)
        return q * c + torch.cat((-right, left), -1) * s

    for function in (rotary, lambda q, c, s: torch.stack((q[..., ::2] * 2, q[..., 1::2]), -1).flatten(-2) + c * s):
        inputs = (q, torch.randn(5, 8), torch.randn(5, 8))
        graph, given_inputs = trace(function, inputs)
        torch.testing.assert_close(interpret(graph, given_inputs)[0], function(*inputs), rtol=0, atol=0)


def test_axes_become_one_where_sizes_allow():
    axes = Axes()
    for left, right in itertools.product(((2, 6), (4, 3), (12,), (2, 3, 2)), repeat=2):
        a = tuple(itertools.chain(*(axes.new(n) for n in left)))
        b = tuple(itertools.chain(*(axes.new(n) for n in right)))
        try:
            axes.same(a, b)
        except Unsupported:
            assert {left, right} == {(4, 3), (2, 6)} or (2, 3, 2) in (left, right)
            continue
        assert axes.leaves(a) == axes.leaves(b)
        assert axes.size(axes.leaves(a)) == 12


def test_a_value_that_meets_itself_transposed_is_refused():
    graph, _ = trace(lambda x: x + x.t(), (torch.randn(4, 4),))
    with pytest.raises(Unsupported, match="transposed"):
        lay_out(graph)
