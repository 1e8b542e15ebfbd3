"""fused8: 8-bit Adam for PyTorch, fused into one pass over memory, the same bits on every backend."""

from .optimizer import Adam8bit, AdamW8bit

__all__ = ["Adam8bit", "AdamW8bit"]
__version__ = "0.1.0"
