"""Formats of weights: what their numbers are rounded to, and what products they make."""
