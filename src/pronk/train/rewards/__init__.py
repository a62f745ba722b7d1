"""Rewards: what a completion is worth, by a function of one's own, a reward model, or a rule."""
