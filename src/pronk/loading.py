"""load(): a name or a path made into an LLM. Checkpoint, tokenizer and backend are joined here and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pronk import checkpoint as checkpoints
from pronk import engines
from pronk import tokenizer as tokenizers
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.engine.batch import PASS_TOKENS
from pronk.errors import BadFile, BadRequest, ModelNotFound, Unsupported, os_problem
from pronk.llm import LLM
from pronk.spellings import named as names_ours
from pronk.system import expanded, trim_memory
from pronk.tokenizer.source import chat_template
from pronk.tokenizer.vocabulary import TokenizerSource

if TYPE_CHECKING:
    from pronk.checkpoint.adapter import Adapter
    from pronk.formats import KVName
    from pronk.tokenizer import Tokenizer


@names_ours
def load(
    model: str | Path | Checkpoint | None = None,
    *,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
    merge_adapter: bool = False,
    engine: Literal["cpu", "torch"] | None = None,
    quantize: str | Mapping[str, str] | None = None,
    int8_threshold: float | None = None,
    int8_outliers: int | None = None,
    kv_dtype: KVName | None = None,
    device: str | None = None,
    compute_dtype: Literal["f32", "bf16", "f16"] | None = None,
    attn: Literal["flash", "math"] | None = None,
    batch_invariant: bool | None = None,
    threads: int | None = None,
    ctx_size: int | None = None,
    revision: str | None = None,
    pack_cache: bool = False,
    prefix_cache: int | None = None,
    max_batch_tokens: int = PASS_TOKENS,
    progress: Progress | None = None,
) -> LLM:
    """A model by name (`smollm2:135m`, `owner/repository`) or path, in any format pronk reads; or an open Checkpoint.

    `tokenizer`: a tokenizer file or folder, or a known one's name (`llama2`), instead of the checkpoint's own.
    `adapter`: a folder with a LoRA adapter in PEFT's format, which is kept beside the weights in whichever format these
    are; `llm.add_adapter` adds others. With `merge_adapter` it is added to the weights as they stream in, in float32:
    those that it concerns are f32 unless `quantize` says otherwise, whose grid takes part of what was learned. A chat
    template that it brings takes the place of the model's.
    `ctx_size`: the most tokens a sequence may have, prompt included (default: what the model was trained for).
    `prefix_cache`: how many tokens of earlier texts stay in the KV cache, so that a text which begins like one of them
    starts sooner (default: one context's; 0: none). `max_batch_tokens`: how many tokens a forward pass computes at
    most. Long prompts are read in pieces of it, beside which texts under way go on: fewer are a shorter wait for their
    next token, and read prompts more slowly.
    With `progress`, a download speaks on stderr as well.

    `engine`: "cpu", pronk's own kernels, or "torch"; None is torch where there is a GPU or one of its options is given.
    `quantize`: what weight matrices are made. Both engines have f32, f16, bf16, int8, llm-int8, q8 and q4 (beside which
    the torch engine does not round activations); the CPU engine also "auto" (as the file has them: its default) and a
    mapping from the beginnings of tensor names to formats, the longest of which decides ("" is for all others); the
    torch engine also absmax, absmax-row and zeropoint, for comparison (pronk.formats.int8 has their formulas); its
    default is f32 on a CPU, the stored 16-bit type on a GPU. Of
    llm-int8's activations, those over `int8_threshold` (6.0, or what the checkpoint says) are computed apart in 32
    bits, and of each token at least the `int8_outliers` largest (6; 0 leaves the threshold alone, as in the paper).
    The CPU engine's own option is `kv_dtype`, the type of keys and values (None or "auto": f32 for f32 and f16 weights,
    bf16 for all others). The torch engine's: `device`, `attn`, and beside weights in 8 or 4 bits `compute_dtype`, the
    type of all else (None: as the default of `quantize`); and on a GPU `batch_invariant`, with which a text's logits
    are the same to the bit whatever is computed beside it, as they always are on the CPU engine: slower, and of floats
    alone.

    `pack_cache`: the CPU engine keeps weights that take 256 MB and more as it has packed them, in the folder `packed`
    beside what pronk downloads; later starts map that file, which processes share.

    Raises ModelNotFound, DownloadFailed, BadFile, Unsupported or BadRequest, and PronkError where memory does not
    suffice or the engine is not installed.
    """
    begun = time.perf_counter()
    if prefix_cache is not None and (type(prefix_cache) is not int or prefix_cache < 0):
        raise BadRequest(f"prefix_cache must be a whole number of tokens, 0 or more, not {prefix_cache!r}")
    if merge_adapter and adapter is None:
        raise BadRequest("merge_adapter is for an adapter; name one with adapter=FOLDER, or leave it out")
    if type(max_batch_tokens) is not int or max_batch_tokens < 1:
        raise BadRequest(f"max_batch_tokens must be a whole number, 1 or more, not {max_batch_tokens!r}")
    model = hub.DEFAULT_MODEL if model is None else model
    named = {
        "model": None if isinstance(model, Checkpoint) else model,
        "tokenizer": tokenizer,
        "adapter": adapter,
        "device": device,
        "compute_dtype": compute_dtype,
        "revision": revision,
    }
    for what, name in named.items():
        _check_name(what, name)
    options = {
        "quantize": quantize,
        "int8_threshold": int8_threshold,
        "int8_outliers": int8_outliers,
        "kv_dtype": kv_dtype,
        "device": device,
        "compute_dtype": compute_dtype,
        "attn": attn,
        "batch_invariant": batch_invariant or None,
    }
    chosen = engines.named(engines.choose(engine, options))
    as_stored: Checkpoint | None = None
    if isinstance(model, Checkpoint):
        opened, model = model, model.path
    else:
        opened = checkpoints.open(hub.resolve(model, revision=revision, progress=progress is not None))
        as_stored = opened
    codec = tokenizer_of(opened, tokenizer)
    beside: Adapter | None = None
    changes = ""
    if adapter is not None:
        from pronk.checkpoint import adapter as adapters

        again = adapters.reader(expanded(adapter), opened)
        found = adapters.open(expanded(adapter), opened)
        if merge_adapter:
            opened = adapters.applied(opened, found)
        else:
            changes = adapters.shared(found)
            opened, beside = adapters.apart(opened, found)
        if codec and (template := chat_template(expanded(adapter))) is not None:
            codec.chat_template = template  # what it was trained through
    if progress:  # importing torch takes a moment of its own
        progress("", 0, opened.plan().stored)
    own = engines.options_for(chosen, options)
    if chosen.has_pack_cache:
        own["pack_cache"] = pack_cache and opened is as_stored
    backend = chosen.load(opened, **own, threads=threads, ctx_size=ctx_size, progress=progress)
    llm = LLM(str(model), opened, codec, backend, time.perf_counter() - begun, prefix_cache, max_batch_tokens)
    if beside:
        llm.adopt(str(adapter), beside, changes, again)
        del beside, found
        trim_memory()  # of its numbers as the file has them
        llm.load_s = time.perf_counter() - begun
        llm.backend = backend  # again: sessions say how long it took
    return llm


def open_source(src: str, tokenizer: str | None, revision: str | None = None) -> Checkpoint:
    """The checkpoint, with the tokenizer that is named, if any, so that it is that one which goes along.

    Raises BadRequest for another model's.
    """
    opened = checkpoints.open(hub.resolve(src, revision=revision))
    if not tokenizer:
        return opened
    tokenizer_of(opened, tokenizer)  # another model's is refused before anything is computed
    return replace(opened, tokenizer=find_tokenizer(tokenizer))


def find_tokenizer(path: str | PathLike[str]) -> TokenizerSource | None:
    """A tokenizer file or folder, any checkpoint that carries one, or a name that pronk knows: llama2, tok512."""
    path = expanded(path)
    if not path.exists() and (known := hub.tokenizer(str(path))):
        path = known
    try:
        return tokenizers.find(path)
    except (BadFile, ModelNotFound) as error:
        if not path.exists():
            raise
        problem = error
    try:
        return checkpoints.open(path).tokenizer
    except (BadFile, ModelNotFound, Unsupported) as error:
        if path.is_dir() and (isinstance(problem, BadFile) or isinstance(error, ModelNotFound)):
            raise problem from None  # of the tokenizer, which is what was asked for
        if isinstance(error, BadFile) and error.problem == checkpoints.NO_MODEL:
            raise BadFile(path, "is neither a tokenizer nor a model that brings one") from None
        raise


def _check_name(what: str, name: object) -> None:
    """An empty one is a variable that was never set rather than a wish for the default."""
    if name == "":
        raise BadRequest(f"{what} is empty; name one, or leave it out for the default")
    if name is not None and not isinstance(name, str | PathLike):
        raise BadRequest(f"{what} must be a name or a path, not {type(name).__name__}")


def tokenizer_of(opened: Checkpoint, named: str | Path | None = None) -> Tokenizer | None:
    """Its own, or the one named. Raises BadRequest for another model's."""
    try:
        source = opened.tokenizer if named is None else find_tokenizer(named)
        if source is None:
            return None
        codec = tokenizers.load(source, model_vocab_size=opened.config.vocab_size)
    except OSError as error:
        raise BadFile(named or opened.path, f"the tokenizer cannot be read: {os_problem(error)}") from None
    # Tokens that only a program adds, as padding, may lie beyond the embedding; those that text is made of may not.
    known = opened.config.vocab_size
    small = named is not None and 2 * codec.vocab_size < known  # embeddings are padded, but not to twice as many
    if small or not all(codec.is_special(token) for token in range(known, codec.vocab_size)):
        raise BadRequest(
            f"{source.path}: a tokenizer of {codec.vocab_size} tokens is another model's: {opened.path} knows {known}; "
            "name the model's own with tokenizer=FILE"
        )
    return codec
