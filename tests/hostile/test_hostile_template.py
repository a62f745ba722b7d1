"""Chat templates that loop, swell, recurse and reach out: refused in one line, soon, and in little memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from measured_renderer import MeasuredRenderer
from mutations import modestly, survives

from pronk.errors import BadFile, BadRequest, PronkError
from pronk.tokenizer import renderer
from pronk.tokenizer.chat import BUILTIN, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
BIG = "{% set x = range(99999)|list %}{% set y = range(99999)|list %}"


def doubling(start: str, step: str, after: str = "") -> str:
    return DOUBLING.replace("START", start).replace("STEP", step) + after


LOOPS = {
    "empty": LOOP * 2 + END * 2,
    "filtered": LOOP + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "one after the other": "{% for i in range(99999) if false %}{% endfor %}" * 900,
    "writing": LOOP * 2 + "x" + END * 2,
    "in a block": "{% set x %}" + LOOP * 2 + "xxxxxxxxxxxxxxxxxxxxxxxxxxxx" + END * 2 + "{% endset %}",
    "in a filter": "{% filter upper %}" + LOOP * 2 + "x" * 99 + END * 2 + "{% endfilter %}",
    "constant text": LOOP + "{% if 1 %}a{% endif %}" * 800 + END,
    "a linked list": "{% set n = namespace(l=[]) %}" + LOOP * 2 + "{% set n.l = [n.l, i] %}" + END * 2,
    "searching": BIG + LOOP + "{% if -1 in x %}{% endif %}" + END,
    "comparing": BIG + LOOP + "{% if x == y %}{% endif %}" + END,
    "comparing by a test": BIG + LOOP + "{% if x is eq(y) %}{% endif %}" + END,
    "comparing while filtering": BIG + "{% for i in range(99999) if x == y %}{% endfor %}",
    "a generator of long lists": BIG + "{{ range(99999)|map(attribute='a', default=x)|max|length }}",
    "sorting": BIG + LOOP + "{% set z = x|sort|reverse|list %}" + END,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
}

SIZES = {
    "times": "{{ 'a' * 10000000000 }}",
    "times, elsewhere": "{% set x = 'a' * 1000000000 %}",
    "list times": "{{ [1] * 1000000000 }}",
    "number times": "{{ 1000000000 * (1, 2) }}",
    "doubling with ~": doubling("'aaaaaaaa'", "ns.x ~ ns.x"),
    "doubling with +": doubling("'aaaaaaaa'", "ns.x + ns.x"),
    "doubling lists": doubling("[1]", "ns.x + ns.x"),
    "doubling with join": doubling("'aaaaaaaa'", "ns.x.join(['', '', ''])"),
    "doubling with replace": doubling("'aa'", "ns.x|replace('a', ns.x)"),
    "doubling with format": doubling("'aaaaaaaa'", "'%s%s' % (ns.x, ns.x)"),
    "towers of lists": doubling("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "towers of dicts": doubling("[1]", "{'a': ns.x, 'b': ns.x}", "{{ ns.x|tojson }}"),
    "towers of tuples": doubling("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "towers of namespaces": doubling("[1]", "[namespace(a=ns.x, b=ns.x)]", "{{ ns.x|string }}"),
    "towers by dict()": doubling("[1]", "dict(a=ns.x, b=ns.x)", "{{ ns.x ~ '' }}"),
    "copies kept": "{% set n = namespace(l=[]) %}{% set b = 'a' * 1000000 %}"
    + LOOP
    + "{% set n.l = n.l + [b[1:]] %}"
    + END,
    "text appended": "{% set n = namespace(l='') %}" + LOOP + "{% set n.l = n.l ~ 'abcdefgh' %}" + END,
    "long output": LOOP + "{{ 'a' * 1000 }}" + END,
    "replace": "{{ ('a' * 4000000).replace('a', 'b' * 4000000) }}",
    "replace filter": "{{ ('a' * 4000000)|replace('a', 'b' * 4000000) }}",
    "join": "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "join filter": "{{ ('a' * 1000000)|join('b' * 1000000) }}",
    "% of many": "{{ ('%s' * 3000) % (('a' * 5000000,) * 3000) }}",
    "power": "{{ 10 ** 1000000000 }}",
    "power of powers": doubling("3", "ns.x * ns.x"),
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "power of negative": "{{ (0 - 10) ** 1000000000 }}",
}

# Once refused for what they might cost. They end within the limits, in whichever way.
ENDURED = {
    "a namespace inside": "{% set n = namespace() %}{% set n.n = [n] %}{{ n.n }}",
    "a namespace as text": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
    "split": "{{ ('a ' * 3000000).split('a')|length }}",
    "split at white space": "{{ ('a\\n' * 3000000).split()|length }}",
    "split, by name": "{{ ('aa' * 3000000).split(sep='a')|length }}",
    "lines": "{{ ('\\n' * 7000000).splitlines()|length }}",
    "characters": "{{ ('é' * 3000000)|list|length }}",
    "escape": "{% autoescape true %}{{ '<' * 7000000 }}{% endautoescape %}",
    "sorted characters": "{{ ('ab' * 3000000)|sort|length }}",
    "unique characters": "{{ ('ab' * 3000000)|unique|list|length }}",
    "strip": "{% set p=('b'*1000)*1000~'a' %}{{ (p*4).strip(p) }}",
    "trim": "{% set p=('b'*1000)*1000~'a' %}{{ (p*4)|trim(p) }}",
    "titles": "{{ ('ab' * 1950000)|title }}",
    "comparing characters": "{{ ('ab' * 3000000)|list|unique|list == ('ab' * 3000000)|list }}",
    "a hash that overflows the stack": "{% set ns=namespace(t=()) %}{% for i in range(4000) %}{% set ns.t="
    + "(" * 40
    + "ns.t"
    + ",)" * 40
    + " %}{% endfor %}{{ [ns.t]|unique|list|length }}",
}

FORBIDDEN = {
    "width in %": "{{ '%1000000000d' % 1 }}",
    "* in %": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "str.format": "{{ '{:>1000000000}'.format(1) }}",
    "str.format, by item": "{{ '{:>1000000000}'['format'](1) }}",
    "str.format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "center filter": "{{ 'a'|center(1000000000) }}",
    "str.center": "{{ 'a'.center(1000000000) }}",
    "str.zfill": "{{ 'a'.zfill(1000000000) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'a\nb'|indent(1000000000) }}",
    "indent by name": "{{ 'a\nb'|indent(width=1000000000) }}",
    "tojson": "{{ [1]|tojson(indent=1000000000) }}",
    "tojson separators": "{{ [1]|tojson(separators=['a' * 1000, 'b']) }}",
    "to_bytes": "{{ (2).to_bytes(1000000000, 'little') }}",
    "encode": "{{ 'x'.encode('utf-32') }}",
    "strftime": "{{ strftime_now('%1000000000d') }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "range": "{{ range(1000000000)|list }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "__class__": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "__class__ by item": "{{ ''['__class__']['__mro__'] }}",
    "__class__ by filter": "{{ messages|attr('__class__') }}",
    "__class__ by map": "{{ messages|map(attribute='__class__.__mro__')|list }}",
    "__globals__": "{{ raise_exception.__globals__['os'] }}",
    "__init__": "{{ cycler.__init__.__globals__ }}",
    "fromkeys": "{{ dict.fromkeys(range(10), 1) }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(a=1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "extends": "{% extends '/etc/passwd' %}",
}

RECURSION = {
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "brackets": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "sum": "{{ " + "1+" * 20000 + "1 }}",
    "not": "{{ " + "not " * 10000 + "1 }}",
    "attributes": "{{ a" + ".a" * 20000 + " }}",
    "filters": "{{ a" + "|e" * 20000 + " }}",
    "if": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "for": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "long": "x" * 70_000,
    "comment": "{#" * 30_000,
    "digits": "{{ 1" + "1" * 5000 + " }}",
}


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredRenderer]:
    """A quarter of a second, so that fifteen loops need not take thirty; `test_the_real_limits` takes its own."""
    with MeasuredRenderer(seconds=0.25) as measured:
        monkeypatch.setattr(renderer, "shared", measured)
        yield measured
    measured.check()


def refusal(
    source: str, kinds: type[PronkError] | tuple[type[PronkError], ...] = PronkError, seconds: float = 3.0
) -> str:
    with modestly(seconds, megabytes=120), pytest.raises(kinds) as caught:
        ChatTemplate(source).render(MESSAGES)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    assert "takes more than" in refusal(LOOPS[name], BadFile)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    message = refusal(SIZES[name], BadFile)
    assert any(words in message for words in ("size budget", "too deeply", "takes more than")), message


@pytest.mark.parametrize("name", ENDURED)
def test_what_may_or_may_not_fit(name: str) -> None:
    """`|sort` took 4.4 GB, `|unique` did not end, `|title` took three times its time and was accepted."""
    with suppress(BadFile):
        ChatTemplate(ENDURED[name]).render(MESSAGES)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden(name: str) -> None:
    assert "0.25 s" not in refusal(FORBIDDEN[name])


@pytest.mark.parametrize("name", RECURSION)
def test_recursion(name: str, limited: MeasuredRenderer) -> None:
    limited.seconds = 2.0
    assert " 2 s" not in refusal(RECURSION[name], BadFile)


def test_the_real_limits(limited: MeasuredRenderer) -> None:
    """Two seconds of the processor's, off the main thread as well as on it."""
    limited.seconds = renderer.SECONDS
    problems = []

    def render() -> None:
        try:
            ChatTemplate(LOOPS["searching"]).render(MESSAGES)
        except BadFile as error:
            problems.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert problems == ["chat template: the template takes more than 2 s"]
    assert limited.longest > 1.0  # systems that count by their clock's ticks may count 2 s where another counts 1.5


def test_without_limits_the_measurement_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse of what every test here ends with."""
    with MeasuredRenderer(seconds=9.0, memory=1 << 30) as loose:
        monkeypatch.setattr(renderer, "shared", loose)
        assert ChatTemplate("{{ ('a' * 600000000)|length }}").render([]) == "600000000"
    with pytest.raises(AssertionError, match="MB"):
        loose.check()


@pytest.mark.parametrize("name", ["sorted characters", "unique characters", "titles"])
def test_what_outran_its_budget(name: str, limited: MeasuredRenderer) -> None:
    limited.seconds = renderer.SECONDS
    test_what_may_or_may_not_fit(name)


def test_messages_may_be_large_but_not_multiply() -> None:
    """What a render may use grows with what it is given, not with what the template makes of it."""
    large = [{"role": "user", "content": "x" * 3_000_000}]
    assert len(ChatTemplate("{{ messages[0].content }}" * 5).render(large)) == 15_000_000
    with pytest.raises(BadFile, match="size budget"):
        ChatTemplate("{{ messages[0].content }}" * 50).render(large)


def test_a_long_refusal_is_cut() -> None:
    message = refusal("{{ raise_exception('no\nsystem ' * 10000) }}", BadRequest)
    assert "no system no system" in message


def test_random_damage() -> None:
    """Templates broken at random compile and render, or say in one line why not."""

    def check(data: bytes) -> None:
        problem = ""
        try:
            ChatTemplate(data.decode("utf-8", "replace")).render(MESSAGES)
        except PronkError as error:
            problem = str(error)
        assert "\n" not in problem

    count = survives(1000, [(source.encode(), len(source)) for source in BUILTIN.values()], check)
    assert count >= 500


@pytest.mark.parametrize(
    "source",
    [
        "{% set s='a'*1000 %}{% set s=s*1000 %}{% set p='ab'~('a'*1000)*500 %}{{ s.rsplit(p) }}",
        "{% set s='a'*1000 %}{% set s=s*1000 %}{% set p='ab'~('a'*1000)*500 %}{{ s.rfind(p) }}",
        "{{ '%(a)1000000000s' % {'a': 'x'} }}",
        "{{ '%(a).1000000000f' % {'a': 1.0} }}",
    ],
)
def test_one_call_cannot_outrun_the_limits(source: str) -> None:
    """Found by attack: searches in quadratic time, widths behind a name."""
    refusal(source, (BadFile, BadRequest))


@pytest.mark.parametrize("part", ["{{a~a}}", "{{[[[[]]]]}}", "{{a|e|e|e}}", "{%set a=1%}"])
def test_compiling_is_bounded(part: str) -> None:
    """Python's compiler takes seconds for what a template of 48 KB can hold, more or less of them by the machine."""
    with suppress(BadFile):
        ChatTemplate(part * (48_000 // len(part)))


def test_ordinary_splitting_fits_the_limits() -> None:
    large = [{"role": "user", "content": "word <b>\n" * 30_000}]
    source = "{{ messages[0].content.split('<b>')|length }} {{ messages[0].content.split()|length }}"
    assert ChatTemplate(source).render(large) == "30001 60000"
