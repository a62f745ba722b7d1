"""Writes docs/cli.md, the reference of the command line, from what `--help` says: python docs/make_cli.py"""

from __future__ import annotations

from pathlib import Path

import click

from pronk.cli import VERBS, group

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100

INTRODUCTION = """\
# The command line

This page is what `pronk --help` and `pronk VERB --help` print; `python docs/make_cli.py` writes it, and a test holds it
to the program.

Text goes to stdout, everything else (statistics, notes, progress bars, errors) to stderr. `generate` ends the text with
one newline that is not the model's. Option names may be spelled with `_` for `-`.

Every verb takes options from a file, too: `--config run.yaml`, in the words of this page. A key is the long name of
an option or the name of an argument (`lora-rank: 16`, `model: smollm2:135m`), a value what would be typed: words are
taken as they stand (`lr: 2e-4`). Switches are `true` or `false`; options that may be repeated, and arguments of which
there may be several, take lists (`perplexity`: `models: [a, b]`). What is typed as well goes first. Unknown keys are
refused, with the nearest known one. It is read without running or growing anything, whatever its tags and aliases ask
for. Training runs write such a file, `run.yaml`, into their folder.

| exit code | meaning |
|---|---|
| 0 | done; also when the reader of stdout left early, as `head` does |
| 1 | an error, in one line after `pronk:`, also of a value that does not fit the model; or `verify` found a bug |
| 2 | wrong usage: an unknown option, a value out of range; said in one line, and a second names the help |
| 3 | `merge` or `quantize` would lose over a third of what the model was taught, and wrote nothing (`--accept-loss`) |
| 130 | interrupted with Ctrl-C; a second Ctrl-C does not wait for anything |

On a terminal, control characters in generated text are shown as signs (`␛`), so that a model cannot give the terminal
orders; files and pipes get the text as it is. Where `NO_COLOR` is set, nothing is coloured or dimmed. `chat` keeps what
you typed in `chat_history`, readable by you alone, in pronk's folder of the user's state directory (on Linux
`~/.local/state/pronk`) or in `$PRONK_HOME`. It edits what you type with prompt_toolkit where that is installed
(`pip install 'pronk[chat]'`), else with readline.

Shell completion: `eval "$(_PRONK_COMPLETE=bash_source pronk)"`, likewise `zsh_source`, and `fish_source` for `source`.
"""


def page() -> str:
    program = click.Context(group, info_name="pronk", terminal_width=WIDTH, **group.context_settings)
    parts = [INTRODUCTION, _section("pronk", group.get_help(program))]
    for verb in VERBS:
        command = group.get_command(program, verb)
        assert command is not None
        parts.append(
            _section(f"pronk {verb}", command.get_help(click.Context(command, parent=program, info_name=verb)))
        )
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
