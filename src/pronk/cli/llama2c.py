"""`pronk MODEL ...`: llama2.c's command line, as one of ours.

`./run model.bin -t 0.8 -p 0.9 -s 1 -n 256 -i "Once" -z tokenizer.bin -m chat -y SYSTEM`, and the older order, `./run
model.bin 0.8 256 "Once"`. Its defaults and its random numbers: the same seed, the same text. -n counts new
tokens, where run.c counts those of the prompt too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

_FLAGS = {"-t": "temperature", "-p": "top-p", "-s": "seed", "-n": "n", "-i": "prompt", "-z": "tokenizer", "-m": "mode",
          "-y": "system"}  # fmt: skip
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
_WHOLE_CONTEXT = "-1"


def is_model(argument: str) -> bool:
    """Whether a first argument, which is no verb, is a model's file or folder, or a word that ends as one does."""
    named = argument.endswith((".bin", ".gguf"))
    if os.path.exists(argument):  # noqa: PTH110 - Path's raises for names that are too long, as prompts are
        return named or os.sep in argument
    return named and not any(c.isspace() for c in argument)


def translated(args: Sequence[str]) -> list[str]:
    """Raises UsageError for what llama2.c does not have."""
    model, *rest = args
    given = {"temperature": "1.0", "top-p": "0.9", "n": "256", "mode": "generate"}
    in_order = ["temperature", "n"]
    while rest:
        argument = rest.pop(0)
        if argument in _FLAGS and rest:
            given[_FLAGS[argument]] = rest.pop(0)
        elif argument.startswith("-"):
            raise click.UsageError(
                f"{argument}: pronk MODEL takes llama2.c's options, {' '.join(_FLAGS)}, each with a value; "
                f"all others: pronk generate -m {model}"
            )
        elif in_order and _NUMBER.fullmatch(argument):
            given[in_order.pop(0)] = argument
        elif "prompt" in given:
            raise click.UsageError(f"{argument}: a second prompt; what has spaces goes in quotes")
        else:
            in_order, given["prompt"] = [], argument
    mode, prompt, steps = given.pop("mode"), given.pop("prompt", None), given.pop("n")
    if mode not in ("generate", "chat"):
        raise click.UsageError(f"-m {mode}: llama2.c's modes are generate and chat; a model is named first")
    if given["top-p"] == "0":  # which is run.c's word for all
        given["top-p"] = "1"
    if re.fullmatch(r"0*\.?0*", given["temperature"]):
        del given["top-p"]
    made = [mode, "-m", model, "-n", _WHOLE_CONTEXT if steps == "0" else steps, "--rng", "xorshift"]
    made += [part for name, value in given.items() for part in (f"--{name}", value)]
    if mode == "chat":
        if prompt is not None:
            raise click.UsageError("-i is for texts; in a chat, say it when you are asked")
        return [*made, "--chat-template", "llama2"]
    if "system" in given:
        raise click.UsageError("-y is for -m chat")
    return [*made, "--echo", "--prompt", prompt or ""]
