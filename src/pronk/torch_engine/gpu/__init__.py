"""Kernels for CUDA, in Triton: imported only where a tensor is there and Triton can be."""
