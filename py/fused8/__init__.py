"""fused8: 8-bit Adam for PyTorch, fused into one pass over memory, the same bits on every backend."""

from .groups import param_groups, trainer_kwargs
from .memory import estimate_memory, memory_report
from .optimizer import Adam8bit, AdamW8bit

__all__ = ["Adam8bit", "AdamW8bit", "estimate_memory", "memory_report", "param_groups", "trainer_kwargs"]
__version__ = "0.1.0"
