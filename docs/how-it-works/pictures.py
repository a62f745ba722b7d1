"""Draws the attention of the default model for transformers.md.

    python docs/how-it-works/pictures.py [MODEL]      (needs torch and matplotlib)

Heads are not picked by hand: each panel shows the head that does one thing most, over all layers and heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

import pronk

TEXT = "The llama saw the river and the boy. The boy saw the llama and the river."
HERE = Path(__file__).parent
Weights = NDArray[np.float32]  # [H, S, S]: head, token that asks, token that is looked at


def attention_weights(llm: pronk.LLM, token_ids: list[int]) -> Weights:
    """softmax(q k^T / sqrt(D)) of every layer and head, as one array [layers * H, S, S]."""
    with torch.inference_mode():
        seen = llm.to_torch()(torch.tensor([token_ids]), output_attentions=True)
    return torch.cat(seen.attentions, dim=1)[0].numpy()


def habits(token_ids: list[int]) -> dict[str, NDArray[np.bool_]]:
    """For each habit, which (asking, looked at) pairs belong to it: [S, S]."""
    size = len(token_ids)
    row, column = np.indices((size, size))
    ids = np.array(token_ids)
    earlier_twin = (ids[:, None] == ids) & (column < row)
    after_twin = np.zeros_like(earlier_twin)
    after_twin[:, 1:] = earlier_twin[:, :-1]
    return {
        "looks at the token before": column == row - 1,
        "looks at itself": column == row,
        "rests on the first token": (column == 0) & (row > 0),
        "looks behind the last time\nthis word stood here": after_twin & (column < row),
    }


def draw(weights: Weights, token_ids: list[int], labels: list[str], heads: int) -> Figure:
    figure = Figure(figsize=(11, 11.6), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    for axis, (habit, pairs) in zip(axes, habits(token_ids).items(), strict=True):
        rows = pairs.any(-1)
        share = (weights * pairs)[:, rows].sum(-1).mean(-1)  # [layers * H]
        best = int(share.argmax())
        axis.imshow(weights[best], cmap="Blues", vmin=0, vmax=1)
        axis.set_title(f"{habit}: {share[best]:.0%}\nlayer {best // heads}, head {best % heads}", fontsize=11)
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.set_xlabel("token that is looked at")
        axis.set_ylabel("token that asks")
    figure.suptitle("What four heads of SmolLM2-135M look at; white is 0, dark blue is 1")
    return figure


def main() -> None:
    llm = pronk.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2:135m", engine="cpu", quantize="f32")
    token_ids = llm.tokenizer.encode(TEXT)
    labels = [llm.tokenizer.decode([token]).strip() or "␣" for token in token_ids]
    weights = attention_weights(llm, token_ids)

    figure = draw(weights, token_ids, labels, llm.config.num_attention_heads)
    figure.savefig(HERE / "attention.png", dpi=80)
    mean = weights.reshape(llm.config.num_hidden_layers, -1, len(token_ids), len(token_ids))
    print("share of all attention that rests on the first token, by layer:")
    print(" ".join(f"{layer[:, 1:, 0].mean():.0%}" for layer in mean))


if __name__ == "__main__":
    main()
