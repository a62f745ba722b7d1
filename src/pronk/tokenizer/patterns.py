"""What a regular expression of a tokenizer.json may cost, told from its form alone before a text meets it.

The tokenizers library runs Oniguruma, which backtracks: a pattern of several loops tries every way to share a text
among them. So the work of one attempt is counted for the worst case: on a run that all of its loops can match, without
regard to which characters those are. And a loop whose attempt may fail after it has read a run must be one after which
the run is consumed, or the next attempt reads it again. The dialect is that of Ruby.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import TypeVar

_RUN = 100  # characters of the run
_MOST = 50 * _RUN  # steps of an attempt: several loops one after the other, but no two within each other
_DEEPEST = 20
# Runs of these are short in any text that people write, so that a loop over them may read one again and again; how long
# they are in a text at hand `costly_runs` tells.
_NARROW = (
    frozenset((" ", *r"\s \t \r \n [\r\n] [\n\r] \p{Zs} [\s]".split())),
    frozenset(r"\d [0-9] \p{N} \p{Nd} [\p{N}] [\d]".split()),
)


class Refused(ValueError):
    """Why a pattern is not run."""


@dataclass(frozen=True)
class Atom:
    """One character; `text` says which, as the pattern does."""

    text: str


@dataclass(frozen=True)
class Look:
    """Nothing wide: an anchor, or a look ahead or behind at `body`."""

    text: str
    body: Node | None = None


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    body: Node
    least: int
    most: int | None  # None: a loop
    keeps: bool = False  # what it has matched, whatever fails after it


T = TypeVar("T")
Node = Atom | Look | Sequence | Choice | Repeat

_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[\w =-]+\}|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[^A-Za-z0-9]|[dDsSwWhHNORtnrfvae])",
    re.DOTALL,
)
_ANCHOR = re.compile(r"\\[bBAzZG]|[\^$]")
_BOUNDS = re.compile(r"\{(\d{1,6})?(,)?(\d{1,6})?\}")
_OPEN = re.compile(r"\((?:\?(?P<kind>:|=|!|<=|<!|>|i:|<[A-Za-z_]\w*>))?")


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text, self.at = pattern, 0
        self.caseless = 0  # groups that ignore case, around where it stands

    def parse(self) -> Node:
        if self.text.startswith("(?i)"):
            self.at, self.caseless = 4, 1
        found = self.choice(0)
        if self.at < len(self.text):
            raise Refused("a bracket too many")
        return found

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    def choice(self, depth: int) -> Node:
        if depth > _DEEPEST:
            raise Refused("groups within groups")
        options = [self.sequence(depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            options.append(self.sequence(depth))
        if len(options) == 1:
            return options[0]
        plain = {o.text for o in options if isinstance(o, Atom) and len(o.text) == 1 and o.text != "."}
        if len(plain) == len(options) and not self.caseless:  # a|b|c, of which one at most matches
            return Atom(f"[{''.join(sorted(plain))}]")
        return Choice(tuple(options))

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            items += _parts(self.repeated(self.single(depth)))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def single(self, depth: int) -> Node:
        start = self.at
        if self.take(_ANCHOR):
            return Look(self.text[start : self.at])
        sign = self.text[start]
        if sign == "(":
            return self.group(depth)
        if sign == "[":
            self.klass()
        elif sign == "\\":
            if not self.take(_ESCAPE):
                raise Refused(f"{self.text[start : start + 2]}, which pronk does not know")
        elif sign in "*+?":
            raise Refused(f"a {sign} with nothing before it")
        else:
            self.at += 1
        return Atom(self.text[start : self.at])

    def group(self, depth: int) -> Node:
        opened, start = self.take(_OPEN), self.at
        kind = opened["kind"] if opened else None
        if self.text[start : start + 1] in ("?", "*"):
            raise Refused(f"({self.text[start : start + 2]}, which pronk does not know")
        self.caseless += kind == "i:"
        body = self.choice(depth + 1)
        self.caseless -= kind == "i:"
        if not self.text.startswith(")", self.at):
            raise Refused("an open bracket")
        self.at += 1
        if kind in ("=", "!", "<=", "<!"):
            if "<" in kind and any(_loops(body)):
                raise Refused("a look behind without a bound")
            return Look(f"{kind}{self.text[start : self.at - 1]}", body)
        return Repeat(body, 1, 1, keeps=True) if kind == ">" else body

    def klass(self) -> None:
        """Past a [class], those within it included."""
        depth = 0
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == "\\":
                if not self.take(_ESCAPE):
                    raise Refused(f"{self.text[self.at : self.at + 2]}, which pronk does not know")
                continue
            self.at += 1
            if sign == "[":
                depth += 1
                self.at += self.text.startswith("^", self.at)
                if self.text.startswith("]", self.at):  # its end, or a character
                    raise Refused("a class that begins with ]")
            elif sign == "]":
                depth -= 1
                if not depth:
                    return
        raise Refused("an open bracket")

    def repeated(self, node: Node) -> Node:
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in "*+?":
                self.at += 1
                least, most = int(sign == "+"), 1 if sign == "?" else None
            elif (bounds := _BOUNDS.match(self.text, self.at)) and (bounds[1] or bounds[3]):
                self.at = bounds.end()
                least = int(bounds[1] or 0)
                most = int(bounds[3]) if bounds[3] else None if bounds[2] else least
                if most is not None and (most < least or most > _RUN):
                    raise Refused(f"{bounds[0]}; at most {_RUN} times are allowed, or without end")
            else:
                return node
            if isinstance(node, Look):
                raise Refused("an anchor that is repeated")
            if most is None and self.caseless:  # "ss" is then one character, and two
                raise Refused("a loop that ignores case")
            after = self.text[self.at : self.at + 1]
            keeps = after == "+" and sign in "*+?"
            if sign in "*+?":
                self.at += after in ("+", "?") and bool(after)
            elif after == "?":
                self.at, least = self.at + 1, 0  # lazy, or optional
            node = Repeat(node, least, most, keeps)
        return node


def _parts(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Sequence) else (node,)


def _inside(node: Node | None, kind: type[T]) -> Iterator[T]:
    """What of a kind is in it, at any depth."""
    if isinstance(node, kind):
        yield node
    for part in (*getattr(node, "items", ()), *getattr(node, "options", ()), getattr(node, "body", None)):
        if part is not None:
            yield from _inside(part, kind)


def _loops(node: Node | None) -> Iterator[Repeat]:
    return (repeat for repeat in _inside(node, Repeat) if repeat.most is None)


def _can_fail(node: Node) -> bool:
    if isinstance(node, Sequence):
        return any(map(_can_fail, node.items))
    if isinstance(node, Choice):
        return all(map(_can_fail, node.options))
    return not isinstance(node, Repeat) or (node.least > 0 and _can_fail(node.body))


def _ways(node: Node) -> tuple[float, float]:
    """(in how many ways it may match from one place, how many steps it takes to try them all)."""
    if isinstance(node, Atom):
        return 1, 1
    if isinstance(node, Look):
        return 1, 1 + (_ways(node.body)[1] if node.body else 0)
    if isinstance(node, Sequence):
        ways, steps = 1.0, 0.0
        for item in node.items:
            more, each = _ways(item)
            ways, steps = ways * more, steps + ways * each
        return ways, steps
    if isinstance(node, Choice):
        found = [_ways(option) for option in node.options]
        return sum(ways for ways, _ in found), sum(steps for _, steps in found)
    ways, steps = _ways(node.body)
    if node.most is None and (ways > 1 or not _can_fail(node.body)):
        return inf, inf
    times = range(1, (node.most if node.most is not None else max(node.least, _RUN)) + 1)
    reached = 1 + sum(ways**k for k in times if k >= node.least) - (node.least > 0)
    return 1 if node.keeps else reached, 1 + steps * sum(ways ** (k - 1) for k in times)


def _attempt(items: tuple[Node, ...]) -> float:
    """The steps of one that fails, or succeeds: after the last item that can fail nothing is tried again."""
    last = max((i for i, item in enumerate(items) if _can_fail(item)), default=-1)
    ways, steps = 1.0, 0.0
    for i, item in enumerate(items):
        more, each = _ways(item)
        # Of the last one all ways but one fail, and there is more to do in that one alone.
        steps += ways * _failure(item) + _success(item) if i == last else _success(item) if i > last else ways * each
        ways = 1 if i >= last else ways * more
    return steps


def _failure(item: Node) -> float:
    """The steps until it fails, where nothing follows that could."""
    if isinstance(item, Choice):
        return sum(_attempt(_parts(option)) for option in item.options)
    if isinstance(item, Repeat) and item.least == 1:
        return _attempt(_parts(item.body))
    return _ways(item)[1]


def _success(item: Node) -> float:
    """The steps until it has matched, where nothing follows that could fail: no way but the first is tried."""
    if isinstance(item, Repeat) and item.least <= 1 and _can_fail(item.body):
        return 1 + (_RUN if item.most is None else item.most) * _attempt(_parts(item.body))
    return _ways(item)[1]


def _read_again(node: Node, fails_after: bool) -> Iterator[Repeat]:
    """Loops that may read a run which the match then leaves."""
    if isinstance(node, Look):
        yield from _loops(node.body)
    elif isinstance(node, Sequence):
        for i, item in enumerate(node.items):
            yield from _read_again(item, fails_after or any(map(_can_fail, node.items[i + 1 :])))
    elif isinstance(node, Choice):
        for option in node.options:
            yield from _read_again(option, fails_after)
    elif isinstance(node, Repeat):
        if node.most is None and fails_after:
            yield node
        yield from _read_again(node.body, fails_after or node.most is None or node.most > 1)


def _first_loop(option: Node) -> tuple[Repeat | None, tuple[Node, ...]]:
    """The loop it begins with, but for single characters that may be absent, and what follows."""
    items = _parts(option)
    for i, item in enumerate(items):
        if not isinstance(item, Repeat) or not isinstance(item.body, Atom):
            break
        if item.most is None:
            return item, items[i + 1 :]
        if item.least or item.most > 1:
            break
    return None, ()


def _consumed(loop: Repeat, after: tuple[Node, ...]) -> bool:
    """Whether one of the options that are tried next takes the run that `loop` has read."""
    for option in after:
        taker, rest = _first_loop(option)
        if taker is None or taker.body != loop.body:
            return False
        if taker.least <= 1 and not any(map(_can_fail, rest)):
            return True
        if taker.body == Atom(r"\s") and rest == (Look(r"!\S", Atom(r"\S")),):  # all of it, or all but one
            return True
    return False


def _steps(options: tuple[Node, ...]) -> float:
    try:
        return sum(_attempt(_parts(option)) for option in options)
    except OverflowError:
        return inf


def check(pattern: str) -> bool:
    """Whether runs of digits and white space are to be short for it (`costly_runs`). Raises Refused."""
    try:
        found = _Parser(pattern).parse()
    except RecursionError:
        raise Refused("groups within groups") from None
    options = found.options if isinstance(found, Choice) else (found,)
    if not _steps(options) <= _MOST:
        raise Refused("loops of which each can begin anew wherever another ends, which can take for ever")
    narrow = False
    for i, option in enumerate(options):
        for loop in _read_again(option, False):
            begins = _first_loop(option)[0] is loop
            if begins and _consumed(loop, options[i + 1 :]):
                continue
            if not any({atom.text for atom in _inside(loop, Atom)} <= kind for kind in _NARROW):
                raise Refused("a loop that may read the same text again and again, which can take for ever")
            narrow = True
    return narrow


_LONG_RUN = 2_000  # characters
_MOST_READ = 10**8  # the squares of the lengths of long runs, together: a few seconds


@cache
def _long_runs() -> re.Pattern[str]:
    numbers = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if c.isnumeric())
    return re.compile(rf"\s{{{_LONG_RUN},}}|[{numbers}]{{{_LONG_RUN},}}")


def costly_runs(text: str) -> int:
    """The longest run of digits or white space, where these take too long for a pattern that needs short ones."""
    if len(text) ** 2 <= _MOST_READ:
        return 0
    lengths = [len(run) for run in _long_runs().findall(text)]
    return max(lengths) if sum(length**2 for length in lengths) > _MOST_READ else 0
