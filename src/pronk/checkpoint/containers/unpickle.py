"""An interpreter for the part of the pickle language that checkpoints use. It runs nothing that the stream names.

A pickle is a program for a stack machine. This one knows plain values, containers, and names; what a name stands for,
and what happens when the stream calls it, is decided by the caller's tables alone. Of an object it notes what would be
its state. Any other instruction is refused. Protocols 2 to 5; the language is described in the comments of CPython's
pickletools.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

# The largest checkpoints take some 50,000 instructions a file. Each makes at most one small object besides the text it
# carries, so that these two bound the memory and the time.
MAX_BYTES = 16 << 20
MAX_STEPS = 250_000

_FIXED = {  # instructions followed by one number
    b"J": struct.Struct("<i"),  # BININT
    b"K": struct.Struct("<B"),  # BININT1
    b"M": struct.Struct("<H"),  # BININT2
    b"G": struct.Struct(">d"),  # BINFLOAT
}
_SIMPLE: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
    b")": tuple,
    b"]": list,
    b"}": dict,
}
_TEXT = {b"X": struct.Struct("<I"), b"\x8c": struct.Struct("<B"), b"\x8d": struct.Struct("<Q")}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_PUTS = {b"q": struct.Struct("<B"), b"r": struct.Struct("<I")}
_GETS = {b"h": struct.Struct("<B"), b"j": struct.Struct("<I")}


class PickleError(Exception):
    """What is wrong, and at which byte of the stream."""

    def __init__(self, problem: str, offset: int) -> None:
        super().__init__(problem)
        self.problem, self.offset = problem, offset


@dataclass(frozen=True)
class Name:
    """A class or function that the stream refers to, such as torch.FloatStorage: a name, and never the thing."""

    dotted: str


@dataclass(slots=True, eq=False)
class Record:
    """An object of a class that the stream refers to: what would be its state, and never the object."""

    of: str  # the class, dotted
    state: Any = None


def _no_storage(identity: Any) -> NoReturn:
    raise ValueError("a persistent id, which a checkpoint of this kind has no need of")


def load(
    data: bytes,
    names: frozenset[str],
    functions: Mapping[str, Callable[..., Any]],
    persistent: Callable[[Any], Any] = _no_storage,
    *,
    classes: frozenset[str] = frozenset(),
    most: int = MAX_STEPS,
) -> tuple[Any, int]:
    """The object that `data` describes, and how many instructions, of the `most` allowed, made it.

    `functions` are what the stream may call, by the name under which it knows them; `names` what it may mention
    besides; `persistent` turns a persistent id into an object. Both may raise ValueError. Objects of `classes` become
    records, which may be keys, each equal to itself alone. Raises PickleError.
    """
    return _Machine(data, names, functions, persistent, classes).run(most)


class _Machine:
    def __init__(
        self,
        data: bytes,
        names: frozenset[str],
        functions: Mapping[str, Callable[..., Any]],
        persistent: Callable[[Any], Any],
        classes: frozenset[str],
    ) -> None:
        self.data, self.functions, self.persistent, self.classes = data, functions, persistent, classes
        self.names = names | functions.keys() | classes
        self.at = self.position = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # stacks set aside by MARK
        self.memo: dict[int, Any] = {}

    def fail(self, problem: str) -> NoReturn:
        raise PickleError(problem, self.at)

    def run(self, most: int) -> tuple[Any, int]:
        if len(self.data) > MAX_BYTES:
            self.fail(f"{len(self.data)} bytes, more than the {MAX_BYTES} allowed")
        for steps in range(most):
            self.at = self.position
            opcode = self.take(1)
            if opcode == b".":
                if self.marked or len(self.stack) != 1 or self.position != len(self.data):
                    self.fail("does not end with one object")
                return self.stack[0], steps
            try:
                self.step(opcode)
            except ValueError as error:
                self.fail(str(error))
        self.fail(f"more than {most} instructions")

    def step(self, opcode: bytes) -> None:
        stack = self.stack
        if opcode in _PUTS:
            self.memo[self.number(_PUTS[opcode])] = self.top()
        elif opcode in _GETS:
            self.push_memo(self.number(_GETS[opcode]))
        elif opcode in _FIXED:
            stack.append(self.number(_FIXED[opcode]))
        elif opcode in _TEXT:
            stack.append(self.take(self.number(_TEXT[opcode])).decode())
        elif opcode in _SIMPLE:
            stack.append(_SIMPLE[opcode]())
        elif opcode in _TUPLES:
            stack.append(tuple(self.pop(_TUPLES[opcode])))
        elif opcode == b"(":  # MARK
            self.marked.append(stack)
            self.stack = []
        elif opcode == b"t":  # TUPLE
            values = self.pop_mark()
            self.stack.append(tuple(values))
        elif opcode == b"u":  # SETITEMS
            self.set_items(self.pop_mark())
        elif opcode == b"s":  # SETITEM
            self.set_items(self.pop(2))
        elif opcode == b"e":  # APPENDS
            self.append(self.pop_mark())
        elif opcode == b"a":  # APPEND
            self.append(self.pop(1))
        elif opcode == b"\x94":  # MEMOIZE
            self.memo[len(self.memo)] = self.top()
        elif opcode == b"\x8a":  # LONG1
            stack.append(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))
        elif opcode == b"c":  # GLOBAL
            stack.append(self.name(self.line(), self.line()))
        elif opcode == b"\x93":  # STACK_GLOBAL
            stack.append(self.name(*self.pop(2)))
        elif opcode == b"Q":  # BINPERSID
            stack.append(self.persistent(self.pop(1)[0]))
        elif opcode == b"R":  # REDUCE
            stack.append(self.call(*self.pop(2)))
        elif opcode == b"\x81":  # NEWOBJ
            stack.append(self.record(*self.pop(2)))
        elif opcode == b"b":  # BUILD
            self.build(*self.pop(2))
        elif opcode == b"\x80":  # PROTO
            if not 2 <= self.take(1)[0] <= 5:
                self.fail("a pickle protocol other than 2 to 5")
        elif opcode == b"\x95":  # FRAME
            self.take(8)
        else:
            names = {known.code: known.name for known in pickletools.opcodes}
            name = names.get(opcode.decode("latin-1"), repr(opcode))
            self.fail(f"uses the instruction {name}, which a checkpoint has no need of")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            self.fail("truncated")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self.take(kind.size))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + 256)
        if end < 0:
            self.fail("a name without an end")
        text = self.take(end - self.position).decode()
        self.position += 1
        return text

    def top(self) -> Any:
        if not self.stack:
            self.fail("takes from an empty stack")
        return self.stack[-1]

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            self.fail("takes from an empty stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def pop_mark(self) -> list[Any]:
        if not self.marked:
            self.fail("takes from a mark that is not there")
        values, self.stack = self.stack, self.marked.pop()
        return values

    def push_memo(self, index: int) -> None:
        if index not in self.memo:
            self.fail(f"refers to object {index}, which there is not")
        self.stack.append(self.memo[index])

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            self.fail(f"appends to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not dict:
            self.fail(f"sets items of a {type(target).__name__}")
        if len(values) % 2:
            self.fail("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # The hash of nested tuples may take for ever, and large numbers may share one.
            if type(key) not in (str, Record) and not (type(key) is int and abs(key) < 1 << 30):
                self.fail(f"a key of type {type(key).__name__}")
            if key in target:
                self.fail(f"key {key!r:.80} stands in one mapping twice")
            target[key] = value

    def name(self, module: Any, attribute: Any) -> Name:
        if type(module) is not str or type(attribute) is not str:
            self.fail("a name that is no text")
        dotted = f"{module}.{attribute}"
        if dotted not in self.names:
            shown = dotted if dotted.isprintable() else ascii(dotted)
            self.fail(f"refers to {shown:.80}, which a checkpoint has no need of")
        return Name(dotted)

    def call(self, function: Any, arguments: Any) -> Any:
        if type(function) is not Name or function.dotted not in self.functions or type(arguments) is not tuple:
            called = function.dotted if type(function) is Name else f"a {type(function).__name__}"
            self.fail(f"calls {called}, which is nothing to call")
        return self.functions[function.dotted](*arguments)

    def record(self, of: Any, arguments: Any) -> Record:
        if type(of) is not Name or of.dotted not in self.classes or type(arguments) is not tuple or arguments:
            made = of.dotted if type(of) is Name else f"a {type(of).__name__}"
            self.fail(f"makes an object of {made}, which is no class of its kind")
        return Record(of.dotted)

    def build(self, target: Any, state: Any) -> None:
        """An OrderedDict's attributes (torch keeps version numbers of modules there) go unused; others have none."""
        if type(target) is Record and target.state is None:
            target.state = state
        elif type(target) is not dict or type(state) is not dict:
            self.fail(f"sets the state of a {type(target).__name__}")
        self.stack.append(target)
