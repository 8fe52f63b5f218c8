"""FuseScout finds the operator chains of a PyTorch model that are worth fusing, and proves it."""

__version__ = "0.1.0"
