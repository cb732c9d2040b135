"""A shared-memory tile to play with: sliders for the thread, the stage and the bits of the swizzle.

Without ipywidgets, or where a notebook is only read, it is the still picture of the sliders' first positions.
"""

from typing import Any

import cutlass.cute as cute

from cutelab.layouts.arrays import as_numpy
from cutelab.layouts.draw import granules
from cutelab.layouts.svg import Picture, PictureError
from cutelab.layouts.tiles import GRANULE_BYTES, log2
from cutelab.layouts.tv import tv_map

try:
    import ipywidgets
except ImportError:
    ipywidgets = None

LINE_GRANULES_LOG2 = 3  # a line of 128 bytes has 8 granules of 16


class Explorer:
    """What `explore` returns: `settings` are the sliders, `picture` what they show, `box` the widget."""

    def __init__(
        self,
        layout: cute.Layout | cute.ComposedLayout,
        tiled_copy: cute.TiledCopy | None,
        side: str,
        element_bits: int,
    ) -> None:
        swizzle = layout.inner if isinstance(layout, cute.ComposedLayout) else None
        if swizzle is None:
            base = log2(GRANULE_BYTES * 8 // element_bits)
            swizzle = cute.make_swizzle(0, base, LINE_GRANULES_LOG2)
        elif not isinstance(swizzle, cute.Swizzle):
            raise PictureError(f"only a swizzle's bits can be varied; the inner function here is {swizzle}")
        self.plain = layout.outer if isinstance(layout, cute.ComposedLayout) else layout
        self.offset = layout.offset if isinstance(layout, cute.ComposedLayout) else 0
        self.swizzle = swizzle
        self.copy = tiled_copy, side
        self.element_bits = element_bits
        threads = 1 if tiled_copy is None else len(tv_map(tiled_copy, side))
        stages = 1 if cute.rank(self.plain) < 3 else as_numpy(self.plain).shape[2]
        self.settings = {  # name: (first position, largest); the smallest is 0
            "thread": (0, threads - 1),
            "stage": (0, stages - 1),
            "bits": (swizzle.num_bits, abs(swizzle.num_shift)),
        }
        self.picture()  # refuses here what can't be drawn
        self.box = None if ipywidgets is None else self._widget()

    def picture(self, thread: int = 0, stage: int = 0, bits: int | None = None) -> Picture:
        """The tile with its offsets swizzled by `bits` bits, by default as many as in the layout."""
        bits = self.swizzle.num_bits if bits is None else bits
        swizzle = cute.make_swizzle(bits, self.swizzle.num_base, self.swizzle.num_shift)
        if swizzle.num_bits != bits:  # the DSL has made it the identity without a word
            raise PictureError(f"{bits} bits can't be swizzled by a shift of {self.swizzle.num_shift}")
        layout = cute.make_composed_layout(swizzle, self.offset, self.plain)
        return granules(layout, *self.copy, thread=thread, stage=stage, element_bits=self.element_bits)

    def _widget(self) -> Any:
        shown = ipywidgets.HTML(str(self.picture()))
        sliders = {
            name: ipywidgets.IntSlider(value=first, max=largest, description=name)
            for name, (first, largest) in self.settings.items()
            if largest > 0
        }

        def redraw(_: Any) -> None:
            shown.value = str(self.picture(**{name: slider.value for name, slider in sliders.items()}))

        for slider in sliders.values():
            slider.observe(redraw, names="value")
        return ipywidgets.VBox([*sliders.values(), shown])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget for a notebook that runs, and the still picture for one that is read."""
        still = self.picture()
        bundle = {"text/plain": still.title, "image/svg+xml": str(still)}
        return bundle if self.box is None else {**self.box._repr_mimebundle_(), **bundle}


def explore(
    layout: cute.Layout | cute.ComposedLayout,
    tiled_copy: cute.TiledCopy | None = None,
    side: str = "src",
    *,
    element_bits: int = 16,
) -> Explorer:
    """A tile (rows, columns[, stages]) coloured by bank, and what a thread of a copy touches there."""
    return Explorer(layout, tiled_copy, side, element_bits)
