"""Calibrated quantization: fewer bits, chosen so that what a model answers on a text changes least."""

from __future__ import annotations

# GGUF's block types as they are asked for, the fewest bits first.
NAMES = {name.lower(): name for name in ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K")}

ROUNDINGS = ("gptq", "autoround")  # calibrate/gptq.py, and train/autoround.py, which takes torch
STEPS = 200  # of autoround, a layer
CTX = 512  # tokens that are read together, at most
MOST = 16 * CTX  # tokens that are read: twice as many leave 0.9 of the divergence, and take twice as long
WRITTEN = 4096  # tokens that a model writes itself, beside the text that comes with pronk


def own_text() -> str:
    """The text that comes with pronk to calibrate on: prose in several languages, tables and code, written for this."""
    import gzip
    from importlib.resources import files

    return gzip.decompress(files("pronk.calibrate").joinpath("text.txt.gz").read_bytes()).decode()
