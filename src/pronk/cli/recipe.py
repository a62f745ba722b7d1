"""`--config run.yaml`: options of a verb from a file, in the words of the command line, which goes before it.

Values are taken as they stand in the file, and click makes of them what it makes of a typed word: `lr: 2e-4` is
--lr 2e-4, whatever YAML holds 2e-4 to be. Nothing of YAML's is constructed, so that no tag runs anything and an alias
cannot grow.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.errors import BadFile, os_problem, short
from pronk.spellings import SAME, ours
from pronk.system import expanded

if TYPE_CHECKING:
    from yaml.nodes import Node

_LARGEST = 1 << 18  # bytes
_DEEPEST = 16  # brackets in brackets, of which options need one
_TAG = "tag:yaml.org,2002:"
_WORDS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}
_KEY = f"{__name__}.keys"


def take(ctx: click.Context, param: click.Parameter, name: str | None) -> None:
    """The callback of the option. What the file says becomes the verb's defaults."""
    if name is None:
        return
    path = expanded(name)
    known = _names(ctx.command)
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, node in members(path):
        of = _meant(key, known)
        if of is None or of.name is None:
            problem = f"{name}: no option {short(key)} of {ctx.command_path}"
            if (verb := _verb(path)) not in (None, ctx.info_name):
                raise click.UsageError(f"{problem}; its first line says that it is of pronk {verb}", ctx)
            raise click.UsageError(f"{problem}{_way_out(key, known)}", ctx)
        if of.name in keys:
            raise click.UsageError(f"{name}: {_both(keys[of.name], key)}; leave one out", ctx)
        keys[of.name] = key
        try:
            said = _value(of, node, key)
        except ValueError as error:
            raise click.UsageError(f"{name}: {key} {error}", ctx) from None
        if said is not None:
            found[of.name] = said
    ctx.default_map = found
    ctx.meta[_KEY] = name, keys


def blame(ctx: click.Context, error: click.BadParameter) -> None:
    """Let the error of a value that the file has name the file."""
    if _KEY in ctx.meta and error.param and not error.param_hint:
        name, keys = ctx.meta[_KEY]
        source = click.core.ParameterSource.DEFAULT_MAP
        if error.param.name in keys and ctx.get_parameter_source(error.param.name) is source:
            error.param_hint = f"'{keys[error.param.name]}' in {name}"


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """By what a file may call them: arguments by their names, options by theirs and all of their spellings."""
    said = [one for one in command.params if one.name not in ("config", "save_config", "help")]
    found = {one.name.replace("_", "-"): one for one in said if one.name}
    return found | {opt[2:]: one for one in said for opt in (*one.opts, *one.secondary_opts) if opt.startswith("--")}


def _meant(key: str, known: dict[str, click.Parameter]) -> click.Parameter | None:
    """With _ for -, or in another program's word, as on the command line."""
    same = SAME.get(key.replace("-", "_"), key)
    return known.get(key.replace("_", "-")) or known.get(same.replace("_", "-"))


def _way_out(key: str, known: dict[str, click.Parameter]) -> str:
    from difflib import get_close_matches

    if close := get_close_matches(key.replace("_", "-"), known, n=1):
        return f"; did you mean {close[0]}?"
    return f"; {there}" if (there := ours(key)) else ""


def _verb(path: Path) -> str | None:
    """Of which verb a file is that pronk wrote, as its first line says."""
    with path.open("rb") as file:
        found = re.match(rb"# pronk ([a-z-]{1,20}) --config ", file.readline(1 << 12))
    return found[1].decode() if found else None


def _both(first: str, second: str) -> str:
    return f"{first} stands there twice" if first == second else f"{first} and {second} are the same option"


def members(path: Path) -> list[tuple[str, Node]]:
    """The keys of a file, and what stands there. Raises BadFile."""
    import yaml

    try:
        if not path.is_file():
            raise BadFile(path, "is no file" if path.exists() else "no such file")
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
    except OSError as error:
        raise BadFile(path, f"cannot be read: {os_problem(error)}") from None
    if len(raw) > _LARGEST:
        raise BadFile(path, f"is larger than {_LARGEST >> 10} KiB, which no file of options is")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(path, f"not UTF-8 text (byte {error.start}); convert it first") from None
    try:
        root = yaml.compose(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        problem = " ".join(str(problem or error).split())
        raise BadFile(path, f"is not YAML: {problem}", field=f"line {mark.line + 1}" if mark else None) from None
    except (ValueError, OverflowError):  # an escape of no character
        raise BadFile(path, "is not YAML: it escapes a character that there is not") from None
    except RecursionError:
        raise BadFile(path, "is nested too deep; options are words and lists of words") from None
    if not isinstance(root, yaml.MappingNode):
        raise BadFile(path, "must hold options, each on a line, as lora-rank: 16")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise BadFile(path, "has a key that is no word", field=f"line {key.start_mark.line + 1}")
    return [(key.value, node) for key, node in root.value]


@cache
def _loader() -> type[Any]:
    """The safe one; which takes minutes over brackets in brackets."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def fetch_flow_collection_start(self, kind: Any) -> None:
            if self.flow_level >= _DEEPEST:
                raise RecursionError
            super().fetch_flow_collection_start(kind)

    return Loader


def _value(of: click.Parameter, node: Node, key: str = "") -> Any:
    """As click takes it where nothing was typed; None: the option's own default. Raises ValueError, which says why."""
    import yaml

    several = of.nargs == -1 or bool(getattr(of, "multiple", False))
    if isinstance(node, yaml.SequenceNode):
        if not several:
            raise ValueError("takes one value, not a list")
        if not node.value:
            return None
        return [_word(each) for each in node.value]
    word = _word(node)
    if node.tag == _TAG + "null":
        return None
    if isinstance(of, click.Option) and of.is_flag:
        if node.tag != _TAG + "bool":
            raise ValueError(f"is a switch: true or false, not {short(word)}")
        if of.secondary_opts:  # --private and --public
            return _is_true(word) is not (f"--{key.replace('_', '-')}" in of.secondary_opts)
        return (of.flag_value is not False) if _is_true(word) else None  # --no-cache has False
    if isinstance(of, click.Option) and isinstance(of.flag_value, str) and node.tag == _TAG + "bool":
        return of.flag_value if _is_true(word) else None  # a value that may be left out
    return [word] if several else word


def _is_true(word: str) -> bool:
    return word.lower() in ("true", "yes", "on")


def _word(node: Node) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        raise ValueError(f"takes words, not {kind}")
    if node.tag not in _WORDS:
        raise ValueError(f"has the tag {short(node.tag)}; leave it out")
    return str(node.value)
