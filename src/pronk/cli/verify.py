"""`pronk verify`: do all paths through the model give the same logits?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, measuring, options, progress, text_files
from pronk.cli.verb import verb

if TYPE_CHECKING:
    from pronk.llm import LLM

_MAX_TOKENS = 256
_SHOWN = 60  # characters of a text that a mistake has made
_FLOATS = {"quantize": (None, "auto", "f32"), "compute_dtype": (None, "f32"), "kv_dtype": (None, "auto", "f32")}


@verb(
    epilog="""\b
Examples:
  pronk verify smollm2:135m
  pronk verify model.gguf --engine torch --quantize bf16 --attn math
  pronk verify ./my-model -f chapter.txt --json
  pronk verify smollm2:135m --training --adapter mine
  pronk verify smollm2:135m --mistakes -p "The capital of France is"

pronk computes the logits of one text in one pass without a KV cache, and compares them with those from
the KV cache token by token, in chunks, and in a batch. The verdict is "identical", "rounding" (they
differ by no more than the data type's rounding noise), or "bug" (by more), which exits with 1.

With --training, in float32, the reference is the training forward pass, with LoRA unmerged. Inference, packed
examples and gradient checkpointing are compared with it; and the model with its adapter switched off, with
the base model.

With --mistakes, on the torch engine, pronk generates texts without the KV cache, once correctly and three
times with a typical bug, and shows where each text first differs from the correct one."""
)
@options.model_argument
@options.file_option(
    "Verify on the text in FILE (UTF-8); - reads standard input.  [default: a text that comes with pronk]"
)
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Read at most N tokens of the text; with --mistakes, generate N.  [default: 256; with --mistakes "
              "16]")  # fmt: skip
@click.option("--mistakes", "wrongly", is_flag=True,
              help="Show three typical bugs of generating without a KV cache (torch engine).")  # fmt: skip
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT",
              help="With --mistakes: generate from this prompt. Repeatable.  [default: five that come with "
              "pronk]")  # fmt: skip
@click.option("--training", is_flag=True, help="Compare the training forward pass with the inference forward pass.")
@options.adapter_option
@options.loading_options
@options.json_option
def command(
    model: str,
    file: str | None,
    max_tokens: int | None,
    wrongly: bool,
    prompts: tuple[str, ...],
    training: bool,
    adapter: str | None,
    merge_adapter: bool,
    as_json: bool,
    **loading: Any,
) -> None:
    """Check that cache, chunks and batches keep logits equal."""
    if wrongly and training:
        raise click.UsageError("--mistakes and --training exclude each other")
    if prompts and not wrongly:
        raise click.UsageError("-p is for --mistakes; a text to verify with is -f FILE")
    if max_tokens == 1 and not wrongly:
        raise click.UsageError("verification needs at least 2 tokens; give -n 2 or more")
    text = None if file is None else text_files.read_file(file)
    loading["adapter"], ran = adapter, None
    if wrongly:
        result = _mistakes(model, [*prompts, *([] if text is None else [text])], max_tokens, loading)
    elif training:
        result = _training(model, text, max_tokens or _MAX_TOKENS, merge_adapter, loading)
    else:
        from pronk.measure.verify import verify

        llm = options.load_model(model, {**loading, "merge_adapter": merge_adapter})
        ran = llm.backend.conditions()
        with progress.shown(unit=progress.of_tokens) as advance:
            result = verify(llm, text, max_tokens or _MAX_TOKENS, progress=advance)
    if as_json:
        console.write_json({**result, "provenance": options.origin(model, loading, text, ran)})
    else:
        console.write((_mistakes_as_text if wrongly else _as_text)(result) + "\n")
    if result.get("verdict") == "bug":
        raise click.exceptions.Exit(1)


def _mistakes(model: str, prompts: list[str], new_tokens: int | None, loading: dict[str, Any]) -> dict[str, Any]:
    for name, value in (("engine", "torch"), ("attn", "math")):
        if loading[name] not in (None, value):
            raise click.UsageError(f"--mistakes takes a mask away, which --{name} {loading[name]} cannot; leave it out")
    from pronk.measure.mistakes import NEW_TOKENS, mistakes
    from pronk.torch_engine import import_torch

    import_torch()
    llm = options.load_model(model, {**loading, "engine": "torch", "attn": "math"})
    # One label for all texts: under one for each the bar would begin anew with each, and never be drawn.
    with progress.shown("writing texts", lambda done, total: f"text {done + 1} of {total}", logged=True) as advance:
        return mistakes(llm, prompts, new_tokens or NEW_TOKENS, progress=advance)


def _training(
    model: str, text: str | None, max_tokens: int, merge_adapter: bool, loading: dict[str, Any]
) -> dict[str, Any]:
    for name, values in _FLOATS.items():
        if loading[name] not in values:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"--training compares float32 with float32; leave {option} {loading[name]} out")
    from pronk.measure.verify_training import verify_training
    from pronk.system import expanded
    from pronk.torch_engine import import_torch

    import_torch()

    def load(folder: Path | None) -> LLM:
        own = {"quantize": "f32", "adapter": folder, "prefix_cache": 0}
        return options.load_model(model, {**loading, **own, "merge_adapter": merge_adapter and folder is not None})

    adapter = expanded(loading["adapter"]) if loading["adapter"] else None
    with progress.shown(unit=lambda done, total: f"pass {done} of {total}") as advance:
        return verify_training(load, adapter, text, max_tokens, progress=advance)


def _as_text(result: Mapping[str, Any]) -> str:
    promise = f"an RMS up to {result['allowed']:.3g} is this type's rounding"
    tokens, whole = result["tokens"], result["text_tokens"]
    length = f"{tokens} tokens" if tokens == whole else f"the first {tokens} of {whole} tokens (see -n)"
    ran = f"{measuring.ran(result)}; the logits of {length} against those"
    if losses := result.get("loss"):
        adapter = result["adapter"] or "an adapter of random numbers"
        head = f"{result['model']}, and {adapter}: {ran} that training computes"
        tail = [
            f"loss: {losses['trained']:.6f} in training, {losses['answered']:.6f} in inference",
            f"verdict: {result['verdict']} ({promise})",
        ]
    else:
        head, wrong = f"{result['model']}: {ran} of one cache-free pass", result["last_token_only"]
        promise = "on this engine the logits must be equal to the bit" if result["batch_invariant"] else promise
        tail = [
            f"verdict: {result['verdict']} ({promise})",
            f"for comparison, without a cache and given only the last token, logits are "
            f"{wrong['max_abs_difference']:.3g} off, and "
            f"{wrong['same_greedy_token']:.0%} of the greedy tokens are the same",
        ]
    return "\n".join([head, "", _table(result["paths"]), "", *tail])


def _table(paths: list[dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = [("path", "largest difference", "worst RMS", "greedy tokens differ", "verdict")]
    for path in paths:
        rms, greedy = "", ""  # of what is no logits
        if "worst_rms_difference" in path:
            rms, at = f"{path['worst_rms_difference']:.3g}", path["first_greedy_divergence"]
            greedy = "nowhere" if at is None else f"at token {at}"
        rows.append((path["path"], f"{path['max_abs_difference']:.3g}", rms, greedy, path["verdict"]))
    return console.table(rows, right=(1, 2))


def _mistakes_as_text(result: Mapping[str, Any]) -> str:
    from pronk.measure.formatting import digits

    future = result["future"]
    moved = [digits(by) if (by := future[way]) else "nothing" for way in ("without_cache", "without_mask")]
    return "\n".join([
        f"{result['model']}: {measuring.ran(result)}; the likeliest {result['new_tokens']} tokens after each prompt",
        *map(_of_prompt, result["prompts"]),
        "",
        "where: the first new token that differs from the correct text",
        f"future: in a text of {future['tokens']} tokens, changing the last token moves the logits before it by "
        f"{moved[0]} without a cache; by {moved[1]} without a mask",
    ])  # fmt: skip


def _of_prompt(entry: Mapping[str, Any]) -> str:
    rows = [("", "where", "text")]
    for way, found in entry["ways"].items():
        text = _quoted(found["text"] or found["tokens"])
        cut = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        rows.append((way, found["parts_at"] or "nowhere", cut))
    return f"\n{_quoted(entry['prompt'])}\n{console.table(rows, right=(1,))}"


def _quoted(said: str | list[int]) -> str:
    return json.dumps(said if isinstance(said, str) else " ".join(map(str, said)), ensure_ascii=False)
