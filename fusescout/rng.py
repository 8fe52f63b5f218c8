"""CUDA's random generator after a CUDA graph could not be captured."""

from __future__ import annotations

import torch


def leave_capture(device: str) -> None:
    """Make `device` draw random numbers again after a capture on it failed.

    torch 2.11 tells the generator that a capture began, and that it ended only if it ended well: after one that didn't,
    each random operator of the process raises "Offset increment outside graph capture". A generator that works is left
    as it is, for CUDA graphs may be registered with its state; a stuck one goes on from a copy of its own.
    """
    if not device.startswith("cuda"):
        return
    where = torch.device(device)
    generator = torch.cuda.default_generators[torch.cuda.current_device() if where.index is None else where.index]
    state = torch.cuda.get_rng_state(where)
    try:
        torch.rand(1, device=where)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())
    torch.cuda.set_rng_state(state, where)
