"""`with fusescout.profile(model) as scout: … scout.step()`: an analysis on the inputs a training loop really has.

It watches the model's own calls through a hook, keeps copies of the inputs of one step, and analyses after the block.
The loop itself runs as it always does; nothing is patched until `scout.patch()` is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from fusescout.errors import NotAnalysed
from fusescout.errors import NothingSeen

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fusescout.analysis import Outcome
    from fusescout.patching import Patched
    from fusescout.session import Session


class Scout:
    """Watches one model inside a `with` block.

    Args:
        model: the model that the loop calls.
        wait: steps to let pass before inputs are kept, as in `torch.profiler.schedule`.
        loss: makes the scalar to differentiate from the model's output; see `Workload.loss_of` for the default.
        output: folder for session, report and plan; None writes nothing.
        settings: any field of `Config`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wait: int = 1,
        loss: Callable[[Any], torch.Tensor] | None = None,
        output: str | Path | None = None,
        **settings: Any,
    ) -> None:
        from fusescout.config import load

        self.model = model
        self.loss = loss
        self.output = Path(output) if output is not None else None
        self.config = load({**settings, "mode": settings.get("mode") or None})
        self._explicit_mode = settings.get("mode")
        self._wait = wait
        self._steps = 0
        self._seen: tuple[tuple[Any, ...], dict[str, Any], bool] | None = None
        self._hook: Any = None
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """Session and plan, after the block.

        Raises:
            NotAnalysed: the block has not ended yet.
        """
        if self._outcome is None:
            raise NotAnalysed()
        return self._outcome

    @property
    def session(self) -> Session:
        return self.outcome.session

    def step(self) -> None:
        """Tell that one step of the loop has ended."""
        self._steps += 1

    def patch(self) -> Patched:
        """Apply the plan to the model; the handle can `undo()` it."""
        from fusescout.patching import patch

        return patch(self.model, self.outcome.plan)

    def __enter__(self) -> Scout:
        self._hook = self.model.register_forward_pre_hook(self._watch, with_kwargs=True)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._hook.remove()
        if kind is not None:
            return
        if self._seen is None:
            raise NothingSeen(type(self.model).__name__, self._steps, self._wait)
        self._outcome = self._analyse(*self._seen)

    def _watch(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        from fusescout.capture.protect import copy_arguments

        if self._seen is None and self._steps >= self._wait and not torch.compiler.is_compiling():
            training = self.model.training and torch.is_grad_enabled()
            self._seen = (*copy_arguments(args, kwargs), training)

    def _analyse(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Outcome:
        from fusescout.api import analyze

        mode = self._explicit_mode or ("training" if training else "inference")
        was_training = self.model.training
        gradients = [p.grad for p in self.model.parameters()]
        try:
            return analyze(
                self.model,
                args,
                kwargs,
                loss=self.loss,
                output=self.output,
                config=self.config.model_copy(update={"mode": mode}),
            )
        finally:
            self.model.train(was_training)
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient


def profile(model: nn.Module, **options: Any) -> Scout:
    """Watch `model` inside a `with` block and analyse it after; see `Scout` for the options."""
    return Scout(model, **options)
