"""A repository on the Hugging Face hub: the models among its files, and which of them a name means. No network here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from pronk.errors import ModelNotFound

# What stands beside weights and is read too. Everything else in a repository (pictures, other frameworks' weights)
# stays where it is.
COMPANIONS = frozenset(
    """config.json generation_config.json model.safetensors.index.json pytorch_model.bin.index.json params.json
    tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json
    chat_template.jinja chat_template.json""".split()
)
_OF_MANY = re.compile(r"-(\d{5})-of-(\d{5})(?=\.(?:gguf|safetensors|bin)$)")


@dataclass(frozen=True)
class Repository:
    """`owner/name`, at a branch, tag or commit, and the part of it that is wanted where it holds several models."""

    id: str
    revision: str | None = None
    part: str | None = None

    def __str__(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{self.part}" if self.part else "")


@dataclass(frozen=True)
class Model:
    """One model in a repository: what to open ("" is the whole folder), and the files for that, weights last."""

    entry: str
    files: tuple[str, ...]


def models_in(files: Iterable[str]) -> dict[str, Model]:
    """Every model among the files of a repository, by the part that names it; "" is the one at the top."""
    files = sorted(files)
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault("" if "/" not in file else file.rpartition("/")[0], []).append(file)
    found: dict[str, Model] = {}
    for folder, inside in folders.items():
        companions = [f for f in inside if PurePosixPath(f).name in COMPANIONS]
        beside = {PurePosixPath(f).name for f in companions}
        weights = (_safetensors(inside) or _torch_archives(inside)) if "config.json" in beside else []
        if not weights and "params.json" in beside:
            weights = [f for f in inside if re.fullmatch(r"consolidated\.\d\d\.pth", PurePosixPath(f).name)]
        if weights:
            found[folder] = Model(folder, (*companions, *weights))
        for file in inside:
            name = PurePosixPath(file).name
            if name.endswith(".gguf"):
                first = _OF_MANY.sub(r"-00001-of-\2", file)
                known = found[first].files if first in found else ()
                found[first] = Model(first, (*known, file))
            elif name.endswith(".bin") and not name.startswith("tok") and not companions:  # llama2.c
                tokenizers = [f for f in inside if PurePosixPath(f).name.startswith("tok") and f.endswith(".bin")]
                found[file] = Model(file, (file, *tokenizers))
    return found


def choose(files: Iterable[str], repository: Repository) -> Model:
    """The model that is meant. Raises ModelNotFound, listing what there is, unless that is exactly one."""
    found = models_in(files)
    if not found:
        raise ModelNotFound(f"{repository}: holds no safetensors, GGUF, Meta or llama2.c weights")
    part = (repository.part or "").strip("/")
    if not part and ("" in found or len(found) == 1):
        return found.get("") or next(iter(found.values()))
    # The narrowest reading that fits anything: a name, a folder, the end of a file name (f16 is not bf16), any of it.
    ending, anything = re.compile(rf"(^|[^a-z0-9]){re.escape(part.lower())}$"), part.lower()
    readings = (
        [key for key in found if key == part],
        [key for key in found if key.startswith(part + "/")],
        [key for key in found if ending.search(_stem(key))],
        [key for key in found if anything in _stem(key)],
    )
    hits = next((keys for keys in readings if part and keys), [])
    if len(hits) == 1:
        return found[hits[0]]
    choices = hits or [key for key in found if key]
    listed = ", ".join(choices[:8]) + (f" and {len(choices) - 8} more" if len(choices) > 8 else "")
    problem = f"{len(hits)} models fit {part!r}" if hits else f"no model fits {part!r}" if part else "several models"
    raise ModelNotFound(f"{repository}: {problem}; name one as {repository.id}:PART, of: {listed or 'none'}")


def has_all_pieces(model: Model) -> bool:
    """Of a model in many files, each of which says how many there are."""
    pieces = [match for f in model.files if (match := _OF_MANY.search(f))]
    return not pieces or len(pieces) == int(pieces[0][2])


def _safetensors(files: list[str]) -> list[str]:
    """Mistral's `consolidated.safetensors` repeats the model under other names, and adapters are not models."""
    all_of_them = [f for f in files if f.endswith(".safetensors")]
    usual = [f for f in all_of_them if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", PurePosixPath(f).name)]
    others = [f for f in all_of_them if not PurePosixPath(f).name.startswith(("consolidated", "adapter"))]
    return usual or others


def _torch_archives(files: list[str]) -> list[str]:
    return [f for f in files if re.fullmatch(r"pytorch_model(-\d{5}-of-\d{5})?\.bin", PurePosixPath(f).name)]


def _stem(key: str) -> str:
    return PurePosixPath(_OF_MANY.sub("", key)).stem.lower()
