"""Swizzles: what the bits of one mean, in bytes and in elements. `cutelab.layouts.solver` finds them.

Swizzle<B,M,S> XORs B bits of an offset, from bit M + S on, into the B bits from bit M on. CuTe applies it to
offsets in elements. What is written about TMA and wgmma counts bytes: their modes are S<1,4,3>, S<2,4,3> and
S<3,4,3>, and for elements of 2^e bytes these are S<B,4-e,3>. One taken for the other still computes the right
numbers, as every swizzle is a permutation, but it moves the wrong bits. In the tf32 atom (32,8):(1,32),
S<3,2,3> puts (0,1) at 36 = 32 ^ 4, one granule of 16 bytes on; S<3,4,3> leaves it at 32, in (0,0)'s bank.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from cutelab.layouts.errors import SwizzleError
from cutelab.layouts.notation import format
from cutelab.layouts.tiles import LINE_BYTES, log2


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a swizzle does to an offset, bit by bit; `str()` draws it.

    element_bytes: what it counts, 1 for byte addresses; None if that is left open.
    source, target: the first of the bits that it reads, and of those that it changes.
    whole: units that stay side by side. row: units after which the pattern differs. period: units after
    which it starts anew.
    """

    swizzle: cute.Swizzle
    element_bytes: int | None = None

    @property
    def source(self) -> int:
        return self.swizzle.num_base + max(self.swizzle.num_shift, 0)

    @property
    def target(self) -> int:
        return self.swizzle.num_base + max(-self.swizzle.num_shift, 0)

    @property
    def whole(self) -> int:
        return 1 << self.swizzle.num_base

    @property
    def row(self) -> int:
        return 1 << max(self.source, self.target)

    @property
    def period(self) -> int:
        return self.row << self.swizzle.num_bits

    def lines(self, unit_bytes: int) -> int:
        """The 128-byte lines of shared memory that a period fills: one wavefront each."""
        return -(-self.period * unit_bytes // LINE_BYTES)

    def __str__(self) -> str:
        bits, name = self.swizzle.num_bits, format(self.swizzle)
        units = {None: "units", 1: "bytes"}.get(self.element_bytes, f"elements of {self.element_bytes} bytes")
        if bits == 0:
            return f"{name} on {units}: the identity, every offset stays what it is"
        top = max(self.source, self.target) + bits
        width = len(str(top - 1)) + 1
        numbers = "".join(f"{bit:{width}}" for bit in reversed(range(top)))
        marks = "".join(f"{self._mark(bit):>{width}}" for bit in reversed(range(top)))
        first = 1 << self.source
        lines = str(self.lines(self.element_bytes or 1))
        if self.element_bytes is None:
            lines += f" for units of a byte, {self.lines(2)} for 2 bytes, {self.lines(4)} for 4"
        sideways = "to another place in its row" if self.target < self.source else "to another row"
        return "\n".join(
            [
                f"{name} on {units}",
                f"  bit of the offset {numbers}",
                f"                    {marks}",
                f"  y: {_bits(self.source, bits)}, read. z: {_bits(self.target, bits)}, become z ^ y. "
                "The others stay",
                f"  whole: runs of 2^{self.swizzle.num_base} = {self.whole} {units}, each moves {sideways}",
                f"  the first that moves: {first} goes to {first ^ 1 << self.target}",
                f"  repeats after 2^{bits} = {1 << bits} rows of {self.row}, that is {self.period} {units}",
                f"  128-byte lines that the pattern needs: {lines}",
            ]
        )

    def _mark(self, bit: int) -> str:
        bits = self.swizzle.num_bits
        return "y" if 0 <= bit - self.source < bits else "z" if 0 <= bit - self.target < bits else "."


def _bits(first: int, count: int) -> str:
    return f"bit {first}" if count == 1 else f"bits {first}–{first + count - 1}"


def explain(swizzle: cute.Swizzle, element_bytes: int | None = None) -> Explanation:
    """What `swizzle` does to offsets counted in elements of so many bytes: print the result."""
    if element_bytes is not None:
        _exponent(element_bytes)
    return Explanation(swizzle, element_bytes)


def in_bytes(swizzle: cute.Swizzle, element_bytes: int) -> cute.Swizzle:
    """The swizzle of byte addresses that does what `swizzle` does to offsets in elements of so many bytes.

    Raises SwizzleError if the DSL has none: its bits must lie within 32.
    """
    return _rebased(swizzle, _exponent(element_bytes))


def in_elements(swizzle: cute.Swizzle, element_bytes: int) -> cute.Swizzle:
    """The swizzle of offsets in elements that does what `swizzle` does to byte addresses.

    Raises SwizzleError if there is none: `swizzle` would move a part of an element.
    """
    return _rebased(swizzle, -_exponent(element_bytes))


def _exponent(size: int) -> int:
    if size < 1 or size & (size - 1):
        raise SwizzleError(
            f"elements of {size} bytes: only for a power of two are bits of an offset bits of an address"
        )
    return log2(size)


def _rebased(swizzle: cute.Swizzle, by: int) -> cute.Swizzle:
    bits, base, shift = swizzle.num_bits, swizzle.num_base + by, swizzle.num_shift
    if bits == 0:
        base = max(base, 0)
    if base < 0:
        raise SwizzleError(
            f"{format(swizzle)} moves runs of {1 << swizzle.num_base} bytes, and so parts of an element of "
            f"{1 << -by}: only a swizzle with a base of {-by} or more keeps them whole"
        )
    if bits and bits + base + abs(shift) > 32:
        raise SwizzleError(
            f"S<{bits},{base},{shift}> goes past bit 31, the last that a swizzle of the DSL has"
        )
    return cute.make_swizzle(bits, base, shift)
