"""A reader for each format of checkpoints: a path becomes a Checkpoint, and no weight is read."""
