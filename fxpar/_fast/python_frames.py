"""Keeps frames of Python in one block while a program is traced, planned and compiled.

In: a function. Out: the same function with a block of frames of its own. Never: changes
its results. CPython (from 3.11 on) keeps the frames of running functions in blocks of
16 KB. A call that does not fit in the last one asks the system for another, which goes
back when the call returns: 7 us instead of 0.03. Whether a loop that calls something is
just at that edge is chance, and decides over seconds of a first step: a search took 2.9
or 4.6 s.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fxpar._fast.switch import is_on

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Words that a frame claims to need. Its block has twice as many; the rest is for a
# thousand nested calls. Memory is taken only as it is written to.
WORDS = 1 << 17


def in_one_block(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with a block of frames for itself and all that it calls."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_stacksize=WORDS) if is_on() else call.__code__
    roomy = types.FunctionType(code, globals(), fn.__name__, None, call.__closure__)
    return functools.wraps(fn)(roomy)
