"""A writer for each format: tensors go through one at a time, and nothing half-written stays."""
