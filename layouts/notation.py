"""CuTe's printed notation, read back into the DSL's objects.

    object   = [inner "o" tuple "o"] layout | swizzle | tuple
    inner    = swizzle | layout
    layout   = tuple ":" tuple                       shape and stride
    swizzle  = ("S" | "Sw") "<" bits "," base "," shift ">"
    tuple    = leaf | "(" [tuple {"," tuple} [","]] ")"
    leaf     = integer {"@" mode} | "E" "<" mode {"," mode} ">"

`2@1@0` is twice the basis element of mode [0, 1], E<0,1>. Integers may carry the underscore by which CuTe C++
marks static ones, `(_8,_64):(_64,_1)`. `(8)` is a tuple of one, as CuTe prints it. Spaces are free.
"""

import re
from typing import Any, NoReturn

import cutlass.cute as cute
from cutlass._mlir.ir import MLIRError

_INTEGER = re.compile(r"_?-?[0-9]+")
_TOKEN = re.compile(_INTEGER.pattern + r"|Sw|\S")


class NotationError(ValueError):
    """Text that is not CuTe notation. `position` is the index of the offending character in `text`."""

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(f"{message}\n  {text}\n  {' ' * position}^")
        self.text = text
        self.position = position


def parse(text: str) -> Any:
    """The DSL object that `text` denotes: layout, composed layout, swizzle, integer, basis element or tuple.

    A shape without strides is a tuple; `parse_layout` completes it. Raises `NotationError`.
    """
    parser = _Parser(text)
    value = parser.anything()
    parser.end()
    return value


def parse_layout(text: str) -> cute.Layout | cute.ComposedLayout:
    """The layout or composed layout that `text` denotes; a shape alone gets compact column-major strides.

    Raises `NotationError`.
    """
    parser = _Parser(text)
    value = parser.anything()
    if isinstance(value, cute.Swizzle):
        parser.fail("expected 'o', an offset, 'o' and a layout: a swizzle has no shape of its own")
    parser.end()
    return parser.as_layout(value, 0)


def format(value: Any) -> str:
    """The notation of what `parse` returns: ``parse(format(value)) == value``.

    The DSL's `str` writes the same, but cuts a swizzle off after eight characters: S<3,4,-3>, S<3,10,3>.
    """
    if isinstance(value, tuple):
        return f"({','.join(map(format, value))})"
    if isinstance(value, (int, cute.ScaledBasis)):
        return str(value)
    if isinstance(value, cute.ComposedLayout):
        return f"{format(value.inner)} o {format(value.offset)} o {format(value.outer)}"
    return str(value.type).split('"')[1]  # !cute.layout<"(8,64):(64,1)">


class _Parser:
    """Recursive descent: a method for each rule of the grammar. `at` is the token to read next."""

    def __init__(self, text: str) -> None:
        self.text = text
        matches = list(_TOKEN.finditer(text))
        self.tokens = [*(match.group() for match in matches), ""]
        self.positions = [*(match.start() for match in matches), len(text)]
        self.at = 0

    @property
    def token(self) -> str:
        return self.tokens[self.at]

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise NotationError(message, self.text, self.positions[self.at if at is None else at])

    def accept(self, *tokens: str) -> bool:
        accepted = self.token in tokens
        self.at += accepted
        return accepted

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected {token!r}")

    def end(self) -> None:
        if self.token:
            self.fail("expected the end")

    def anything(self) -> Any:
        start = self.at
        value = self.swizzle() if self.accept("S", "Sw") else self.layout_or_tuple()
        if not self.accept("o"):
            return value
        inner = self.as_layout(value, start)
        offset = self.int_tuple()
        self.expect("o")
        outer_start = self.at
        outer = self.as_layout(self.layout_or_tuple(), outer_start)
        try:
            return cute.make_composed_layout(inner, offset, outer)
        except (TypeError, ValueError, MLIRError):
            self.fail(f"{format(inner)} does not take what {format(offset)} and {format(outer)} give", start)

    def layout_or_tuple(self) -> Any:
        start = self.at
        shape = self.int_tuple()
        if not self.accept(":"):
            return shape
        stride_start = self.at
        stride = self.int_tuple()
        self.check_shape(start, stride_start)
        try:
            return cute.make_layout(shape, stride=stride)
        except ValueError:
            self.fail(f"expected strides with the profile of the shape {format(shape)}", stride_start)

    def as_layout(self, value: Any, start: int) -> Any:
        """`value`, read from token `start` on, with strides if it is a shape."""
        if not isinstance(value, (int, tuple, cute.ScaledBasis)):
            return value
        self.check_shape(start, self.at)
        return cute.make_layout(value)

    def check_shape(self, start: int, stop: int) -> None:
        for at, token in enumerate(self.tokens[start:stop], start):
            if token in ("@", "E") or (_is_integer(token) and _value(token) <= 0):
                self.fail("a size is a positive integer", at)

    def swizzle(self) -> cute.Swizzle:
        start = self.at - 1
        self.expect("<")
        bits = self.integer()
        self.expect(",")
        base = self.integer()
        self.expect(",")
        shift = self.integer()
        self.expect(">")
        swizzle = cute.make_swizzle(bits, base, shift)
        if swizzle.num_bits != bits:  # the DSL has made it the identity without a word
            self.fail("a swizzle needs 0 <= bits <= |shift|, base >= 0, bits + base + |shift| <= 32", start)
        return swizzle

    def int_tuple(self) -> Any:
        if not self.accept("("):
            return self.leaf()
        items = []
        while not self.accept(")"):
            items.append(self.int_tuple())
            if self.token != ")":
                self.expect(",")
        return tuple(items)

    def leaf(self) -> Any:
        if self.accept("E"):
            self.expect("<")
            modes = [self.integer()]
            while self.accept(","):
                modes.append(self.integer())
            self.expect(">")
            return cute.E(modes)
        value, modes = self.integer("expected an integer or '('"), []
        while self.accept("@"):
            modes.insert(0, self.integer())
        return cute.ScaledBasis(value, modes) if modes else value

    def integer(self, expected: str = "expected an integer") -> int:
        if self.token == "?":
            self.fail("'?' stands for an integer that is known only when a kernel runs")
        if not _is_integer(self.token):
            self.fail(expected)
        if abs(_value(self.token)) >= 1 << 63:
            self.fail("the integer does not fit into 64 bits")
        self.at += 1
        return _value(self.tokens[self.at - 1])


def _is_integer(token: str) -> bool:
    return _INTEGER.fullmatch(token) is not None


def _value(token: str) -> int:
    return int(token.removeprefix("_"))
