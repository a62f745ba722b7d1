"""Training data: files become records, records examples, and examples batches."""
