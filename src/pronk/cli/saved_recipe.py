"""`--save-config run.yaml`: the options that a verb runs with, typed or of `--config`, in a file that `--config` reads.

They are written as they were typed, before anything of them is run; what is as it is by default is not there, nor is
what is no part of a run or is secret.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from pronk.errors import BadFile, os_problem
from pronk.system import expanded, replacing

_WITHOUT = ("config", "save_config", "help", "resume", "overwrite")
_SECRET = ("api_key", "api_keys")
_HEAD, _ENDS_WITH = "# pronk ", "does this again; what is not here is as it is by default."


def save(ctx: click.Context, args: list[str]) -> None:
    """`args`: those of the verb, which are known to be right."""
    typed, _, _ = ctx.command.make_parser(ctx).parse_args(args=list(args))
    name = typed.get("save_config")
    if not isinstance(name, str):
        return
    from pronk.train.runs.recipe import text

    path = expanded(name)
    try:
        if path.exists() and not _is_ours(path):
            raise click.UsageError(f"{name} is no file that --save-config wrote, and stays as it is", ctx)
        verb, said = ctx.info_name, _said(ctx, typed)
        head = f"{_HEAD}{verb} --config {path.name} {_ENDS_WITH}\n"
        if "seed" not in said and any("-s" in one.opts for one in ctx.command.params):
            head += "# Where tokens are drawn, so is a seed, each time another one: for the same text add `seed: N`.\n"
        with replacing(path) as fresh:
            fresh.write_text(head + text(said), encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        raise BadFile(path, f"cannot be written: {error.strerror or os_problem(error)}") from None


def _is_ours(path: Path) -> bool:
    """Whether this wrote it, or a run. A pipe or a device, which would be waited for, is nobody's."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(1 << 12).decode(errors="replace").rstrip()
    return first.startswith(_HEAD) and first.endswith(_ENDS_WITH)


def _said(ctx: click.Context, typed: dict[str, Any]) -> dict[str, Any]:
    """What was typed goes before what the file of --config has."""
    found = {}
    of_file = ctx.default_map or {}
    for one in ctx.command.params:
        if one.name is None or one.name in (*_WITHOUT, *_SECRET):
            continue
        value = typed.get(one.name)
        if not _is_said(one, value):
            value = of_file.get(one.name)
        if _is_said(one, value):
            key, word = _word(one, value)
            found[key] = word
    return found


def _is_said(one: click.Parameter, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0
    may_be_bare = isinstance(one, click.Option) and isinstance(one.flag_value, str)
    return isinstance(value, str | bool) or (may_be_bare and value is not None)


def _word(one: click.Parameter, value: Any) -> tuple[str, Any]:
    if isinstance(one, click.Argument):
        return str(one.name).replace("_", "-"), _plain(value)
    names = one.opts
    if isinstance(value, bool) and one.secondary_opts and not value:
        names = one.secondary_opts
    key = next((name for name in names if name.startswith("--")), names[0]).lstrip("-")
    bare = not isinstance(value, str | list | tuple)  # a switch, or an option without its value
    return key, True if bare else _plain(value)


def _plain(value: Any) -> Any:
    """Whole numbers stand there without quotes; all else is text, which is what click reads."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if re.fullmatch(r"0|-?[1-9]\d{0,18}", value) else value
