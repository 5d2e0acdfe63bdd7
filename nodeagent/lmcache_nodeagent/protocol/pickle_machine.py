"""Reads a pickle as plain values: it looks nothing up, calls nothing and makes no foreign object.

Only the instructions are known that Python writes for lists of tensors (protocols 3 to 5; the
legacy save format inside uses 2; `pickletools` of the standard library describes them). A global
stays the two strings that name it, a call stays a record of what would be called with what.
Whoever wants more than that from a pickle is refused. Each instruction costs a small constant,
and their number is bounded by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lmcache_nodeagent.errors import MalformedRequest

_HIGHEST_PROTOCOL = 5
_LONGEST_TEXT = 256
_STOP = 0x2E

T = TypeVar("T")


class Name(NamedTuple):
    """A global that a pickle names."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A call that a pickle asks for and that nobody makes."""

    function: object
    arguments: object


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference that the pickle's owner would resolve."""

    reference: object


def read_pickle(data: memoryview, offset: int, max_instructions: int) -> tuple[object, int]:
    """Read one pickle that begins at `offset`.

    Returns:
        Its value, made of None, booleans, integers, text, lists, tuples, dictionaries with text
        as keys, `memoryview` (bytes, not copied), `Name`, `Called` and `Persistent`; and the
        offset after it.

    Raises:
        MalformedRequest: it is cut short, longer than `max_instructions`, or does what no list of
            tensors needs.
    """
    machine = _Machine(data, offset)
    for _ in range(max_instructions):
        instruction = machine.byte()
        if instruction == _STOP:
            return machine.result(), machine.offset
        action = _ACTIONS.get(instruction)
        if action is None:
            raise MalformedRequest(
                f"pickle instruction {instruction:#04x} at byte {machine.offset - 1} is none that"
                " a list of tensors needs"
            )
        action(machine)
    raise MalformedRequest(f"a pickle of more than {max_instructions} instructions")


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data = data
        self._size = len(data)
        self.offset = offset
        self._stack: list[object] = []
        self._below: list[list[object]] = []  # stacks under the marks
        self._memo: dict[int, object] = {}

    def result(self) -> object:
        value = self._pop()
        if self._stack or self._below:
            raise MalformedRequest("a pickle that leaves more than its value")
        return value

    def byte(self) -> int:
        offset = self.offset
        if offset == self._size:
            raise _cut_short(1, offset, self._size)
        self.offset = offset + 1
        return self._data[offset]

    def skip(self, count: int) -> None:
        self._take(count)

    def protocol(self) -> None:
        if (version := self.byte()) > _HIGHEST_PROTOCOL:
            raise MalformedRequest(f"pickle protocol {version}; at most {_HIGHEST_PROTOCOL}")

    def push(self, value: object) -> None:
        self._stack.append(value)

    def push_integer(self, size: int, *, signed: bool = False) -> None:
        self.push(self._integer(size, signed=signed))

    def push_long(self) -> None:
        self.push_integer(self.byte(), signed=True)

    def push_bytes(self, length_size: int) -> None:
        self.push(self._take(self._integer(length_size)))

    def push_text(self, length_size: int) -> None:
        length = self._integer(length_size)
        if length > _LONGEST_TEXT:
            raise MalformedRequest(f"text of {length} bytes in a pickle; at most {_LONGEST_TEXT}")
        self.push(_text(self._take(length)))

    def push_global(self) -> None:
        """A global by two lines of text."""
        self.push(Name(self._line(), self._line()))

    def push_stacked_global(self) -> None:
        """A global by two texts on the stack."""
        name, module = self._pop_as(str), self._pop_as(str)
        self.push(Name(module, name))

    def push_call(self) -> None:
        arguments, function = self._pop(), self._pop()
        self.push(Called(function, arguments))

    def push_persistent(self) -> None:
        self.push(Persistent(self._pop()))

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def push_tuple(self) -> None:
        self.push(tuple(self._since_mark()))

    def push_short_tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def append(self) -> None:
        value = self._pop()
        self._top_as(list).append(value)

    def append_all(self) -> None:
        values = self._since_mark()
        self._top_as(list).extend(values)

    def set_all(self) -> None:
        flat = self._since_mark()
        if len(flat) % 2:
            raise MalformedRequest("a dictionary in a pickle with a key that has no value")
        target = self._top_as(dict)
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[_as(str, key)] = value

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._top_as(object)

    def put(self, size: int) -> None:
        self._memo[self._integer(size)] = self._top_as(object)

    def get(self, size: int) -> None:
        index = self._integer(size)
        if index not in self._memo:
            raise MalformedRequest(f"a pickle uses memo {index}, which it never wrote")
        self.push(self._memo[index])

    def _since_mark(self) -> list[object]:
        if not self._below:
            raise MalformedRequest("a pickle that collects without a mark")
        values, self._stack = self._stack, self._below.pop()
        return values

    def _take(self, count: int) -> memoryview:
        begin, end = self.offset, self.offset + count
        if end > self._size:
            raise _cut_short(count, begin, self._size)
        self.offset = end
        return self._data[begin:end]

    def _integer(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _line(self) -> str:
        window = bytes(self._data[self.offset : self.offset + _LONGEST_TEXT + 1])
        line, newline, _ = window.partition(b"\n")
        if not newline:
            raise MalformedRequest(f"a name in a pickle of more than {_LONGEST_TEXT} bytes")
        self.offset += len(line) + 1
        return _text(line)

    def _pop(self) -> object:
        if not self._stack:
            raise _nothing_to_take()
        return self._stack.pop()

    def _pop_as(self, kind: type[T]) -> T:
        return _as(kind, self._pop())

    def _top_as(self, kind: type[T]) -> T:
        if not self._stack:
            raise _nothing_to_take()
        return _as(kind, self._stack[-1])


def _cut_short(count: int, offset: int, size: int) -> MalformedRequest:
    return MalformedRequest(f"a pickle that is cut short: {count} bytes at byte {offset} of {size}")


def _nothing_to_take() -> MalformedRequest:
    return MalformedRequest("a pickle that takes from an empty stack")


def _as(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise MalformedRequest(f"a pickle with {type(value).__name__} in place of {kind.__name__}")
    return value


def _text(data: bytes | memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"text in a pickle that is no UTF-8: {error}") from error


_ACTIONS: dict[int, Callable[[_Machine], object]] = {
    ord("("): _Machine.mark,
    ord(")"): lambda machine: machine.push(()),
    ord("B"): lambda machine: machine.push_bytes(4),
    ord("C"): lambda machine: machine.push_bytes(1),
    ord("J"): lambda machine: machine.push_integer(4, signed=True),
    ord("K"): lambda machine: machine.push_integer(1),
    ord("M"): lambda machine: machine.push_integer(2),
    ord("N"): lambda machine: machine.push(None),
    ord("Q"): _Machine.push_persistent,
    ord("R"): _Machine.push_call,
    ord("X"): lambda machine: machine.push_text(4),
    ord("]"): lambda machine: machine.push([]),
    ord("a"): _Machine.append,
    ord("c"): _Machine.push_global,
    ord("e"): _Machine.append_all,
    ord("h"): lambda machine: machine.get(1),
    ord("j"): lambda machine: machine.get(4),
    ord("q"): lambda machine: machine.put(1),
    ord("r"): lambda machine: machine.put(4),
    ord("t"): _Machine.push_tuple,
    ord("u"): _Machine.set_all,
    ord("}"): lambda machine: machine.push({}),
    0x80: _Machine.protocol,
    0x85: lambda machine: machine.push_short_tuple(1),
    0x86: lambda machine: machine.push_short_tuple(2),
    0x87: lambda machine: machine.push_short_tuple(3),
    0x88: lambda machine: machine.push(value=True),
    0x89: lambda machine: machine.push(value=False),
    0x8A: _Machine.push_long,
    0x8C: lambda machine: machine.push_text(1),
    0x8E: lambda machine: machine.push_bytes(8),
    0x93: _Machine.push_stacked_global,
    0x94: _Machine.memoize,
    0x95: lambda machine: machine.skip(8),  # a frame's length, which only helps buffering
}
"""By opcode; the standard library's names are in `pickletools.opcodes`."""
