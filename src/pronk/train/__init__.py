"""Training through the cache-free forward pass of torch_engine/model.py."""
