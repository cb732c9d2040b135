"""What a compiled kernel consists of, read from its cubin and PTX: instructions, registers, shared memory.

Works without a GPU. The disassembler is nvdisasm, of the PyPI package ``nvidia-cuda-nvdisasm``; its output
and the instruction names (HMMA, LDSM, LDGSTS, ...) are documented in NVIDIA's "CUDA Binary Utilities".
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from math import prod
from pathlib import Path

__all__ = ["DisassemblerError", "KernelSummary", "count", "ptx_instructions", "sass", "summarize"]

_SASS_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_PTX_INSTRUCTION = re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]*)(?=[\s;])", re.MULTILINE)
_SECTION = re.compile(r"^//-{8,} (\S+)\s+-{8,}$", re.MULTILINE)


class DisassemblerError(RuntimeError):
    """nvdisasm is not installed, or it rejected the cubin."""


@dataclass(frozen=True)
class KernelSummary:
    """One kernel of a cubin.

    instructions: SASS opcodes with their modifiers, such as ``"LDS.128"``, and how often each occurs.
    registers: 32-bit registers per thread.
    threads: threads per block that the kernel was compiled for (PTX ``.reqntid``).
    static_shared: bytes of shared memory per block known to the compiler; what the launch adds to it
        (dynamic shared memory) is not in a cubin.
    stack: bytes of local memory per thread; registers that were spilled live there.
    """

    name: str
    instructions: Counter[str]
    registers: int
    threads: int
    static_shared: int
    stack: int

    @property
    def spills(self) -> int:
        """The number of loads from and stores to local memory."""
        return count(self.instructions, "LDL") + count(self.instructions, "STL")


def count(instructions: Counter[str], opcode: str, *modifiers: str) -> int:
    """How often ``opcode`` occurs with every one of ``modifiers``, in SASS or in PTX.

    ``count(i, "LDS", "128")`` counts ``LDS.128`` and ``LDS.U.128``, not ``LDS.64`` or ``LDSM.16.M88.4``.
    """
    wanted = set(modifiers)
    parts = ((name.split("."), n) for name, n in instructions.items())
    return sum(n for (head, *rest), n in parts if head == opcode and wanted.issubset(rest))


def sass(cubin: bytes) -> str:
    """nvdisasm's listing of every section of ``cubin``; raises DisassemblerError."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([_nvdisasm(), file.name], capture_output=True, text=True)
    if result.returncode != 0:
        raise DisassemblerError(f"nvdisasm rejected a cubin of {len(cubin)} bytes: {result.stderr.strip()}")
    return result.stdout


def summarize(cubin: bytes) -> list[KernelSummary]:
    """The kernels of ``cubin`` in the order of its sections; raises DisassemblerError."""
    sections = _sections(sass(cubin))
    names = [section.removeprefix(".text.") for section in sections if section.startswith(".text.")]
    return [_summarize_kernel(name, sections) for name in names]


def ptx_instructions(ptx: str) -> Counter[str]:
    """PTX opcodes with their modifiers, such as ``"cp.async.commit_group"``, and how often each occurs."""
    return Counter(_PTX_INSTRUCTION.findall(ptx))


@cache
def _nvdisasm() -> Path:
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return Path(str(file.locate()))
    raise DisassemblerError(
        "reading a cubin needs nvdisasm; install it with `pip install nvidia-cuda-nvdisasm`"
    )


def _sections(listing: str) -> dict[str, str]:
    _, *parts = _SECTION.split(listing)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _summarize_kernel(name: str, sections: dict[str, str]) -> KernelSummary:
    # Some attributes stand in one section for all kernels and name theirs, others in the kernel's own.
    shared_by_all = sections[".nv.info"].split("//----- nvinfo : ")
    attributes = dict(_attributes([block for block in shared_by_all if f"index@({name})" in block]))
    attributes |= _attributes(sections[f".nv.info.{name}"].split("//----- nvinfo : "))
    static_shared = re.findall(r"\.zero\s+(\d+)", sections.get(f".nv.shared.{name}", ""))
    return KernelSummary(
        name=name,
        instructions=Counter(_SASS_INSTRUCTION.findall(sections[f".text.{name}"])),
        registers=attributes["EIATTR_REGCOUNT"][0],
        threads=prod(attributes["EIATTR_REQNTID"]),
        static_shared=sum(map(int, static_shared)),
        stack=attributes["EIATTR_MIN_STACK_SIZE"][0],
    )


def _attributes(blocks: list[str]) -> Iterator[tuple[str, list[int]]]:
    """(name, 32-bit values) of each attribute; a block is its name, then its bytes as directives."""
    for block in blocks:
        values = [int(word, 16) for word in re.findall(r"\.word\s+0x([0-9a-f]+)", block)]
        yield block.split(maxsplit=1)[0], values
