"""Every filter, test, function and method on hostile arguments, and templates made of them at random.

PRONK_HOSTILE_CASES: how many of the latter; each name is tried once for a thousand of them. `-s` shows the counts.
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

CASES = int(os.environ.get("PRONK_HOSTILE_CASES", "2500"))
SECONDS = 0.05  # for each, so that many can be tried; what the real limit is the other tests say

KINDS: dict[type, list[str]] = {
    str: ["('aB c\\n' * 600000)", "('é😀' * 1000000)", "'%s{0}%99999999d'"],
    list: ["([1, 'a', none] * 400000)", "('b a ' * 500000).split()", "[messages, [[[]]], {}]"],
    tuple: ["((2, 1) * 500000)"],
    dict: ["dict(messages[0], x=range(99999)|list)", "{'a': 'b' * 3000000, (1, 2): [3]}"],
    int: ["(10 ** 4000)", "(0 - 99999999999999999999)", "1000000000"],
    float: ["(1e308 * 10)", "(0.0 - 1.5)"],
}
SMALL: dict[type, list[str]] = {
    str: ["'ab c'", "''", "'é😀'", "'a'"],
    list: ["[3, 1, 2]", "['b', 'a']", "[]"],
    tuple: ["(1, 2)", "('a',)"],
    dict: ["{'k': 1}", "{}"],
    int: ["0", "1", "-1", "7"],
    float: ["3.5"],
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
TESTS = [name for name in ENVIRONMENT.tests if name.isidentifier()]  # the others are second names, as == for eq
METHODS = [(kind, name) for kind in KINDS for name in dir(kind)]


def calls() -> Iterator[list[str]]:
    """By name, for all names that the environment and the types have: calls on every value with all arguments."""

    def made(call: str, values: list[str]) -> list[str]:
        return [f"{{% set v = {value} %}}{{{{ {call}({given}) }}}}" for value, given in product(values, ARGUMENTS)]

    yield from (made(f"v|{name}", VALUES) for name in ENVIRONMENT.filters)
    yield from (made(f"v|list|{name}", VALUES) for name in ENVIRONMENT.filters)
    yield from (made(f"v is {name}", VALUES) for name in TESTS)
    yield from (made(name, VALUES) for name in ENVIRONMENT.globals)
    yield from (made(f"v.{name}", KINDS[kind]) for kind, name in METHODS)


def chosen() -> list[str]:
    """Of each name some, with values and arguments in turn."""
    turns = range(max(CASES // 1000, 1))
    return [group[(7 * at + 11 * turn) % len(group)] for at, group in enumerate(calls()) for turn in turns]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredRenderer]:
    with MeasuredRenderer(SECONDS) as measured:
        monkeypatch.setattr(renderer, "shared", measured)
        yield measured


def tally(sources: Iterator[str] | list[str], limited: MeasuredRenderer) -> Counter[str]:
    messages = [{"role": "user", "content": "Hi <b>\n" * 3}, {"role": "assistant", "content": "é"}]
    counts: Counter[str] = Counter(accepted=0, refused=0, tracebacks=0)
    for source in sources:
        counts["cases"] += 1
        try:
            ChatTemplate(source).render(messages)
            counts["accepted"] += 1
        except PronkError as error:
            counts["refused"] += 1
            counts["... of time"] += "takes more than" in str(error) and str(error).endswith(" s")
            counts["... of memory"] += "takes more than" in str(error) and str(error).endswith(" MB")
            counts["tracebacks"] += "\n" in str(error)
        except Exception as error:
            counts["tracebacks"] += 1
            print(f"{type(error).__name__}: {error}: {source}")
    counts["hangs"] = limited.over
    counts[f"over {MEGABYTES} MB"] = int(limited.largest > MEGABYTES)
    print(f"\n{dict(counts)}; longest {limited.longest:.2f} s, largest {limited.largest:.0f} MB")
    return counts


@pytest.mark.timeout(max(300, CASES))
def test_every_filter_test_function_and_method(limited: MeasuredRenderer) -> None:
    assert len(ENVIRONMENT.filters) > 40
    assert len(METHODS) > 300
    counts = tally(chosen(), limited)
    assert counts["tracebacks"] == 0
    assert counts["accepted"] > 10  # few: a slow machine ends most in the middle
    assert counts["refused"] > 100
    limited.check()


class Hostile:
    """Templates of loops, macros, filters, methods, arithmetic and formats, few of which are modest."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def template(self) -> str:
        parts = [f"{{% set {name} = {self.value()} %}}" for name in "abiv"]
        parts += [self.statement(self.random.randint(0, 2)) for _ in range(self.random.randint(1, 2))]
        if self.random.random() < 0.05:  # broken somewhere
            text = "".join(parts)
            at = self.random.randrange(len(text))
            return text[:at] + self.random.choice(["", "{%", "}}", "\n", "|", "("]) + text[at + 1 :]
        return "".join(parts)

    def statement(self, depth: int) -> str:
        choice = self.random.choice
        kind = self.random.randrange(9) if depth else 0
        inner = self.statement(depth - 1) if depth else ""
        if kind == 1:
            return f"{{% for i in {self.expression(2)} %}}{inner}{{% endfor %}}"
        if kind == 2:
            body = f"{{% set b = {self.expression(2)} %}}{inner}"
            return f"{{% for i in range({choice((2, 3, 60, 60, 60, 99999))}) %}}{body}{{% endfor %}}"
        if kind == 3:
            step = choice(["n.x ~ n.x", "n.x + n.x", "[n.x, n.x]", "n.x * n.x", "{'k': n.x}", self.expression(2)])
            loop = f"{{% for i in range({choice((3, 5, 9, 20, 60))}) %}}{{% set n.x = {step} %}}{{% endfor %}}"
            return f"{{% set n = namespace(x={self.expression(1)}) %}}{loop}{{{{ n.x|{self.filter()} }}}}"
        if kind == 4:
            again = f"{{% if k %}}{{{{ m(a, k - {choice((0, 1, 1, 1, 1))}) }}}}{{% endif %}}"
            return f"{{% macro m(a, k=3) %}}{inner}{again}{{% endmacro %}}{{{{ m({self.expression(1)}) }}}}"
        if kind == 5:
            return f"{{% set b %}}{inner}{{% endset %}}{{% if b == {self.expression(1)} %}}{inner}{{% endif %}}"
        if kind == 6:
            return f"{{% filter {self.filter()} %}}{inner}{{% endfilter %}}"
        return f"{{{{ {self.expression(self.random.randint(1, 3))} }}}}"

    def expression(self, depth: int) -> str:
        if not depth:
            return self.random.choice(["a", "b", "v", "i", "messages", "messages[0].content", self.value()])
        left, right = self.expression(depth - 1), self.expression(self.random.randrange(depth))
        kind = self.random.randrange(10)
        if kind < 3:
            return f"({left})|{self.filter()}"
        if kind < 5:
            kind_of, name = self.random.choice(METHODS)
            if name[0] == "_" and self.random.random() < 0.95:
                name = "copy" if kind_of in (list, dict) else "count"
            taken = (
                f"({left}|string)" if kind_of is str else self.value(kind_of) if self.random.random() < 0.9 else left
            )
            return f"{taken}.{name}({self.random.choice(['', right, f'{right}, {right}'])})"
        if kind == 5:
            return (
                f"({left}) {self.random.choice(['+', '-', '*', '/', '//', '%', '**', '~', '==', '<', 'in'])} ({right})"
            )
        if kind == 6:
            test = self.random.choice(TESTS)
            return f"(1 if ({left}) is {test}({self.random.choice(['', right])}) else ({right}))"
        if kind == 7:
            form = self.random.choice(["%s", "%s", "%s", "%r%s", "%099999999d", "%(a)s", "%.9999f", "%c", "%*d"])
            return f"'{form}' % ({left})"
        if kind == 8:
            return f"({left})[{self.random.choice(['0', '-1', '::-1', '1:', right])}]"
        return self.random.choice([f"[{left}, {right}]", f"{{{left}: {right}}}", f"({left}, {right})"])

    def filter(self) -> str:
        name = self.random.choice(list(ENVIRONMENT.filters))
        if name in ("map", "select", "reject"):
            inner = self.random.choice(list(ENVIRONMENT.filters if name == "map" else TESTS))
            return f"{name}('{inner}')|{self.random.choice(['list', 'join', 'sum', 'max', 'sort', 'unique'])}"
        return name + self.random.choice(["", "", f"({self.value()})", f"({self.value()}, {self.value()})"])

    def value(self, kind: type | None = None) -> str:
        if self.random.random() < 0.03:
            return self.random.choice(KINDS[kind] if kind else VALUES)
        small = SMALL[kind] if kind else [value for values in SMALL.values() for value in values] + ["none", "true"]
        return self.random.choice(small)


@pytest.mark.timeout(max(300, CASES))
def test_templates_made_at_random(limited: MeasuredRenderer) -> None:
    counts = tally((Hostile(seed).template() for seed in range(CASES)), limited)
    assert counts["tracebacks"] == 0
    assert counts["accepted"] > CASES // 20
    assert counts["refused"] > CASES // 20
    limited.check()
