"""Takes the figures that these pages quote from the default model.

    python docs/how-it-works/measured.py [PAGE ...] [--write]     (needs torch)

prints what the pages show, of all of them or of those named; --write puts it into the pages and into measured.json,
which diagrams.py draws from. Tests hold the pages to measured.json, and measured.json to the model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pronk
from pronk.config import ModelConfig
from pronk.config.rope import frequency_factors, inverse_frequencies
from pronk.config.rope_scaling import RopeScaling
from pronk.engine.batch import Batch, Run
from pronk.measure.machine import machine
from pronk.measure.perplexity import log_likelihoods
from pronk.measure.windows import evaluation_text
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.functions import rotate

HERE = Path(__file__).parent
FILE = HERE / "measured.json"
SENTENCE = "The capital of France is Paris."
QUESTION = "The capital of France is"
JUDGED = (
    SENTENCE,
    "The capital of France is Lyon.",
    "Paris is the capital of France.",
    "Paris of France capital is The.",
)
TOKENS = 128  # of the text that comes with pronk, where a page says "a text"
LLAMAS = {  # vocabulary, hidden, feed-forward, layers, heads, KV heads; trillions of tokens
    "LLaMA 7B": ((32000, 4096, 11008, 32, 32, 32), 1.0),
    "LLaMA 13B": ((32000, 5120, 13824, 40, 40, 40), 1.0),
    "LLaMA 33B": ((32000, 6656, 17920, 60, 52, 52), 1.4),
    "LLaMA 65B": ((32000, 8192, 22016, 80, 64, 64), 1.4),
    "Llama 2 7B": ((32000, 4096, 11008, 32, 32, 32), 2.0),
    "Llama 2 13B": ((32000, 5120, 13824, 40, 40, 40), 2.0),
    "Llama 2 70B": ((32000, 8192, 28672, 80, 64, 8), 2.0),
    "Llama 3.1 8B": ((128256, 4096, 14336, 32, 32, 8), 15.0),
    "Llama 3.1 70B": ((128256, 8192, 28672, 80, 64, 8), 15.0),
    "Llama 3.1 405B": ((128256, 16384, 53248, 126, 128, 8), 15.6),
}
LLAMA31 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)

Figures = dict[str, Any]
Logits = NDArray[np.float32]


def surprises(llm: pronk.LLM, ids: Sequence[int]) -> NDArray[np.float64]:
    """-log p of every token but the first, in nats: [T - 1]."""
    return -log_likelihoods(llm.logits(ids)[:-1], ids[1:])


def probabilities(logits: Logits) -> NDArray[np.float64]:
    exp = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exp / exp.sum())


# What a language model is


def language_model(llm: pronk.LLM) -> Figures:
    ids = llm.tokenizer.encode(SENTENCE)
    p = probabilities(llm.logits(llm.tokenizer.encode(QUESTION))[-1])
    texts = {text: float(np.exp(surprises(llm, llm.tokenizer.encode(text)).mean())) for text in JUDGED}
    return {
        "tokens": [llm.tokenizer.decode([token]) for token in ids],
        "surprise": surprises(llm, ids).tolist(),
        "next": {llm.tokenizer.decode([token]): p[token] for token in np.argsort(-p)[:5].tolist()},
        "perplexity": texts,
    }


def show_language_model(found: Figures) -> str:
    lines = [f"{'token':<10}{'probability':>12}{'surprise':>10}{'so far':>8}", f"{found['tokens'][0]:<10}{'given':>12}"]
    total = 0.0
    for token, surprise in zip(found["tokens"][1:], found["surprise"], strict=True):
        total += surprise
        lines.append(f"{token.strip():<10}{np.exp(-surprise):>12.3g}{surprise:>10.2f}{total:>8.2f}")
    mean = total / len(found["surprise"])
    lines.append(f"mean {mean:.2f} nats, {mean / np.log(2):.2f} bits; perplexity {np.exp(mean):.1f}")
    likely = ", ".join(f"{token.strip()} {p:.1%}" for token, p in found["next"].items())
    lines += ["", f'after "{QUESTION}": {likely}', ""]
    return "\n".join(lines + [f"perplexity {value:>6.1f}   {text}" for text, value in found["perplexity"].items()])


# The residual stream


def hidden(module: Any, ids: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """What the head is given, [T, C]. `mask`: who sees whom, [T, T], instead of the causal one."""
    batch = TorchBatch.of(Batch.of([Run(list(ids), logits="all")]), torch.device("cpu"), None)
    for layer in module.model.layers:
        layer.self_attn.mode = "math"
    if mask is not None:
        batch.runs[0].__dict__["mask"] = mask
    with torch.inference_mode():
        return module.hidden(batch)


def stream(module: Any, ids: Sequence[int]) -> dict[str, list[Tensor]]:
    """Of each block: what comes in, what attention adds and what the feed-forward network adds, [T, C] each."""
    caught: dict[str, list[Tensor]] = {"in": [], "attention": [], "mlp": []}
    hooks = []
    for layer in module.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, given: caught["in"].append(given[0])))
        hooks.append(layer.self_attn.register_forward_hook(lambda *given: caught["attention"].append(given[2])))
        hooks.append(layer.mlp.register_forward_hook(lambda *given: caught["mlp"].append(given[2])))
    hidden(module, ids)
    for hook in hooks:
        hook.remove()
    return caught


def residual_stream(llm: pronk.LLM) -> Figures:
    module = llm.to_torch()
    caught = stream(module, llm.tokenizer.encode(evaluation_text())[:TOKENS])
    after = [x + a + m for x, a, m in zip(caught["in"], caught["attention"], caught["mlp"], strict=True)]
    lens = stream(module, llm.tokenizer.encode(QUESTION))
    says, right = [], []
    target = llm.tokenizer.encode(SENTENCE)[5]
    with torch.inference_mode():
        for x, a, m in zip(lens["in"], lens["attention"], lens["mlp"], strict=True):
            p = probabilities(module.lm_head(module.model.norm(x + a + m)[-1]).numpy())
            says.append(llm.tokenizer.decode([int(p.argmax())]))
            right.append(float(p[target]))

    def length(xs: list[Tensor], rows: slice) -> list[float]:
        return [float(x[rows].norm(dim=-1).mean()) for x in xs]

    others = slice(1, None)
    return {
        **{name: length(xs, others) for name, xs in caught.items()},
        "first token": length(after, slice(0, 1)),
        "out": length(after, others),
        "cosine": [
            float(torch.cosine_similarity(x[others], y[others]).mean())
            for x, y in zip(caught["in"], after, strict=True)
        ],
        "says": says,
        "right": right,
    }


def show_residual_stream(found: Figures) -> str:
    lines = ["layer      in  attention    mlp     out  cosine  first token   p(Paris)  likeliest"]
    for n in (0, 1, 2, 5, 10, 11, 15, 20, 23, 24, 26, 27, 28, 29):
        row = [found[name][n] for name in ("in", "attention", "mlp", "out")]
        lines.append(
            f"{n:>5}{row[0]:>8.1f}{row[1]:>11.1f}{row[2]:>7.1f}{row[3]:>8.1f}{found['cosine'][n]:>8.2f}"
            f"{found['first token'][n]:>13.0f}{found['right'][n]:>11.2g}  {found['says'][n].strip() or '␣'}"
        )
    return "\n".join(lines)


# Multi-head attention


def attention(llm: pronk.LLM) -> Figures:
    module, config = llm.to_torch(), llm.config
    scores: list[Tensor] = []

    def catch(layer: Any, given: tuple[Any, ...]) -> None:
        x, rope = given[:2]
        qk = torch.cat((layer.q_proj(x), layer.k_proj(x)), dim=-1).unflatten(-1, (-1, layer.head_dim))
        q, k = rotate(qk, rope).split((layer.heads, layer.kv_heads), dim=1)
        shared = k.repeat_interleave(layer.heads // layer.kv_heads, dim=1)
        scores.append(torch.einsum("shd,thd->hst", q, shared))

    hooks = [layer.self_attn.register_forward_pre_hook(catch) for layer in module.model.layers]
    hidden(module, llm.tokenizer.encode(evaluation_text())[:TOKENS])
    for hook in hooks:
        hook.remove()
    last = torch.stack([layer[:, -1] for layer in scores])  # [layers, H, S]: of the last token, which sees all

    def looked_at(rows: Tensor) -> float:
        """How many tokens, as exp of the entropy of the weights: 1 where one has all the weight."""
        weights = rows.softmax(-1)
        return float(torch.special.entr(weights).sum(-1).exp().mean())

    d = config.head_dim
    per_head = 2 * config.num_hidden_layers * d * 2  # keys and values, two bytes each
    return {
        "spread": [float(last.std(-1).mean()), float((last * d**-0.5).std(-1).mean())],
        "looked at": [looked_at(last), looked_at(last * d**-0.5)],
        "cache": {name: heads * per_head for name, heads in (("multi-head", 9), ("grouped", 3), ("multi-query", 1))},
    }


def show_attention(found: Figures) -> str:
    lines = [f"{'':<24}{'q . k':>10}{'q . k / 8':>12}"]
    lines.append(f"{'spread of scores':<24}{found['spread'][0]:>10.1f}{found['spread'][1]:>12.1f}")
    lines.append(f"{'tokens looked at':<24}{found['looked at'][0]:>10.1f}{found['looked at'][1]:>12.1f}")
    cache = ", ".join(f"{name} {size / 1000:.1f} kB" for name, size in found["cache"].items())
    return "\n".join([*lines, "", f"keys and values of a token, in 16 bits: {cache}"])


# Encoder, decoder, encoder-decoder


def masks(size: int) -> dict[str, Tensor]:
    """Who sees whom, [S, S] each."""
    all_, past = torch.ones(size, size, dtype=torch.bool), torch.ones(size, size, dtype=torch.bool).tril()
    following = past.roll(1, 1) & ~past
    return {
        "the past (causal)": past,
        "the past and the next": past | following,
        "all but the next": all_ & ~following,
        "all": all_,
    }


def encoder_decoder(llm: pronk.LLM) -> Figures:
    module = llm.to_torch()
    ids = llm.tokenizer.encode(evaluation_text())[:TOKENS]
    other = [*ids[:-1], llm.tokenizer.encode(" Paris")[0]]
    ends = range(TOKENS // 4, TOKENS, 8)
    found: Figures = {}
    for name, mask in masks(TOKENS).items():
        with torch.inference_mode():
            one, two = (module.lm_head(hidden(module, text, mask)).numpy() for text in (ids, other))
            last = [module.lm_head(hidden(module, ids[:end], mask[:end, :end])[-1:]).numpy() for end in ends]
        written = [log_likelihoods(row, [ids[end]])[0] for row, end in zip(last, ends, strict=True)]
        found[name] = {
            "moved": float(np.abs(one - two)[:-1].max()),
            "read": float(np.exp(-log_likelihoods(one[:-1], ids[1:]).mean())),
            "write": float(np.exp(-np.mean(written))),
        }
    return found


def show_encoder_decoder(found: Figures) -> str:
    lines = [f"{'a token sees':<24}{'earlier logits moved by':>24}{'perplexity':>12}{'at the end':>12}"]
    for name, of in found.items():
        lines.append(f"{name:<24}{of['moved']:>24.1f}{of['read']:>12.1f}{of['write']:>12.1f}")
    return "\n".join(lines)


# What causal models are good for


BLANK = ("She put the", " in the oven and waited for the bread to rise.", (" dough", " book", " cat", " key", " car"))
DIRECTIONS = (("The capital of France is", " Paris"), ("Paris is the capital of", " France"))
SUMS = 50


def causal_models(llm: pronk.LLM) -> Figures:
    rng = np.random.default_rng(0)
    noise = rng.integers(100, llm.config.vocab_size, 50).tolist()
    twice = surprises(llm, noise + noise)
    encode = llm.tokenizer.encode
    left, right, words = BLANK
    before = probabilities(llm.logits(encode(left))[-1])
    blank = {
        word.strip(): [float(before[encode(word)[0]]), -float(surprises(llm, encode(left + word + right)).sum())]
        for word in words
    }
    facts = {
        left + word: float(probabilities(llm.logits(encode(left))[-1])[encode(word)[0]]) for left, word in DIRECTIONS
    }
    return {
        "noise": [float(twice[:49].mean()), float(twice[50:].mean())],
        "blank": blank,
        "facts": facts,
        "sums": [_sums(llm, digits, rng) for digits in (1, 2, 3)],
    }


def _sums(llm: pronk.LLM, digits: int, rng: np.random.Generator) -> float:
    """The share of sums that are right, each after four examples."""
    prompts, answers = [], []
    for _ in range(SUMS):
        pairs = rng.integers(10 ** (digits - 1), 10**digits, (5, 2)).tolist()
        lines = [f"{a} + {b} = {a + b}" for a, b in pairs]
        prompts.append("\n".join(lines).rpartition(" ")[0])
        answers.append(lines[-1].rpartition(" ")[2])
    found = llm.generate(prompts, max_new_tokens=digits + 3, stop="\n")
    assert isinstance(found, list)
    return sum(one.text.strip() == answer for one, answer in zip(found, answers, strict=True)) / SUMS


def show_causal_models(found: Figures) -> str:
    lines = [
        "50 random tokens, surprise in nats: the first time {:.1f}, the second time {:.1f}".format(*found["noise"]),
        "",
        f"{'She put the ___':<18}{'before the rest':>16}{'log p of the whole':>20}",
    ]
    lines += [f"{word:<18}{p:>16.2g}{whole:>20.1f}" for word, (p, whole) in found["blank"].items()]
    lines += ["", *(f"{p:>6.1%}   {fact}" for fact, p in found["facts"].items()), ""]
    shares = [f"{n} digit{'s' * (n > 1)} {share:.0%}" for n, share in enumerate(found["sums"], 1)]
    return "\n".join([*lines, f"sums that are right, after four examples: {', '.join(shares)}"])


# LLaMA 1, 2 and 3


def llama(_: pronk.LLM) -> Figures:
    found: Figures = {}
    for name, ((vocab, c, f, layers, heads, kv_heads), trillions) in LLAMAS.items():
        config = ModelConfig(
            vocab_size=vocab, hidden_size=c, intermediate_size=f, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=c // heads,
        )  # fmt: skip
        sizes = {name: int(np.prod(shape)) for name, shape in config.tensor_shapes().items()}
        total = sum(sizes.values())
        table = sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
        cache = 2 * layers * kv_heads * config.head_dim * 2
        found[name] = {
            "parameters": total, "tables": table / total, "per": trillions * 1e12 / total, "cache": cache
        }  # fmt: skip
    eight = ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rope_theta=500000.0,
    )  # fmt: skip
    plain = inverse_frequencies(eight)
    factors = frequency_factors(LLAMA31, plain)
    wavelengths = (2 * np.pi / plain).tolist()
    return {"models": found, "rope": {"wavelengths": wavelengths, "factors": factors.astype(float).tolist()}}


def show_llama(found: Figures) -> str:
    lines = [f"{'':<16}{'parameters':>16}{'in tables':>11}{'tokens for each':>17}{'keys and values':>17}"]
    for name, of in found["models"].items():
        lines.append(
            f"{name:<16}{of['parameters']:>16,}{of['tables']:>11.1%}{of['per']:>17.0f}{of['cache'] / 1000:>14.0f} kB"
        )
    return "\n".join(lines)


PAGES: dict[str, tuple[Callable[[pronk.LLM], Figures], Callable[[Figures], str]]] = {
    "language-model": (language_model, show_language_model),
    "residual-stream": (residual_stream, show_residual_stream),
    "attention": (attention, show_attention),
    "encoder-decoder": (encoder_decoder, show_encoder_decoder),
    "causal-models": (causal_models, show_causal_models),
    "llama": (llama, show_llama),
}


def quoted(name: str) -> re.Pattern[str]:
    """What a page quotes: the command, and what it prints."""
    return re.compile(
        rf"(?<=^\$ python docs/how-it-works/measured\.py {name}\n)(?:(?!^```).)*", re.DOTALL | re.MULTILINE
    )


def main(names: list[str], *, write: bool) -> None:
    llm = pronk.load("smollm2:135m", engine="cpu", quantize="f32")
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in names or PAGES:
        measure, show = PAGES[name]
        kept[name] = measure(llm)
        print(show(kept[name]) if len(names) == 1 else f"{name}\n\n{show(kept[name])}\n")
    if write:
        here = {key: value for key, value in machine().items() if key in ("cpu", "cores", "system")}
        conditions = {
            "machine": here,
            "model": llm.name,
            "weights": "f32 of the file's Q4_1",
            "pronk": pronk.__version__,
        }
        kept["conditions"] = conditions
        for name in names or PAGES:
            page, shown = HERE / f"{name}.md", PAGES[name][1](kept[name]) + "\n"
            text = page.read_text(encoding="utf-8")
            page.write_text(quoted(name).sub(shown.replace("\\", r"\\"), text), encoding="utf-8")
        FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--write"], write="--write" in sys.argv)
