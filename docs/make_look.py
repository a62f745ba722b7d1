"""Draws docs/look/*.svg, the pictures of docs/look-inside.md, with the default model: python docs/make_look.py"""

from __future__ import annotations

from pathlib import Path

import pronk
from pronk.look import Look

PICTURES = Path(__file__).with_name("look")
TEXT, ANSWER = "The llama lives in the Andes. The capital of France is", " Paris. Llamas eat telephones."
PLACE, LAYER, HEAD = 14, 16, 5  # " Paris", and a head that brings the country to where it is written


def pictures(look: Look) -> dict[str, str]:
    """Name -> SVG."""
    return {
        "surprise": look.svg(),
        "lens": look.lens(PLACE, k=4).svg(),
        "attention": look.attention_svg(PLACE - 1, LAYER, HEAD),
    }


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, drawn in pictures(pronk.load("smollm2:135m", engine="cpu").look(TEXT, answer=ANSWER)).items():
        (PICTURES / f"{name}.svg").write_text(drawn, encoding="utf-8")
