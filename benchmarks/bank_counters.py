"""Holds the model of bank conflicts against the hardware's counters, pattern by pattern.

    python benchmarks/bank_counters.py          # counts, needs ncu and the right to read its counters
    python benchmarks/bank_counters.py --time   # what conflicts of cp.async cost in time

One warp issues one instruction with given addresses, under Nsight Compute; `cutelab.layouts.BankReport`
predicts its wavefronts and conflicts. Appends a record for each pattern to <output>/bank_counters.jsonl and
prints a table by instruction. Needs a GPU.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import ncu
import numpy as np
import torch
from cutlass import Int32
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_fake_stream, nullptr

import protocol
from cutelab.layouts import Access, BankReport, as_numpy, line_swizzle

LANES = 32
SHARED_BYTES = 16384
ACCESSES = (
    *(f"{kind}.shared.b{bits}" for kind in ("ld", "st") for bits in (8, 16, 32, 64, 128)),
    *(
        f"{kind}.x{matrices}{trans}"
        for kind in ("ldmatrix", "stmatrix")
        for matrices in (1, 2, 4)
        for trans in ("", ".trans")
    ),
    *(f"cp.async.{size}" for size in (4, 8, 16)),
)
CP_ASYNC_WAVEFRONTS = 3  # a launch has so many more if it issues any cp.async, however many
COUNTERS = {
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}


# --- The kernel


def instruction(name: str, cache: str = "ca") -> tuple[str, int, int]:
    """(PTX, registers written, registers read) of an access; {$r0} is the shared-memory address.

    cp.async reads its source address instead. It goes through L1 unless `cache` is "cg": only then do the
    counters see what it writes.
    """
    access = Access.parse(name)
    if access.kind == "cp.async":
        return f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {access.bytes};", 0, 1
    count = access.matrices or max(access.bytes // 4, 1)
    reads = access.kind in ("ld", "ldmatrix")
    registers = ", ".join(f"{{$w{i}}}" if reads else f"{{$r{i + 1}}}" for i in range(count))
    registers = f"{{{registers}}}" if access.matrices or count > 1 else registers
    if access.matrices:
        trans = ".trans" if access.transposed else ""
        opcode = f"{access.kind}.sync.aligned.m8n8.x{access.matrices}{trans}.shared.b16"
    else:
        vector = f".v{count}" if count > 1 else ""
        opcode = f"{access.kind}.shared{vector}.b{min(access.bytes, 4) * 8}"
    ptx = f"{opcode} {registers}, [{{$r0}}];" if reads else f"{opcode} [{{$r0}}], {registers};"
    return ptx, count if reads else 0, 0 if reads else count


class Probe:
    """One warp issues the access `name` once, each lane with its own address, or not at all if that is -1.

    Every warp of a larger block does the same, `repeats` times: see `cycles`.
    """

    def __init__(self, name: str, cache: str = "ca", warps: int = 1, repeats: int = 1):
        self.name, self.cache, self.warps, self.repeats = name, cache, warps, repeats

    @cute.jit
    def launch(self, addresses: cute.Pointer, data: cute.Pointer, blocks: Int32, stream):
        self.kernel(cute.make_tensor(addresses, cute.make_layout(LANES)), data).launch(
            grid=(blocks, 1, 1), block=(LANES * self.warps, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, addresses: cute.Tensor, data: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        smem = cutlass.memory.SmemAllocator().allocate(SHARED_BYTES, byte_alignment=1024)
        address = addresses[lane]
        if address >= 0:
            for _ in cutlass.range(self.repeats):
                self.issue(Int32(smem.toint()) + address, data, lane)
        if cutlass.const_expr(self.name.startswith("cp.async")):
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)

    @cute.jit
    def issue(self, address: Int32, data: cute.Pointer, lane: Int32):
        ptx, writes, reads = instruction(self.name, self.cache)
        operands = [address] + [address + i for i in range(reads)]
        block, _, _ = cute.arch.block_idx()
        source = cute.recast_ptr(data, dtype=cutlass.Int8) + (
            block * 512 + lane * Access.parse(self.name).bytes
        )
        if cutlass.const_expr(self.name.startswith("cp.async")):
            operands = [address, source.toint()]
        results = inline_ptx(ptx, read_only_args=operands, write_only_types=[Int32] * writes)
        if cutlass.const_expr(writes > 0):
            kept = cute.make_tensor(data, cute.make_layout((LANES, 4)))
            for i, result in enumerate(results if cutlass.const_expr(writes > 1) else [results]):
                kept[lane, i] = result


def compiled(probe: Probe, arch: str | None = None):
    """The compiled launch; its PTX, as `__ptx__`, passes through a directory of its own."""
    pointer = nullptr(Int32, cute.AddressSpace.gmem, assumed_align=16)
    with tempfile.TemporaryDirectory() as directory:
        options = f"--enable-tvm-ffi --keep-ptx --dump-dir={directory}" + (
            f" --gpu-arch {arch}" if arch else ""
        )
        return cute.compile(probe.launch, pointer, pointer, Int32(1), make_fake_stream(), options=options)


# --- The patterns


class Pattern(NamedTuple):
    access: str
    label: str
    addresses: np.ndarray  # (32,) bytes, -1 for a lane that takes no part


def patterns(seed: int = 0, random: int = 12) -> list[Pattern]:
    """Strided, swizzled, shared and random addresses for each access, `random` of the last kind."""
    return [
        Pattern(name, label, vectors)
        for name in ACCESSES
        for label, vectors in addresses_of(Access.parse(name), np.random.default_rng(seed), random)
    ]


def addresses_of(access: Access, rng: np.random.Generator, random: int) -> Iterator[tuple[str, np.ndarray]]:
    lane = np.arange(LANES)
    largest = SHARED_BYTES // access.bytes

    def vectors(index: np.ndarray, active: np.ndarray | None = None) -> np.ndarray:
        """Byte addresses of the vectors `index`; inactive lanes only where the instruction may have them."""
        addresses = index % largest * access.bytes
        return addresses if active is None or access.matrices else np.where(active, addresses, -1)

    for stride in (0, 1, 2, 3, 4, 8, 32):
        yield f"stride {stride}", vectors(lane * stride)
    for row_bytes, granule in ((32, 16), (64, 16), (128, 16), (64, 32), (128, 32)):
        swizzle = line_swizzle(row_bytes, 8, granule)
        column = int(rng.integers(row_bytes // access.bytes)) * access.bytes
        rows = cute.make_layout(LANES, stride=row_bytes)
        offsets = as_numpy(cute.make_composed_layout(swizzle, column, rows))
        yield f"a column of rows of {row_bytes} bytes under {swizzle}", offsets
    for distance in (1, 2, 4, 16):
        yield f"lanes i and i ^ {distance} the same", vectors(rng.integers(0, 64, LANES)[lane & ~distance])
    yield "even lanes only", vectors(lane * 2, lane % 2 == 0)
    yield "two lanes of four", vectors(rng.integers(0, 64, LANES), lane % 4 < 2)
    yield "the first half", vectors(lane, lane < 16)
    for _ in range(random):
        span = int(rng.choice([4, 16, 32, 64, 256]))
        active = rng.random(LANES) < rng.choice([0.3, 0.7, 1.0, 1.0])
        active[rng.integers(LANES)] = True
        yield f"random among {span}", vectors(rng.integers(0, span, LANES), active)


# --- Counting


def issue(selected: list[Pattern]) -> None:
    """What is profiled: for each pattern a launch, and for each access one in which no lane takes part."""
    data = torch.zeros(LANES * 4, dtype=torch.int32, device="cuda")
    kernels = {name: compiled(Probe(name)) for name in dict.fromkeys(p.access for p in selected)}
    stream = torch.cuda.current_stream().cuda_stream
    nobody = np.full(LANES, -1)
    launches = [(p.access, p.addresses) for p in selected] + [(name, nobody) for name in kernels]
    for name, addresses in launches:
        table = torch.tensor(addresses.tolist(), dtype=torch.int32, device="cuda")
        kernels[name](table.data_ptr(), data.data_ptr(), 1, stream)
    torch.cuda.synchronize()


def count(selected: list[Pattern], command: list[str]) -> list[dict[str, int]]:
    """The counters of each pattern, less those of the same kernel when no lane takes part.

    command: runs `issue(selected)` in a process of its own.
    """
    collect = ["--cache-control", "none", "--metrics", ",".join(COUNTERS.values())]
    header, _, *rows = csv.reader(ncu.listing(command, collect, ["raw"]))
    counts = [
        {name: int(float(row[header.index(counter)].replace(",", ""))) for name, counter in COUNTERS.items()}
        for row in rows
    ]
    idle = dict(zip(dict.fromkeys(p.access for p in selected), counts[len(selected) :], strict=True))
    results = []
    for pattern, counted in zip(selected, counts, strict=False):
        own = {name: value - idle[pattern.access][name] for name, value in counted.items()}
        if pattern.access.startswith("cp.async"):
            own["wavefronts"] -= CP_ASYNC_WAVEFRONTS
        results.append(own)
    return results


def records(selected: list[Pattern], counts: list[dict[str, int]], where: dict[str, str]) -> list[dict]:
    results = []
    for pattern, counted in zip(selected, counts, strict=True):
        report = BankReport(Access.parse(pattern.access), pattern.addresses)
        predicted = {"wavefronts": int(report.wavefronts[0]), "conflicts": int(report.conflicts[0])}
        config = {"access": pattern.access, "pattern": pattern.label, "addresses": pattern.addresses.tolist()}
        results.append(
            {
                "op": "bank_counters",
                "kernel": "probe",
                "dtype": "bytes",
                "config": config,
                "ours": predicted,
                "counted": counted,
                "unit": "wavefronts",
                **where,
            }
        )
    return results


def table(results: list[dict]) -> str:
    lines = ["| access | patterns | prediction = counter |", "| --- | --- | --- |"]
    for name in dict.fromkeys(r["config"]["access"] for r in results):
        mine = [r for r in results if r["config"]["access"] == name]
        equal = sum(r["ours"] == r["counted"] for r in mine)
        lines.append(f"| {name} | {len(mine)} | {equal} |")
    return "\n".join(lines)


# --- Timing


TIMED = {
    "rows of 128 bytes, in order": lambda lane: lane * 16,
    "rows of 128 bytes, S<3,4,3>": lambda lane: (lane * 16) ^ ((lane * 16 >> 3) & 0x70),
    "one 16-byte gap after each vector": lambda lane: lane * 32,
    "columns: 8 lanes in 8 rows": lambda lane: lane % 8 * 128 + lane // 8 * 16,
    "columns of rows of 1024 bytes": lambda lane: lane % 8 * 1024 + lane // 8 * 16,
}


def cycles(cache: str, addresses: np.ndarray, warps: int = 4, repeats: int = 4096) -> float:
    """Cycles of a multiprocessor for each cp.async of 16 bytes a lane, all of them busy, data in L2."""
    probe = compiled(Probe("cp.async.16", cache, warps, repeats))
    properties = torch.cuda.get_device_properties(0)
    data = torch.zeros(properties.multi_processor_count * 512, dtype=torch.int8, device="cuda")
    table = torch.tensor(addresses.tolist(), dtype=torch.int32, device="cuda")

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        probe(table.data_ptr(), data.data_ptr(), properties.multi_processor_count, stream)

    seconds = protocol.gpu_seconds({"probe": call}, rounds=5, pause=0.02)["probe"]
    return seconds * torch.cuda.clock_rate() * 1e6 / (warps * repeats)


def main() -> None:
    parser = protocol.parser(__doc__)
    parser.add_argument("--issue", action="store_true", help="only launch the kernels, to be profiled")
    parser.add_argument("--time", action="store_true", help="time cp.async instead of counting")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/bank_counters.py profiles kernels on an NVIDIA GPU, and torch sees none")
    selected = patterns()
    if args.issue:
        return issue(selected)
    if args.time:
        for label, pattern in TIMED.items():
            addresses = pattern(np.arange(LANES))
            both = (f"{cache} {cycles(cache, addresses):.1f}" for cache in ("ca", "cg"))
            print(f"{label}: {', '.join(both)} cycles")
        return None
    counts = count(selected, [sys.executable, __file__, "--issue"])
    results = records(selected, counts, protocol.environment(args.commit))
    protocol.append(results, args.output / "bank_counters.jsonl")
    print(table(results))


if __name__ == "__main__":
    main()
