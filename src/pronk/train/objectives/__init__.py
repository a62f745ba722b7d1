"""What training is after: an objective turns examples into sums that cost."""
