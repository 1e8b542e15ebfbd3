"""Triton kernels of fused8 (installed as fused8.triton_kernels)."""
