"""Rollouts: what the model that is trained writes itself, and what it gets for that."""
