"""Leave things as they were: copies that keep layout and address alignment, and a guard around running a model."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import nn

STATIC_MARK = "_dynamo_static_input_type"
"""What Dynamo writes on parameters and buffers it has seen."""
COMPILE_MARK = "_is_torch_compile"
"""What `torch.compile` writes on a module it was given."""


def copy_tensor(tensor: Tensor) -> Tensor:
    """A detached copy with the same strides, overlaps, offset from 16-byte alignment and `requires_grad`."""
    plain = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return plain.clone().requires_grad_(tensor.requires_grad)
    extent = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)) if plain.numel() else 0
    skip = tensor.data_ptr() % 16 // tensor.element_size()
    buffer = torch.empty(skip + extent, dtype=tensor.dtype, device=tensor.device)
    buffer[skip:].copy_(plain.as_strided((extent,), (1,)))
    return buffer.as_strided(plain.shape, plain.stride(), skip).requires_grad_(tensor.requires_grad)


def copy_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that a call may change freely: caches, in-place writes. Aliases among them stay aliases.

    What can't be copied (a tensor with a history, an open file) is passed as it is.
    """
    try:
        with torch.no_grad():
            copied: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((args, kwargs))
    except Exception:  # isolation boundary: `__deepcopy__` is the user's code
        return args, kwargs
    return copied


@contextmanager
def protected(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients, random state and Dynamo's marks are put back on leaving, also after an error.

    A buffer keeps its identity: its old contents are written back, and one that was replaced is set again.
    """
    tensors = list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    marked = COMPILE_MARK in vars(model)
    unmarked = [t for t in tensors if STATIC_MARK not in vars(t)]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    versions = [(b, b.detach().clone()) for b in model.buffers()]
    slots = [(m, dict(m._buffers), m.training) for m in model.modules()]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=random_devices(tensors)):
            yield
    finally:
        with torch.no_grad():
            for module, buffers, training in slots:
                module._buffers.clear()
                module._buffers.update(buffers)
                module.training = training
            for buffer, old in versions:
                if not _same(buffer, old):
                    buffer.copy_(old)
            for parameter, gradient, value in gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None and not _same(gradient, value):
                    gradient.copy_(value)
        if not marked:
            vars(model).pop(COMPILE_MARK, None)
        for tensor in unmarked:
            vars(tensor).pop(STATIC_MARK, None)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpy_state)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


def random_devices(tensors: list[Tensor]) -> list[int]:
    """CUDA devices whose random state a run on `tensors` may move."""
    if not torch.cuda.is_available() or not any(t.is_cuda for t in tensors):
        return []
    return sorted({t.get_device() for t in tensors if t.is_cuda} | {torch.cuda.current_device()})
