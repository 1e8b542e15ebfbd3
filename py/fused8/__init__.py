"""fused8: 8-bit Adam for PyTorch, fused into one pass over memory, the same bits on every backend."""

from .in_backward import step_in_backward
from .optimizer import Adam8bit, AdamW8bit

__all__ = ["Adam8bit", "AdamW8bit", "step_in_backward"]
__version__ = "0.1.0"
