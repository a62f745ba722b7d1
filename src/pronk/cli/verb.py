"""What a verb is: a command whose options other programs' names and a file may give too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pronk.cli import recipe, saved_recipe, typed
from pronk.cli.parameter_types import NAME
from pronk.spellings import SAME, named_here, ours


class Verb(click.Command):
    """A command whose option names may be spelled with _ for -, as --max_new_tokens, or as other programs do; and whose
    options a file may have."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        config = click.Option(
            ["--config"], type=NAME, metavar="FILE", is_eager=True, expose_value=False, callback=recipe.take,
            help="Take options from FILE: YAML, one `name: value` a line, named as on this page. What the command "
            "line gives wins over FILE.",
        )  # fmt: skip
        save_config = click.Option(
            ["--save-config"], type=NAME, metavar="FILE", expose_value=False,
            help="Also write all options given, on the command line and by --config, to FILE, for --config to read.",
        )  # fmt: skip
        self.params += [config, save_config]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {name for parameter in self.params for name in parameter.opts}
        spelled = {}  # ours, as typed
        for n, argument in enumerate(args):
            if argument == "--":  # what follows is no option
                break
            name, equals, value = argument.partition("=")
            if name in names or not name.startswith("--"):
                short = name if name in names else name[:2]  # -n5
                spelled[short] = short
                continue
            same = SAME.get(name[2:].replace("-", "_"), name[2:])
            if (dashed := "--" + same.replace("_", "-")) in names:
                args[n] = dashed + equals + value
                spelled[dashed] = name
        typed.remember(ctx, spelled)
        given = list(args)  # of which click takes away what it has read
        try:
            left = super().parse_args(ctx, args)
            if not ctx.resilient_parsing:
                saved_recipe.save(ctx, given)
            return left
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click's parser does not always say whose options they were
            if isinstance(error, click.BadParameter):
                recipe.blame(ctx, error)
                typed.blame(ctx, error)
            if isinstance(error, click.NoSuchOption) and (way_out := self._way_out(error.option_name, ctx)):
                raise click.UsageError(f"no option {error.option_name}; {way_out}", ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Under the headings that `together` gave, in the order in which each is first met."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                names, words = record
                row = names, words.replace("]  [", "; ")  # a default in words, and what click adds to it
                sections.setdefault(getattr(parameter, "heading", "Options"), []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def _way_out(self, name: str, ctx: click.Context) -> str | None:
        """To what another program's option is here."""
        if SAME.get(name.lstrip("-").replace("-", "_"), name) in ("model", "--model", "-m"):
            is_argument = any(isinstance(p, click.Argument) and p.name == "model" for p in self.params)
            return f"the model is an argument: {ctx.command_path} MODEL" if is_argument else None
        option = named_here(name)
        return ours(name) if option is None or any(p.name == option for p in self.params) else None


def verb(*, epilog: str) -> Callable[[Callable[..., None]], click.Command]:
    return click.command(cls=Verb, epilog=epilog)
