"""The CPU engine: kernels and the forward pass in C++ (src/native), here made into a Backend."""
