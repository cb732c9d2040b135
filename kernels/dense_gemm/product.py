"""The modes of a batched product, and the layouts in which the kernel can read and write its operands.

A `Product` is what remains of the tensors of one `gemm`: for each of its modes M, N, K and batch, a size and
one stride in each of the four operands. Coalescing batch modes, folding them into M and transposing the whole
are then rules on modes, the same for every operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

__all__ = ["MAX_EXTENT", "Mode", "Operand", "OperandLayout", "Product"]

MAX_EXTENT = 2**31 - 1024  # of M, N, K and the batch: 32-bit in the kernel, and the last tile may stick out
_VECTOR_BYTES = 16  # of the widest copy


class Operand(IntEnum):
    """The operands of out = a · b + c, in the order in which a mode keeps their strides."""

    A = 0
    B = 1
    C = 2
    OUT = 3


@dataclass(frozen=True)
class Mode:
    """One mode of the product: its size, and its stride in a, b, c and out (0 in those that lack it)."""

    size: int
    strides: tuple[int, ...]

    def stride(self, operand: Operand) -> int:
        """The stride as the kernel gets it: 0 for a single element, which needs none."""
        return self.strides[operand] if self.size > 1 else 0

    def is_unit(self, operand: Operand) -> bool:
        """Whether neighbours along the mode are neighbours in memory; a single element has none."""
        return self.size <= 1 or self.strides[operand] == 1

    def swapped(self) -> Mode:
        a, b, c, out = self.strides
        return Mode(self.size, (b, a, c, out))


@dataclass(frozen=True)
class OperandLayout:
    """How the kernel addresses a matrix: which mode has unit stride, the other's stride, the alignment.

    major: "k" if the columns of A (M, K), B (N, K), C or D (M, N) have unit stride, "mn" if the rows have.
    align: bytes, at most 16, that divide the address, every other stride and the extent of the unit mode.
    step_align: the same but for the extent, which is all that TMA asks for.
    """

    major: str
    leading_stride: int
    align: int
    step_align: int


@dataclass(frozen=True)
class Product:
    """out[m, n] = Σₖ a[m, k] · b[k, n] for each index of the batch modes, outermost first."""

    m: Mode
    n: Mode
    k: Mode
    batch: tuple[Mode, ...]

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        shape: Sequence[int],
        out_strides: Sequence[int],
    ) -> Product:
        """The product of tensors whose shapes fit; ``shape`` and ``out_strides`` are the output's."""
        *batch, m, n = shape
        a_strides = a.expand(*batch, *a.shape[-2:]).stride()
        b_strides = b.expand(*batch, *b.shape[-2:]).stride()
        c_strides = (0,) * len(shape) if c is None else c.expand(*shape).stride()
        *outer, rows, columns = zip(a_strides, b_strides, c_strides, out_strides, strict=True)
        return cls(
            m=Mode(m, (rows[Operand.A], 0, rows[Operand.C], rows[Operand.OUT])),
            n=Mode(n, (0, columns[Operand.B], columns[Operand.C], columns[Operand.OUT])),
            k=Mode(a.shape[-1], (columns[Operand.A], rows[Operand.B], 0, 0)),
            batch=tuple(Mode(size, strides) for size, strides in zip(batch, outer, strict=True)),
        )

    def swapped(self) -> Product:
        """The product outᵀ = bᵀ·aᵀ, whose first operand is b."""
        batch = tuple(mode.swapped() for mode in self.batch)
        return Product(self.n.swapped(), self.m.swapped(), self.k.swapped(), batch)

    def with_coalesced_batch(self) -> Product:
        """The same product with as few batch modes as the strides allow."""
        return replace(self, batch=_coalesced(self.batch))

    def with_batch_as_rows(self) -> Product:
        """The same product with inner batch modes over which b is broadcast turned into rows of a.

        Many small products with one b become one large product, whose tiles are full.
        """
        if not self.batch or self.batch[-1].strides[Operand.B] != 0:
            return self
        rows = _merged(self.batch[-1], self.m)
        if rows is None or rows.size > MAX_EXTENT:
            return self
        folded = replace(self, m=rows, batch=self.batch[:-1])
        if not (folded.has_unit_mode(Operand.A) and folded.has_unit_mode(Operand.OUT)):
            return self
        return folded.with_batch_as_rows()

    def scattered(self) -> list[Operand]:
        """The operands whose batch is not one run of even steps through memory."""
        return [
            x
            for x in Operand
            if len(_coalesced(Mode(mode.size, (mode.strides[x],)) for mode in self.batch)) > 1
        ]

    def has_unit_mode(self, operand: Operand) -> bool:
        return any(mode.is_unit(operand) for mode in self._rows_and_columns(operand))

    def layout(self, operand: Operand, address: int, itemsize: int) -> OperandLayout:
        """The best aligned layout of an operand that has a unit-stride mode and starts at ``address``."""
        rows, columns = self._rows_and_columns(operand)
        found = []
        for major, unit, other in (("k", columns, rows), ("mn", rows, columns)):
            if unit.is_unit(operand):
                step_align = self.step_alignment(operand, other, address, itemsize)
                align = self.alignment(operand, unit, other, address, itemsize)
                found.append(OperandLayout(major, other.stride(operand), align, step_align))
        return max(found, key=lambda layout: (layout.align, layout.step_align))

    def alignment(self, operand: Operand, unit: Mode, other: Mode, address: int, itemsize: int) -> int:
        """The bytes, at most a vector, to which all vectors along ``unit`` are aligned and fill it."""
        bits = self.step_alignment(operand, other, address, itemsize) | unit.size * itemsize
        return bits & -bits

    def step_alignment(self, operand: Operand, other: Mode, address: int, itemsize: int) -> int:
        """The bytes, at most a vector, that divide the address and the strides of ``other`` and the batch."""
        bits = _VECTOR_BYTES | address
        for mode in (other, *self.batch):
            bits |= mode.stride(operand) * itemsize
        return bits & -bits

    def _rows_and_columns(self, operand: Operand) -> tuple[Mode, Mode]:
        rows = self.n if operand is Operand.B else self.m
        columns = self.k if operand in (Operand.A, Operand.B) else self.n
        return rows, columns


def _merged(outer: Mode, inner: Mode) -> Mode | None:
    """The single mode that runs through ``inner`` within ``outer``, or None where none does."""
    if outer.size == 1:
        return inner
    if inner.size == 1:
        return outer
    if any(step != stride * inner.size for step, stride in zip(outer.strides, inner.strides, strict=True)):
        return None
    return Mode(outer.size * inner.size, inner.strides)


def _coalesced(modes: Iterable[Mode]) -> tuple[Mode, ...]:
    coalesced: list[Mode] = []
    for mode in modes:
        merged = _merged(coalesced[-1], mode) if coalesced else mode
        if merged is None:
            coalesced.append(mode)
        else:
            coalesced[-1:] = [merged]
    return tuple(coalesced)
