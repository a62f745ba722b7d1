"""Options as they were typed: the library's messages name its parameters, and people are told their own words."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from pronk.errors import ContextOverflow

_KEY = f"{__name__}.spelled"
_STRING = r"'[^']*'"
_SEVERAL = rf"\((?:{_STRING}|[^)'])*\)"
_VALUE = rf"{_STRING}|{_SEVERAL}|\[[^\]]*?(?:\]|\.\.\.)|[^\s,;:]+"  # of lists the long ones are cut


def remember(ctx: click.Context, names: Mapping[str, str]) -> None:
    """How the verb's options are spelled: `names`, those of ours that were typed, and as what; else their own."""
    spelled = {}
    for option in ctx.command.params:
        if isinstance(option, click.Option) and option.name:
            own = next((name for name in option.opts if name.startswith("--")), option.opts[0])
            spelled[option.name] = next((names[name] for name in option.opts if name in names), own)
    ctx.meta[_KEY] = ctx, spelled  # which the group's context sees as well


def blame(ctx: click.Context, error: click.BadParameter) -> None:
    """Let a value's error name the one spelling that was typed, where click lists them all."""
    if isinstance(error.param, click.Option) and not error.param_hint:
        error.param_hint = f"'{ctx.meta[_KEY][1][error.param.name]}'"


def in_words(ctx: click.Context, message: str) -> tuple[str, click.Context | None]:
    """A message of the library's with options for its parameters; and, where it begins with one, so that it is of a
    value out of range, the context of the verb."""
    if _KEY not in ctx.meta:
        return message, None
    verb, spelled = ctx.meta[_KEY]
    begins = None

    def option(found: re.Match[str]) -> str:
        nonlocal begins
        name, value = found["name"], found["value"]
        if value is None and "_" not in name and (found.start() or not message.startswith(name + " ")):
            return found[0]  # a word like any other, as temperature is
        begins = begins or (verb if not found.start() else None)
        told = [] if value is None or (value == "True" and name in switches) else _as_typed(value)
        return " ".join((spelled[name], *told))

    switches = {one.name for one in verb.command.params if isinstance(one, click.Option) and one.is_flag}
    names = "|".join(sorted(map(re.escape, spelled), key=len, reverse=True))
    begin = r"(?<![\w./-])(?:objective\.)?"  # as checkpoints call what is an objective's own
    pattern = rf"{begin}(?P<name>{names})(?![\w/-]|\.\w)(?:=(?P<value>{_VALUE}))?"
    return re.sub(pattern, option, message), begins


def overflow(ctx: click.Context, error: ContextOverflow) -> str:
    """What is too long, and the ways out that the verb has."""
    spelled = ctx.meta[_KEY][1] if _KEY in ctx.meta else {}
    ways = ["shorten it"]
    if "ctx_size" in spelled:
        ways.append(f"raise the context size ({spelled['ctx_size']})")
    if error.can_be_cut and "truncate" in spelled:
        ways.append(f"ask for a cut ({spelled['truncate']} left or right)")
    return (
        f"{error.problem}; {', '.join(ways[:-1])}{', or ' if len(ways) > 2 else ' or ' if ways[1:] else ''}{ways[-1]}"
    )


def _as_typed(value: str) -> list[str]:
    """A value as Python shows it. Several, of an option that is repeated, are left out."""
    return [] if value.startswith("(") else [value.lower() if value in ("True", "False") else value.strip("'")]
