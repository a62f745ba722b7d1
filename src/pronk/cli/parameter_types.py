"""What an option's value may be, and what is said of one that it may not be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click


class Number(click.FloatRange):
    """Within its bounds, and finite: click lets NaN pass any bound. `infinite`: infinity will do as well."""

    def __init__(
        self, min: float | None = None, max: float | None = None, *, infinite: bool = False, **more: Any
    ) -> None:
        super().__init__(min, max, **more)
        self.infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            self.fail(f"{value!r} is no {'' if self.infinite else 'finite '}number", param, ctx)
        return number


class Name(click.types.StringParamType):
    """Text that is not empty: an empty name is a variable that was never set, and no wish for the default."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("must not be empty", param, ctx)
        return value


class FormatOnLoad(click.Choice):  # type: ignore[type-arg]  # generic in newer click alone
    """A format that weights are converted to on load. Of those that only files have, it says who makes such a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from pronk import calibrate

        if value not in self.choices and str(value).lower() in calibrate.NAMES:
            makes = f"pronk quantize MODEL OUT.gguf --to {value.lower()} makes one"
            self.fail(f"{value!r} is a type of GGUF files, which run as they are; {makes}", param, ctx)
        return super().convert(value, param, ctx)


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic in newer click alone
    """A number of bytes, in words that people have for it: 12GB, 1.5 GiB, 12000000000."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,18}|\d{0,15}\.\d{1,9}) *([a-z]*)", str(value).strip().lower())
        if not found or found[2] not in UNITS or (size := int(float(found[1]) * UNITS[found[2]])) < 1:
            self.fail(f"{value!r} is no size; write 12GB, 1.5GiB, or a number of bytes", param, ctx)
        return size


NAME = Name()
THRESHOLD = Number(min=0, infinite=True)  # of outliers: where it is infinite, there are none


def several(
    one: Callable[[str], Any], what: str, example: str
) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """The callback of an option whose values have commas between them; the same one counts once. `one`: of a value; it
    raises ValueError where that is none."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        try:
            return value if value is None else tuple(dict.fromkeys(one(part.strip()) for part in value.split(",")))
        except ValueError:
            raise click.BadParameter(f"{value!r} is no list of {what}, as in {example}") from None

    return read


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def non_empty(text: str) -> str:
    if not text:
        raise ValueError
    return text
