"""Save a checkpoint as safetensors, llama2.c or GGUF: never half of it, and never over its own source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from pronk import formats
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.checkpoint.writers import gguf as write_gguf
from pronk.checkpoint.writers import gguf_types
from pronk.checkpoint.writers import int8 as write_int8
from pronk.checkpoint.writers import llama2c as write_llama2c
from pronk.checkpoint.writers import safetensors as write_safetensors
from pronk.errors import BadRequest, PronkError
from pronk.formats import FORMATS
from pronk.system import replacing
from pronk.tokenizer.vocabulary import Vocabulary

Format = Literal["safetensors", "llama2c", "gguf"]

DTYPES: dict[Format, tuple[str, ...]] = {file: formats.names(file=file) for file in get_args(Format)}
MAX_SHARD_BYTES = 5_000_000_000  # Hugging Face's


def save(
    checkpoint: Checkpoint,
    destination: Path,
    *,
    to: Format,
    dtype: str | Mapping[str, str],
    int8_threshold: float | None = None,
    finite: bool = False,
    version: int | None = None,
    group_size: int = 64,
    vocabulary: Vocabulary | None = None,
    tokenizer_files: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    known_as: Path | None = None,
    base: str | None = None,
) -> Path:
    """Write `checkpoint` to `destination`: a folder for safetensors, a file for the others.

    `dtype`: for all matrices; for GGUF also a mapping from beginnings of tensor names, as `gguf_types.assign` has it.
    What is quantized here has the codes and scales that the CPU engine quantizes to in memory, but that rows of int8
    are not turned before: safetensors in int8 has compressed-tensors' layout, and in llm-int8 bitsandbytes', with
    `int8_threshold` (None: the source's, or 6.0); q8 and q4 are Q8_0 and Q4_1.
    `finite`: refuse infinity and NaN wherever they are.

    `version` is llama2.c's: 0 (the default) or 1 for f32, 2 for int8, in groups of `group_size`. The tokenizer goes
    along where the format holds it (`tokenizer_problem` says where it does not): safetensors gets copies of the
    source's Hugging Face files, or else `tokenizer_files` (name -> content); GGUF gets `vocabulary`, and so does
    llama2.c, as tokenizer.bin beside the file.

    `known_as`: what a message calls `destination` where the disk refuses, for one that gets its name later. `base`:
    what the model was made of, which GGUF's metadata name.

    Numbers are rounded to nearest where `dtype` is narrower, vectors never in GGUF and llama2.c. Peak memory is one
    tensor. Everything is written under another name and renamed at the end.

    Raises Unsupported for what the format cannot hold, BadRequest for arguments that do not fit together or a
    destination that exists, BadFile for a source that is broken, PronkError where the disk refuses.
    """
    version = _check_request(to, dtype, version)
    config, stream = checkpoint.config, TensorStream(checkpoint, progress, finite=finite)
    if to == "llama2c":
        write_llama2c.check(config, version, group_size)
    elif to == "gguf":
        check_gguf(checkpoint, vocabulary)
    check_destination(checkpoint, destination, to, overwrite)
    quantization, types = None, dict[str, str]()
    if to == "gguf":
        types = gguf_types.assign(checkpoint, {"": dtype} if isinstance(dtype, str) else dtype)
    elif (format := FORMATS[str(dtype)]).codes:
        told = checkpoint.int8_threshold if int8_threshold is None and format.outliers else int8_threshold
        types = write_int8.assign(checkpoint, format)
        quantization = write_int8.quantization_config(checkpoint, types, format, told)
    else:
        types = dict.fromkeys(checkpoint.tensors, format.stored[0])
    if int8_threshold is not None and quantization is None:
        raise BadRequest("int8_threshold is llm-int8's; leave it out")
    carried = tokenizer_problem(checkpoint, to, vocabulary, tokenizer_files) is None
    tokenizer = write_llama2c.tokenizer(vocabulary) if to == "llama2c" and carried and vocabulary else b""
    beside = destination.with_name("tokenizer.bin")
    if tokenizer and beside.exists():
        if _same(beside, tokenizer) or (checkpoint.tokenizer and beside.samefile(checkpoint.tokenizer.path)):
            tokenizer = b""
        elif not overwrite:
            raise BadRequest(
                f"{beside} exists and is another tokenizer; overwrite it (--overwrite), or save into another folder"
            )

    with _one_line(known_as or destination), replacing(destination) as partial:
        if to == "safetensors":
            partial.mkdir()
            write_safetensors.write(partial, stream, types, max_shard_bytes, quantization)
            for name, content in (tokenizer_files or {}).items():
                (partial / name).write_bytes(content)
            if checkpoint.tokenizer and not tokenizer_files and carried:
                write_safetensors.copy_tokenizer(partial, checkpoint.tokenizer)
        elif to == "gguf":
            with partial.open("xb") as file:
                number = gguf_types.file_type(checkpoint, types)
                write_gguf.write(file, stream, types, number, vocabulary, checkpoint.path.stem, base)
        else:
            with partial.open("xb") as file:
                write_llama2c.write(file, stream, version, group_size)
            if tokenizer:
                with replacing(beside) as partial_tokenizer:
                    partial_tokenizer.write_bytes(tokenizer)
    stream.finish()
    return destination


def check_gguf(checkpoint: Checkpoint, vocabulary: Vocabulary | None) -> None:
    """For who computes long before it saves. Raises Unsupported, by name, for what GGUF has no place for.

    Raises BadRequest for a vocabulary that is too large."""
    write_gguf.check(checkpoint.config, vocabulary)


def gguf_size(checkpoint: Checkpoint, vocabulary: Vocabulary | None) -> int:
    """Bytes of the GGUF file that the checkpoint is saved as, each tensor as it is."""
    return write_gguf.size(checkpoint.config, gguf_types.assign(checkpoint, {}), vocabulary, checkpoint.path.stem)


def needs_tokenizer_files(checkpoint: Checkpoint) -> bool:
    """Whether there are no files of Hugging Face's to copy. Meta's tokenizer.model is one, but transformers would read
    it with other habits (no BOS, no space before the text) without the settings that belong to it."""
    source = checkpoint.tokenizer
    if source is None:
        return False
    alone = source.kind == "sentencepiece" and not source.path.with_name("tokenizer_config.json").is_file()
    return alone or source.kind not in write_safetensors.TOKENIZER_NAMES


def tokenizer_problem(
    checkpoint: Checkpoint,
    to: Format,
    vocabulary: Vocabulary | None,
    tokenizer_files: Mapping[str, bytes] | None = None,
) -> str | None:
    """Why the tokenizer does not go along, in one line; None where it does, or where there is none."""
    if to == "safetensors":
        if needs_tokenizer_files(checkpoint) and checkpoint.tokenizer and not tokenizer_files:
            return f"no Hugging Face files were given for its {checkpoint.tokenizer.kind} tokenizer"
        return None
    if vocabulary is None:
        return "no vocabulary was given" if checkpoint.tokenizer else None
    return write_llama2c.tokenizer_problem(vocabulary, checkpoint.config.vocab_size) if to == "llama2c" else None


def _check_request(to: Format, dtype: str | Mapping[str, str], version: int | None) -> int:
    """llama2.c's version; 0 for the other formats."""
    if to not in get_args(Format):
        raise BadRequest(f"format {to!r} is not one of {', '.join(get_args(Format))}")
    if not isinstance(dtype, str) and to != "gguf":
        raise BadRequest(f"{to} has one type for all matrices; gguf holds several")
    if isinstance(dtype, str) and dtype not in DTYPES[to]:
        raise BadRequest(f"{to} is not written in {dtype!r}; choose from {', '.join(DTYPES[to])}")
    if to != "llama2c":
        if version is not None:
            raise BadRequest(f"version is llama2.c's; {to} has none to choose")
        return 0
    allowed = (2,) if FORMATS[str(dtype)].codes else (0, 1)
    if version is not None and version not in allowed:
        raise BadRequest(f"llama2.c in {dtype} is version {' or '.join(map(str, allowed))}, not {version}")
    return allowed[0] if version is None else version


def check_destination(checkpoint: Checkpoint, destination: Path, to: Format, overwrite: bool) -> None:
    target = destination.resolve()
    if target == Path.cwd() or target in Path.cwd().parents:
        raise BadRequest(f"{destination} is, or holds, the current folder; give another name")
    if destination.name in ("", ".."):
        raise BadRequest(f"{destination} has no name of its own; give {target}")
    sources = [checkpoint.path, *checkpoint.files, *([checkpoint.tokenizer.path] if checkpoint.tokenizer else [])]
    for source in map(Path.resolve, sources):
        if target == source or target in source.parents:
            raise BadRequest(f"{destination} is, or holds, the source {source}; save somewhere else")
    if destination.exists() or destination.is_symlink():  # one that leads nowhere is somebody's, too
        if not overwrite:
            raise BadRequest(f"{destination} exists; overwrite it (--overwrite), or give another name")
        if destination.exists() and not destination.is_dir() and not destination.is_file():
            raise BadRequest(f"{destination} is a device or a pipe, which is not replaced; give another name")
        if destination.exists() and destination.is_dir() != (to == "safetensors"):
            raise BadRequest(f"{destination} is {'a folder' if destination.is_dir() else 'a file'}; give another name")
        if destination.is_dir() and (foreign := write_safetensors.foreign_files(destination)):
            raise BadRequest(f"{destination} holds {foreign[0]}, which is no part of a model; give another name")
    if not destination.parent.is_dir():
        raise BadRequest(f"{destination.parent} is no folder; make it first")
    if not os.access(destination.parent, os.W_OK):
        raise BadRequest(f"{destination.parent} may not be written to; write elsewhere")


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


@contextmanager
def _one_line(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PronkError(f"{destination}: cannot be written: {error.strerror or error}") from None
