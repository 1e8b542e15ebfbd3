"""fused8: 8-bit Adam for PyTorch, fused into one pass over memory, the same bits on every backend."""

from .checkpoints import convert_file, load_safetensors, save_safetensors
from .groups import param_groups, trainer_kwargs
from .in_backward import step_in_backward
from .memory import estimate_memory, memory_report
from .optimizer import Adam8bit, AdamW8bit

__all__ = [
    "Adam8bit",
    "AdamW8bit",
    "convert_file",
    "estimate_memory",
    "load_safetensors",
    "memory_report",
    "param_groups",
    "save_safetensors",
    "step_in_backward",
    "trainer_kwargs",
]
__version__ = "0.1.0"
