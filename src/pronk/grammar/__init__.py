"""Texts that are to have a form: what is asked for, and the tokens that may follow. Needs llguidance, an extra."""
