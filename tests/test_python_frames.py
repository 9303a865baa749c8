"""Frames of functions that call one another, in one block of memory or in several."""

from __future__ import annotations

import ctypes
import sys

import pytest

from fxpar._fast.python_frames import in_one_block
from tests.helpers.patched import needs_patches

pytestmark = needs_patches

DEPTH = 400


def places(depth: int) -> list[int]:
    """Where the frames of so many calls inside one another lie."""
    # Behind two words of any object and the frame before: the address.
    here = id(sys._getframe()) + 3 * ctypes.sizeof(ctypes.c_void_p)
    place = ctypes.c_void_p.from_address(here).value or 0
    return [place, *(places(depth - 1) if depth else [])]


def steps(depth: int) -> set[int]:
    at = places(depth)
    return {b - a for a, b in zip(at, at[1:], strict=False)}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames lie elsewhere")
def test_frames_are_in_one_block() -> None:
    assert len(in_one_block(steps)(DEPTH)) == 1
    assert len(steps(DEPTH)) > 1  # by itself they are not


def test_what_goes_in_and_comes_out_is_the_functions() -> None:
    def fn(a: int, *more: int, b: int = 2) -> tuple[object, ...]:
        """Of a function."""
        if a < 0:
            raise ValueError(a)
        return a, more, b

    roomy = in_one_block(fn)
    assert roomy(1, 3, b=4) == (1, (3,), 4) and roomy(a=1) == (1, (), 2)
    assert (roomy.__name__, roomy.__doc__) == ("fn", "Of a function.")
    with pytest.raises(ValueError, match="-1"):
        roomy(-1)
