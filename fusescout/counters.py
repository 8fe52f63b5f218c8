"""What a patch does and did, in numbers and reasons: read it through `handle.counters`."""

from __future__ import annotations


class Counters:
    """What the patch did so far, over all captures of this model."""

    def __init__(self) -> None:
        self.captures = 0
        """Graphs captured: one for each new shape, dtype, mode or graph piece."""
        self.replaced: dict[str, int] = {}
        """Sites replaced, by entry id."""
        self.relaid = 0
        """Graphs that run in another memory layout than the model was written in."""
        self.layout = ""
        """Which."""
        self.masks = 0
        """Attention masks left out as constant, or made dense."""
        self.computed_once = 0
        """Operators that no longer run in every call, since no input decides what they give."""
        self.fallbacks: dict[str, str] = {}
        """Why an entry or a graph was left to the framework."""
        self.framework_calls = 0
        """Calls of graphs that no chain of the plan is in."""
        self.adopted: dict[str, str] = {}
        """Chains at new shapes that were taken up while the model ran, and on what grounds (`newshapes.py`)."""

    @property
    def sites(self) -> int:
        return sum(self.replaced.values())

    @property
    def changed(self) -> bool:
        """Whether any graph runs otherwise than the framework runs it."""
        return bool(self.sites or self.relaid or self.masks or self.computed_once)

    @property
    def described(self) -> str:
        """What was changed, for a sentence."""
        parts = [_counted(self.sites, "site")]
        parts += [self.layout] if self.relaid else []
        parts += [f"{_counted(self.masks, 'attention mask')} left out or made dense"] if self.masks else []
        parts += [f"{_counted(self.computed_once, 'operator')} fewer in a call"] if self.computed_once else []
        return ", ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
