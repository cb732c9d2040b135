"""One `explain` for everything that can be explained in words."""

from typing import Any

import cutlass.cute as cute

from cutelab.layouts import checked, swizzle


def explain(what: Any, *args: Any, **options: Any) -> Any:
    """What a swizzle does to the bits of an offset, or how an operation on layouts finds its result.

    explain(cute.make_swizzle(3, 3, 3), element_bytes=2), explain("composition", a, b): the objects returned
    print as text; see `cutelab.layouts.swizzle.explain` and `cutelab.layouts.checked.explain`.
    """
    if isinstance(what, cute.Swizzle):
        return swizzle.explain(what, *args, **options)
    return checked.explain(what, *args, **options)
