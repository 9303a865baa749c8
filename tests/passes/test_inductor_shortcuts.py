"""Shortcuts of Inductor's codegen: the same code as without."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar._fast import known_values, switch
from fxpar._torch import inductor
from tests.helpers.patched import needs_patches

pytestmark = needs_patches


def program(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Views, products, a reduction, and indices with divisions."""
    y = F.gelu(x @ w).view(4, 2, 6).transpose(0, 1)
    parts = y.repeat_interleave(2, 0).reshape(-1, 6)
    return torch.softmax(parts, -1), parts.sum(0), y[:, 1:]


def traced() -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    with FakeTensorMode():
        fakes = [torch.empty(8, 4), torch.empty(4, 6)]
    table = inductor.decompositions()
    return make_fx(program, decomposition_table=table)(*fakes), fakes


class Generated(Exception):
    """The code is there, and need not be compiled."""


def code(*, shortcuts: bool) -> str:
    """What Inductor makes of the program."""
    texts: list[str] = []

    def save(text: str) -> None:
        texts.append(text)
        raise Generated

    gm, fakes = traced()
    with (
        mock.patch.object(switch, "is_on", lambda: shortcuts),
        mock.patch.object(GraphLowering, "save_output_code", save),
        torch._inductor.config.patch(fx_graph_cache=False, force_disable_caches=True),
        pytest.raises(Exception, match="Generated"),
    ):
        inductor.compile_inner(gm, fakes)
    (text,) = texts
    return text


def test_the_code_is_the_same() -> None:
    assert code(shortcuts=True) == code(shortcuts=False)


def test_values_by_python_are_known_apart() -> None:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 6)
    args = mode, torch.ops.aten.mul.Tensor, (x, x), {}
    known_values.result(*args)
    with enable_python_dispatcher(), mock.patch.dict(known_values._KNOWN):
        known_values.result(*args)
        keys = [key for key in known_values._KNOWN if key[0] is args[1]]
        assert {key[6] for key in keys} == {False, True}
