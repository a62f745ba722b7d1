"""Every filter, test, function and method on hostile arguments, and templates made of them at random.

PRONK_HOSTILE_CASES: how many random ones (from 10,000 on also every name with all values and all arguments). With `-s`
the counts are printed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from measured_renderer import MEGABYTES, MeasuredRenderer

from pronk.errors import PronkError
from pronk.tokenizer import renderer
from pronk.tokenizer.chat import ChatTemplate
from pronk.tokenizer.sandbox import ChatEnvironment

CASES = int(os.environ.get("PRONK_HOSTILE_CASES", "2000"))
WHOLE = CASES >= 10_000

KINDS: dict[type, list[str]] = {
    str: ["('aB c\\n' * 600000)", "('é😀' * 1000000)", "'%s{0}%99999999d'"],
    list: ["([1, 'a', none] * 400000)", "('b a ' * 500000).split()", "[messages, [[[]]], {}]"],
    tuple: ["((2, 1) * 500000)"],
    dict: ["dict(messages[0], x=range(99999)|list)", "{'a': 'b' * 3000000, (1, 2): [3]}"],
    int: ["(10 ** 4000)", "(0 - 99999999999999999999)", "1000000000"],
    float: ["(1e308 * 10)", "(0.0 - 1.5)"],
}
VALUES = [value for values in KINDS.values() for value in values] + ["none", "absent", "range(99999)", "namespace(a=1)"]
ARGUMENTS = [
    "",
    "1000000000",
    "-1",
    "10 ** 4000",
    "'a' * 2000000",
    "'a', 'bc' * 1000000",
    "v",
    "v, v",
    "1e308, 99999999",
]
ENVIRONMENT = ChatEnvironment()
METHODS = [(kind, name) for kind in KINDS for name in dir(kind)]


def calls() -> Iterator[tuple[str, str, str]]:
    """(template, value, arguments), with %s for the two: all names that the environment and the types have."""
    for name in ENVIRONMENT.filters:
        yield from ((f"{{% set v = %s %}}{{{{ v|{name}(%s)|list }}}}", *pair) for pair in product(VALUES, ARGUMENTS))
        yield from ((f"{{% set v = %s %}}{{{{ v|{name}(%s) }}}}", *pair) for pair in product(VALUES, ARGUMENTS))
    for name in ENVIRONMENT.tests:
        yield from ((f"{{% set v = %s %}}{{{{ v is {name}(%s) }}}}", *pair) for pair in product(VALUES, ARGUMENTS))
    for name in ENVIRONMENT.globals:
        yield from ((f"{{% set v = %s %}}{{{{ {name}(%s) }}}}", *pair) for pair in product(VALUES, ARGUMENTS))
    for kind, name in METHODS:
        yield from ((f"{{% set v = %s %}}{{{{ v.{name}(%s) }}}}", *pair) for pair in product(KINDS[kind], ARGUMENTS))


def chosen() -> list[str]:
    """By name all, or in turn: one value with each of a few arguments."""
    groups: dict[str, list[str]] = {}
    for template, value, arguments in calls():
        groups.setdefault(template, []).append(template % (value, arguments))
    if WHOLE:
        return [source for group in groups.values() for source in group]
    return [group[(7 * at + 11 * turn) % len(group)] for at, group in enumerate(groups.values()) for turn in range(2)]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredRenderer]:
    """The real limits where everything is tried, and a shorter time where that would be too long."""
    with MeasuredRenderer(seconds=renderer.SECONDS if WHOLE else 0.1) as measured:
        monkeypatch.setattr(renderer, "shared", measured)
        yield measured


def tally(sources: Iterator[str] | list[str], limited: MeasuredRenderer) -> Counter[str]:
    messages = [{"role": "user", "content": "Hi <b>\n" * 3}, {"role": "assistant", "content": "é"}]
    counts = Counter({"accepted": 0, "tracebacks": 0})
    for source in sources:
        try:
            ChatTemplate(source).render(messages)
            counts["accepted"] += 1
        except PronkError as error:
            assert "\n" not in str(error), source
            counts["over time" if " s" == str(error)[-2:] and "takes more" in str(error) else "refused"] += 1
            counts["of memory"] += "400 MB" in str(error)
        except Exception as error:
            counts["tracebacks"] += 1
            print(f"{type(error).__name__}: {error}: {source}")
    counts["hangs"] = limited.over
    counts[f"over {MEGABYTES} MB"] = int(limited.largest > MEGABYTES)
    print(f"\n{counts.total()} {dict(counts)}; longest {limited.longest:.2f} s, largest {limited.largest:.0f} MB")
    return counts


@pytest.mark.timeout(0 if WHOLE else 300)
def test_every_filter_test_function_and_method(limited: MeasuredRenderer) -> None:
    assert len(ENVIRONMENT.filters) > 40
    assert len(METHODS) > 300
    counts = tally(chosen(), limited)
    assert counts["tracebacks"] == 0
    assert counts["accepted"] > 50
    assert counts["refused"] > 50
    limited.check()


class Hostile:
    """Templates of loops, macros, filters, methods, arithmetic and formats, few of which are modest."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def template(self) -> str:
        pick = self.random.random
        names = "abv"
        parts = [f"{{% set {name} = {self.value()} %}}" for name in names]
        parts += [self.statement(2) for _ in range(self.random.randint(1, 4))]
        if pick() < 0.05:  # broken somewhere
            text = "".join(parts)
            at = self.random.randrange(len(text))
            return text[:at] + self.random.choice(["", "{%", "}}", "\n", "|", "("]) + text[at + 1 :]
        return "".join(parts)

    def statement(self, depth: int) -> str:
        kind = self.random.randrange(9) if depth else 0
        inner = self.statement(depth - 1) if depth else ""
        if kind == 1:
            return f"{{% for i in {self.expression(2)} %}}{inner}{{% endfor %}}"
        if kind == 2:
            return f"{{% for i in range({self.random.choice((3, 60, 99999))}) %}}{{% set b = {self.expression(2)} %}}{inner}{{% endfor %}}"
        if kind == 3:
            step = self.random.choice(
                ["n.x ~ n.x", "n.x + n.x", "[n.x, n.x]", "n.x * n.x", "{'k': n.x}", self.expression(2)]
            )
            loop = f"{{% for i in range({self.random.choice((5, 20, 60))}) %}}{{% set n.x = {step} %}}{{% endfor %}}"
            return f"{{% set n = namespace(x={self.expression(1)}) %}}{loop}{{{{ n.x|{self.filter()} }}}}"
        if kind == 4:
            return f"{{% macro m(a, k=3) %}}{inner}{{% if k %}}{{{{ m(a, k - {self.random.choice((0, 1, 1))}) }}}}{{% endif %}}{{% endmacro %}}{{{{ m({self.expression(1)}) }}}}"
        if kind == 5:
            return f"{{% set b %}}{inner}{{% endset %}}{{% if b == {self.expression(1)} %}}{inner}{{% endif %}}"
        if kind == 6:
            return f"{{% filter {self.filter()} %}}{inner}{{% endfilter %}}"
        return f"{{{{ {self.expression(3)} }}}}"

    def expression(self, depth: int) -> str:
        if not depth:
            return self.random.choice(
                ["a", "b", "v", "i", "messages", "messages[0].content", "loop.index", self.value()]
            )
        left, right = self.expression(depth - 1), self.expression(self.random.randrange(depth))
        kind = self.random.randrange(10)
        if kind < 3:
            return f"({left})|{self.filter()}"
        if kind < 5:
            return f"({left}).{self.random.choice(METHODS)[1]}({self.random.choice(['', right, f'{right}, {right}'])})"
        if kind == 5:
            return (
                f"({left}) {self.random.choice(['+', '-', '*', '/', '//', '%', '**', '~', '==', '<', 'in'])} ({right})"
            )
        if kind == 6:
            test = self.random.choice(list(ENVIRONMENT.tests))
            return f"(1 if ({left}) is {test}({self.random.choice(['', right])}) else ({right}))"
        if kind == 7:
            return f"'{self.random.choice(['%s', '%r%s', '%099999999d', '%(a)s', '%.9999f', '%c', '%*d'])}' % ({left})"
        if kind == 8:
            return f"({left})[{self.random.choice(['0', '-1', '::-1', '1:', right])}]"
        return self.random.choice([f"[{left}, {right}]", f"{{{left}: {right}}}", f"({left}, {right})"])

    def filter(self) -> str:
        name = self.random.choice(list(ENVIRONMENT.filters))
        if name in ("map", "select", "reject"):
            inner = self.random.choice(list(ENVIRONMENT.filters if name == "map" else ENVIRONMENT.tests))
            return f"{name}('{inner}')|{self.random.choice(['list', 'join', 'sum', 'max', 'sort', 'unique'])}"
        return name + self.random.choice(["", "", f"({self.value()})", f"({self.value()}, {self.value()})"])

    def value(self) -> str:
        small = [
            "'ab c'",
            "''",
            "0",
            "-1",
            "3.5",
            "[3, 1, 2]",
            "['b', 'a']",
            "{'k': 1}",
            "none",
            "true",
            "'é😀'",
            "(1, 2)",
        ]
        return self.random.choice(small if self.random.random() < 0.85 else VALUES)


@pytest.mark.timeout(0 if WHOLE else 300)
def test_templates_made_at_random(limited: MeasuredRenderer) -> None:
    counts = tally((Hostile(seed).template() for seed in range(CASES)), limited)
    assert counts["tracebacks"] == 0
    assert counts["accepted"] > CASES // 20
    assert counts["refused"] > CASES // 20
    limited.check()
