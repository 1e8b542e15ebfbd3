"""How many bytes an optimizer takes: estimated before it exists, and measured from its tensors.

All numbers are bytes; text shows MiB (2^20 bytes). Counted is what the tensors hold. An allocator adds its own
rounding: torch's on CUDA rounds every tensor up to 512 bytes.
"""

from .estimate import MemoryEstimate, estimate_memory
from .files import load_file, safetensors_header
from .report import MemoryReport, checkpoint_reports, memory_report
from .sizes import mib
from .tables import Table

__all__ = [
    "MemoryEstimate",
    "MemoryReport",
    "Table",
    "checkpoint_reports",
    "estimate_memory",
    "load_file",
    "memory_report",
    "mib",
    "safetensors_header",
]
