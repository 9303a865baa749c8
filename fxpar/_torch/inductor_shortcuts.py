"""Shortcuts of Inductor's codegen: what it computes anew of every op is known.

In: the parts of Inductor that look at each op of a graph. Out: the same numbers and the
same code from them, in less time. Never changes what Inductor decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from fxpar._torch import known_values


@contextlib.contextmanager
def shortcuts() -> Iterator[None]:
    """Context of Inductor's codegen in which both are taken."""
    with _plain_indices_stay(), _values_of_known_forms():
        yield


def _plain_indices_stay() -> contextlib.AbstractContextManager[Any]:
    """An index without divisions has nothing to be simplified by a range: what is read
    of it is the difference of two, which Inductor (2.13) simplifies by itself."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    name = "simplify_index_in_vec_range"
    home: Any = sizevars if hasattr(sizevars, name) else cpp  # torch 2.11
    simplify = getattr(home, name)

    def simplified(index: Any, var: Any, lanes: int) -> Any:
        if index.has(FloorDiv, ModularIndexing):
            return simplify(index, var, lanes)
        return index

    return mock.patch.object(home, name, simplified)


def _values_of_known_forms() -> contextlib.AbstractContextManager[Any]:
    """Fake values of a graph, which Inductor makes again before it lowers it."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    ask = FakeTensorProp.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            return known_values.result(self._mode, target, args, kwargs)
        return ask(self, target, args, kwargs)

    return mock.patch.object(FakeTensorProp, "call_function", call_function)
