"""The torch engine: the reference implementation, for CPUs and CUDA GPUs, inference and training."""
