"""The tokenizer in a Hugging Face folder: the file of its vocabulary, and the settings that lie beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk import strict_json
from pronk.errors import BadFile
from pronk.tokenizer.files import identify
from pronk.tokenizer.vocabulary import TokenizerSource

TEMPLATE = "chat_template.jinja"
SOURCE_FILE = "pronk_source_file"  # in tokenizer_config.json: what tokenizer.json was made of, for others to read
BARE = "pronk_trained_on_bare_texts"  # in an adapter's tokenizer_config.json: its template is the model's, and not its
_MAX_TEMPLATE = 1 << 20  # bytes


def of_file(path: Path) -> TokenizerSource | None:
    """The tokenizer that a file is, with its folder's settings and chat template; None if none. Raises BadFile."""
    kind = identify(path)
    if kind is None:
        return None
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter has the last word
        if present(path.with_name(name)):
            settings |= strict_json.read(path.with_name(name))
    model = path.with_name("tokenizer.model")
    if path.name == "tokenizer.json" and settings.get(SOURCE_FILE) == model.name and present(model):
        return of_file(model)
    return TokenizerSource(kind, path, settings, _chat_template(path.parent, settings))


def present(path: Path) -> bool:
    """Whether a file stands there. Raises BadFile for what only has its name: a pipe, a folder, a link to nothing."""
    if path.is_file():
        return True
    if path.is_symlink() or path.exists():
        raise BadFile(path, "is not a regular file, nor a link to one")
    return False


def chat_template(folder: Path) -> str | None:
    """What an adapter was trained through, which its folder brings, with or without a tokenizer. Raises BadFile."""
    config = folder / "tokenizer_config.json"
    settings = strict_json.read(config) if present(config) else {}
    return None if settings.get(BARE) is True else _chat_template(folder, settings)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own comes before tokenizer_config.json's entry: transformers writes and reads them so."""
    file = folder / TEMPLATE
    if present(file):
        if file.stat().st_size > _MAX_TEMPLATE:
            raise BadFile(file, f"more than {_MAX_TEMPLATE} bytes")
        try:
            return file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise BadFile(file, "is not UTF-8", offset=error.start) from None
    source, template = folder / "tokenizer_config.json", settings.get("chat_template")
    if template is None and present(folder / "chat_template.json"):
        source = folder / "chat_template.json"
        template = strict_json.read(source).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict) and _is_text(t.get("name"))}
        template = named.get("default")
    if template is not None and not _is_text(template):
        raise BadFile(source, "must be a text, or a list of objects with name and template", field="chat_template")
    return template


def _is_text(value: object) -> bool:
    return isinstance(value, str)
