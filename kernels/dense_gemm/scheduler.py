"""Which part of the output a thread block computes, and when: orders that re-use L2 and leave nobody idle."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class GroupedRaster:
    """Tiles in groups of `group` rows: down a group's first column, then its second, and so on.

    Blocks start in order of their index, so those that run at the same time form a nearly square patch of the
    output, which reads the fewest rows of A and columns of B: with 132 multiprocessors, 8 x 16.5 tiles
    instead of 132 tiles of one row. The grid is one-dimensional: any batch count fits.
    """

    group: int = 8

    def grid(self, tiles: tuple[Int32, Int32], batch: tuple[Int32, Int32]) -> tuple[Int32, int, int]:
        return tiles[0] * tiles[1] * batch[0] * batch[1], 1, 1

    @cute.jit
    def tile(self, block: Int32, tiles: tuple[Int32, Int32], batch: tuple[Int32, Int32]):
        """The (m, n) tile and the (l0, l1) batch coordinate of a block."""
        m_tiles, n_tiles = tiles
        per_batch, per_group = m_tiles * n_tiles, self.group * n_tiles
        batch_index, index = block // per_batch, block % per_batch
        first = index // per_group * self.group
        rows = cutlass.min(m_tiles - first, self.group)  # the last group may be smaller
        index = index % per_group
        return first + index % rows, index // rows, (batch_index % batch[0], batch_index // batch[0])


@dataclass(frozen=True)
class Piece:
    """Some k-tiles, from `k_begin` to `k_end`, of one tile."""

    tile: Int32
    k_begin: Int32
    k_end: Int32

    @property
    def k_tiles(self) -> Int32:
        return Int32(self.k_end - self.k_begin)


@dataclass(frozen=True)
class Schedule:
    """The pieces of work of one of `workers` persistent workers (a CTA, or a cluster of them).

    The tiles from `shared` on are dealt out whole, one to each worker in turn. The first `shared` tiles are
    cut into equal runs of k-tiles, one for each worker, across the bounds of tiles (Stream-K, Osama et al.,
    2023), so that nobody idles while a last wave runs. Shared tiles come first: a run begins with the end of
    a tile, so what the worker before needs of it is there by the time that this one comes to its own.
    """

    worker: Int32
    workers: Int32
    tiles: Int32
    shared: Int32
    k_tiles: Int32

    def run_end(self, worker: Int32) -> Int32:
        """Where the run of a worker ends, counted in k-tiles from the first of the first tile."""
        return (worker + 1) * (self.shared * self.k_tiles) // self.workers

    def shared_pieces(self) -> Int32:
        begin, end = self.run_end(self.worker - 1), self.run_end(self.worker)
        return cutlass.select_(end > begin, (end - 1) // self.k_tiles - begin // self.k_tiles + 1, Int32(0))

    def pieces(self) -> Int32:
        """How many the worker has."""
        whole = (self.tiles - self.shared - self.worker + self.workers - 1) // self.workers
        return self.shared_pieces() + cutlass.max(whole, 0)

    def piece(self, number: Int32) -> Piece:
        begin, end = self.run_end(self.worker - 1), self.run_end(self.worker)
        cut = self.shared_pieces()
        is_cut = number < cut
        tile = begin // self.k_tiles + number
        whole = self.shared + self.worker + (number - cut) * self.workers
        return Piece(
            cutlass.select_(is_cut, tile, whole),
            cutlass.select_(is_cut, cutlass.max(begin - tile * self.k_tiles, 0), Int32(0)),
            cutlass.select_(is_cut, cutlass.min(end - tile * self.k_tiles, self.k_tiles), self.k_tiles),
        )

    def covered(self, worker: Int32, tile: Int32) -> Int32:
        """Up to which k-tile of a shared tile the workers up to `worker` have come."""
        return cutlass.min(self.run_end(worker) - tile * self.k_tiles, self.k_tiles)
