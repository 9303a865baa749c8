"""Copies of graphs and fake tensors made in less time: as torch makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar._torch import traced_values
from fxpar._torch.dynamo import copy_graph
from fxpar._torch.fake import new_fake
from fxpar._torch.objects import calls_where, memory_of
from fxpar._torch.traced_values import fake_on


def program(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = F.gelu(x @ w).view(4, 2, 6).transpose(0, 1)
    return torch.softmax(y, -1), torch.cat([y, y], dim=1), y[:, 1:]


def traced() -> torch.fx.GraphModule:
    with FakeTensorMode():
        fakes = [torch.empty(8, 4), torch.empty(4, 6)]
    return make_fx(program)(*fakes)


def test_a_copy_that_is_changed_runs_as_changed() -> None:
    gm = traced()
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    first, *_ = gm(x, w)
    copied = copy_graph(gm)
    output = copied.graph.output_node()
    output.args = (output.args[0][:1],)
    copied.recompile()
    torch.testing.assert_close(copied(x, w), [first])


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fake_tensors_are_as_torch_makes_them(device: str) -> None:
    where, meta = torch.device(device), torch.empty(2, 3, device="meta").t()
    known, strict = FakeTensorMode(), FakeTensorMode()
    strict._allow_unsafe_data_ptr_access = False
    new_fake(known, meta, where)
    for mode in (known, strict):
        want = FakeTensor(mode, meta, where)
        fake = new_fake(mode, meta, where)
        assert type(fake) is FakeTensor and vars(fake) == vars(want)
        assert fake.device == where and fake.stride() == (1, 3)
        assert torch._C._dispatch_keys(fake) == torch._C._dispatch_keys(want)
        assert memory_of(fake) == memory_of(meta)
        for x in (fake, want) if mode is strict else ():
            with pytest.raises(RuntimeError, match="data pointer"):
                x.data_ptr()
        assert type(fake + 1) is FakeTensor


@pytest.mark.parametrize("way", ["plain", "behind", "in larger"])
def test_memory_of_copies_is_as_large(way: str) -> None:
    """And what shares it does so in copies."""
    with FakeTensorMode():
        x = torch.empty(4, 6)
        x = {"behind": x[1:], "in larger": x[:2]}.get(way, x)
        x = fake_on(x.untyped_storage(), x)
    memories = traced_values.Memories({})
    copies = [memories.like(x), memories.like(fake_on(x.untyped_storage(), x))]
    assert memory_of(copies[0]) == memory_of(copies[1]) != memory_of(x)
    for copy in copies:
        assert copy.fake_mode is x.fake_mode and copy.device == x.device
        assert (copy.shape, copy.stride()) == (x.shape, x.stride())
        assert copy.storage_offset() == x.storage_offset()
        assert copy.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_users_metadata_is_renamed_by_its_text() -> None:
    class Told:
        def __init__(self, text: str) -> None:
            self.text = text

        def __repr__(self) -> str:
            return self.text

    def node(*values: Any) -> list[torch.fx.Node]:
        graph = torch.fx.Graph()
        nodes = [graph.placeholder("x") for _ in values]
        for each, value in zip(nodes, values, strict=True):
            each.meta["custom"] = value
        return nodes

    a, b = Told("a"), Told("b")
    texts = traced_values.users_texts(node(a, a, b))
    for name in ("c", "d"):
        other = Told(name)
        mine = node(other, other, b)
        renamed = traced_values.users_metadata(texts, mine)
        assert renamed is not None and renamed["custom"] == {"a": other, "b": b}
    unlike = node(Told("c"), Told("d"), b)
    assert traced_values.users_metadata(texts, unlike) is None
    alike = node(Told("c"), Told("c"), b)
    assert traced_values.users_metadata(texts, alike) is not None


def test_calls_of_a_kind_are_in_order() -> None:
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("relu")
    nodes = [
        graph.call_function(target, (x,))
        for target in (aten.sin.default, aten.cos.default, aten.sin.default)
    ]
    nodes[0].prepend(nodes[2])
    graph.erase_node(nodes[1])
    graph.output((nodes[0], nodes[2]))
    assert calls_where(graph, lambda target: True) == [nodes[2], nodes[0]]
    nodes[0].target = aten.exp.default
    assert calls_where(graph, lambda target: target is aten.exp.default) == [nodes[0]]
