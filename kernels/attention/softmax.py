"""Online softmax: row after row of scores, block after block of keys, without ever holding a whole row.

With m the largest score so far, a row keeps l = Σ exp(s - m) and O = Σ exp(s - m) v. When a block raises the
maximum to m', both are multiplied by exp(m - m') (Milakov and Gimelshein, 2018; Dao, 2023). Everything is in
powers of 2, which is what the hardware computes: exp(scale · s) = 2^(scale · log₂e · s).
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

HEADROOM = 8.0
"""How far the largest exponent may rise above the reference before the sums are scaled down: to 2^8, which
leaves fp16 a factor of 255 up to its largest number, and costs no precision in any format."""


@dataclass(frozen=True)
class Softmax:
    """The state of a lane's rows. Scores and outputs are accumulators as `accumulator_rows` shows them.

    For each block of keys: `raise_maximum`, `rescale` of the output where that says so, `exponentiate`; at
    the end, `finish`. The reference of a row is not always its maximum: it follows only when that has risen
    by more than HEADROOM, which after the first blocks is rare, so that most blocks leave the output alone.
    """

    scale: Float32  # of a score, to the exponent of a power of 2; more than 0
    reference: cute.Tensor  # (rows,) the score whose power is 1; -inf while nothing was seen
    total: cute.Tensor  # (rows,) sum of the powers, over the columns of this lane
    factor: cute.Tensor  # (rows,) by which the output has to be multiplied

    @classmethod
    def start(cls, rows: int, scale: Float32):
        reference, total, factor = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
        reference.fill(-Float32.inf)
        total.fill(0.0)
        return cls(scale, reference, total, factor)

    @cute.jit
    def raise_maximum(self, scores: cute.Tensor) -> Boolean:
        """Looks at the scores (rows, columns) of a block. Whether any row of the warp needs `rescale`."""
        risen = Boolean(False)
        for i in cutlass.range_constexpr(cute.size(self.reference)):
            before = self.reference[i]
            largest = row_maximum(scores[i, None].load().reduce(cute.ReductionOp.MAX, before, 0))
            rises = (largest - before) * self.scale > HEADROOM
            self.factor[i] = cutlass.select_(rises, exp2((before - largest) * self.scale), Float32(1.0))
            self.reference[i] = cutlass.select_(rises, largest, before)
            risen = risen | rises
        return cute.arch.vote_any_sync(risen)

    @cute.jit
    def rescale(self, acc: cute.Tensor):
        """Refers the output acc (rows, columns) to the new references."""
        for i in cutlass.range_constexpr(cute.size(self.reference)):
            acc[i, None].store(acc[i, None].load() * self.factor[i])

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, powers: cute.Tensor):
        """Powers of 2 of the scores (rows, columns), in the type of `powers`; summed before rounding."""
        for i in cutlass.range_constexpr(cute.size(self.reference)):
            reference = self.reference[i]
            # While a row has seen nothing, all its scores are -inf, and -inf minus -inf would be NaN.
            offset = cutlass.select_(reference == -Float32.inf, Float32(0.0), reference * self.scale)
            values = exp2(scores[i, None].load() * self.scale - offset)
            powers[i, None].store(values.to(powers.element_type))
            self.total[i] = values.reduce(cute.ReductionOp.ADD, self.total[i] * self.factor[i], 0)

    @cute.jit
    def finish(self, acc: cute.Tensor, lse: cute.Tensor):
        """Divides the output acc (rows, columns) by the sums; lse (rows,) gets their natural logarithms.

        A row that saw nothing gives 0 and -inf.
        """
        for i in cutlass.range_constexpr(cute.size(self.reference)):
            total = row_sum(self.total[i])
            nothing = total == 0.0
            inverse = cutlass.select_(nothing, Float32(0.0), cute.arch.rcp_approx(total))
            acc[i, None].store(acc[i, None].load() * inverse)
            logarithm = (self.reference[i] * self.scale + cute.math.log2(total, fastmath=True)) * math.log(2)
            lse[i] = cutlass.select_(nothing, -Float32.inf, logarithm)


@cute.jit
def modify(scores: cute.Tensor, how: cutlass.Constexpr, factor: Float32):
    """What happens to scores before mask and softmax, in place: "plain" nothing, "scaled" factor · s, and
    "capped" tanh(factor · s), which the softmax's scale then multiplies by the cap."""
    if cutlass.const_expr(how == "scaled"):
        scores.store(scores.load() * factor)
    if cutlass.const_expr(how == "capped"):
        scores.store(tanh(scores.load() * factor))


def tanh(x):
    """Of a vector, within 2^-22: the hardware's own tanh has 11 bits."""
    return 1.0 - 2.0 * cute.math.rcp(1.0 + exp2(x * (2.0 / math.log(2))), fastmath=True)


def exp2(x):
    """2^x of a value or a vector, within two units in the last place."""
    return cute.math.exp2(x, fastmath=True)


def row_maximum(x: Float32) -> Float32:
    """The largest of the values that the lanes of a row have."""
    for offset in (2, 1):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def row_sum(x: Float32) -> Float32:
    for offset in (2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x
