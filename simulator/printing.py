"""vprintf, which the DSL's printf calls: a line is printed as it is executed, lane after lane.

The arguments lie in local memory, each at a multiple of its size (CUDA Programming Guide, "Formatted
Output"): integers have 4 bytes, or 8 with the lengths l, ll, z, j and t; floats are doubles; pointers have 8.
"""

import re
from typing import Any

import numpy as np

from cutelab.simulator.accesses import Accesses
from cutelab.simulator.errors import SimulationError

_SPECIFIER = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t)?([a-zA-Z%])")
_FLOATS = "eEfFgGaA"


class Printing(Accesses):
    def printf(self, text: int, values: int, result: int, s: Any) -> None:
        """text, values, result: where in local memory the two pointers lie, and the count that it returns."""
        texts, places = (
            self.load("local", self.everywhere(each, s), np.uint64, 1, s)[:, 0] for each in (text, values)
        )
        ids = self.ids(s)
        for lane in range(len(ids)):
            one = ids[lane : lane + 1]
            printed, count = self.formatted(self.string(int(texts[lane]), one), int(places[lane]), one)
            print(printed, end="")
            self.store("local", self.everywhere(result, one), np.array([[count]], np.uint32), one)

    def formatted(self, text: str, place: int, one: Any) -> tuple[str, int]:
        """The line that a thread prints, and how many arguments it has taken."""
        parts, end, count = [], 0, 0

        def argument(dtype: type[np.generic]) -> Any:
            nonlocal place, count
            size = np.dtype(dtype).itemsize
            place = -(-place // size) * size
            value = self.load("generic", np.array([place]), dtype, 1, one)[0, 0]
            place, count = place + size, count + 1
            return value

        for found in _SPECIFIER.finditer(text):
            flags, width, precision, length, letter = found.groups(default="")
            parts.append(text[end : found.start()])
            end = found.end()
            if letter == "%":
                parts.append("%")
                continue
            width, precision = (
                str(argument(np.int32)) if each == "*" else each for each in (width, precision)
            )
            form = f"%{flags}{width}" + (f".{precision}" if precision else "")
            if letter in _FLOATS:
                value: Any = float(argument(np.float64))
                letter = {"a": "e", "A": "E"}.get(letter, letter)
            elif letter == "s":
                value = self.string(int(argument(np.uint64)), one)
            elif letter == "p":
                value, form, letter = hex(int(argument(np.uint64))), f"%{flags}{width}", "s"
            elif letter in "diuxXoc":
                wide = length in ("l", "ll", "z", "j", "t")
                kind = "i" if letter in "dic" else "u"
                value = argument(np.dtype(f"{kind}{8 if wide else 4}").type)
                if length in ("h", "hh"):
                    value = value.astype(f"{kind}{len('hh') // len(length)}")
                value = chr(int(value) & 255) if letter == "c" else int(value)
                letter = letter.replace("u", "d")
            else:
                raise SimulationError(f"printf doesn't know {found.group()}")
            parts.append(f"{form}{letter}" % value)
        return "".join([*parts, text[end:]]), count

    def string(self, address: int, one: Any) -> str:
        """The text at a generic address, to its zero."""
        found = bytearray()
        while byte := int(self.load("generic", np.array([address + len(found)]), np.uint8, 1, one)[0, 0]):
            found.append(byte)
        return found.decode(errors="replace")
