"""Which operators draw random numbers. A kernel must not contain one, and no rewriting may change their order."""

from __future__ import annotations

from fusescout.flops import op_class
from fusescout.ir import Node

TRAINING_FLAG = {"dropout": 2, "feature_dropout": 2, "alpha_dropout": 2, "feature_alpha_dropout": 2, "rrelu": 3}
"""Pointwise operators that draw only where the argument at this place is set."""
DROPOUT_P = 4
"""Place of the dropout probability of attention operators."""


RNN_TRAIN = {"input": 6, "data": 7}
"""Place of a recurrent layer's training flag by overload; its dropout probability is before it."""


def draws(node: Node) -> bool:
    """Whether running the node moves the random state, or may do so."""
    op = node.op.removesuffix("_")
    if op in TRAINING_FLAG:
        place, default = TRAINING_FLAG[op], op != "rrelu"
        return (node.args[place] if len(node.args) > place else default) is not False
    if op_class(node.target) == "attention":
        return bool(node.args[DROPOUT_P]) if len(node.args) > DROPOUT_P else False
    if op_class(node.target) == "rnn":
        place = RNN_TRAIN.get(node.target.rpartition(".")[2], 0)
        return len(node.args) <= place or bool(node.args[place - 1] and node.args[place])
    return op_class(node.target) == "random" or op.startswith("rrelu") or node.target.startswith("higher_order.")
