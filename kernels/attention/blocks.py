"""Which keys a query sees, which blocks of keys a tile of queries needs for that, and the order of the tiles.

The objects are the same for every attention kernel: they know nothing of threads, copies or tensor cores.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class KeyBlocks:
    """The blocks of `width` keys that a tile of queries needs, from `begin` to `end`.

    Every query of the tile sees every key of the blocks from `inner_begin` to `inner_end`: these need no
    mask.
    keys: (first, end) of the keys that any of the queries sees. What lies outside need not be memory.
    """

    begin: Int32
    inner_begin: Int32
    inner_end: Int32
    end: Int32
    keys: tuple[Int32, Int32]

    @property
    def count(self) -> Int32:
        return Int32(self.end - self.begin)

    def needs_mask(self, block: Int32) -> cutlass.Boolean:
        return (block < self.inner_begin) | (block >= self.inner_end)


@dataclass(frozen=True)
class Band:
    """The keys that each query sees: a band along the diagonal that ends at the last query and the last key.

    queries, keys: how many there are. Query i is aligned with key i + keys - queries, and sees `left` keys
    before that one and `right` after it; None: all that there are.
    """

    queries: Int32
    keys: Int32
    left: Int32 | None
    right: Int32 | None

    def first(self, query: Int32) -> Int32:
        """The first key that a query sees."""
        if self.left is None:
            return Int32(0)
        return cutlass.max(query + (self.keys - self.queries) - self.left, 0)

    def end(self, query: Int32) -> Int32:
        """The key after the last one that a query sees; `first` or less if it sees none."""
        if self.right is None:
            return self.keys
        return cutlass.min(query + (self.keys - self.queries) + self.right + 1, self.keys)

    def key_blocks(self, begin: Int32, height: int, width: int) -> KeyBlocks:
        """The blocks of `width` keys for the tile of `height` queries from `begin` on. One at least exists.

        Both ends of what a query sees grow with the query, so its first and its last query bound the tile.
        """
        last = cutlass.min(begin + height, self.queries) - 1
        first_key, end_key = self.first(begin), self.end(last)
        first_block = first_key // width
        end_block = cutlass.max((end_key + width - 1) // width, first_block)
        inner_begin = cutlass.min((self.first(last) + width - 1) // width, end_block)
        inner_end = cutlass.max(cutlass.min(self.end(begin) // width, end_block), inner_begin)
        nothing = end_key <= first_key
        end_block = cutlass.select_(nothing, first_block, end_block)
        return KeyBlocks(first_block, inner_begin, inner_end, end_block, (first_key, end_key))


@dataclass(frozen=True)
class Tile:
    """A tile of queries: its number among those of the sequence, its head, and its sequence in the batch."""

    number: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class LongestFirst:
    """The order of the tiles: last queries first, since with a causal mask those see the most keys.

    Then the tiles that start last are the short ones, and no long one is left to run alone at the end. Tiles
    of the same queries go over the heads of a group first; a group is what the plan expects to find room for
    its keys and values in L2, where all tiles of a head share them. The grid is one-dimensional: any number
    of heads and sequences fits.

    tiles: of a sequence; heads: of queries; sequences: in the batch; group: heads, counted over all
    sequences.
    """

    tiles: Int32
    heads: Int32
    sequences: Int32
    group: Int32

    def grid(self) -> tuple[Int32, int, int]:
        return self.tiles * self.heads * self.sequences, 1, 1

    def tile(self, block: Int32) -> Tile:
        """What the block of that index computes."""
        per_group = self.tiles * self.group
        first = block // per_group * self.group
        heads = cutlass.min(self.heads * self.sequences - first, self.group)  # the last group may be smaller
        index = block % per_group
        head = first + index % heads
        return Tile(self.tiles - 1 - index // heads, head % self.heads, head // self.heads)
