from __future__ import annotations

from typing import Any

import pytest

from fxpar.errors import MeshError
from fxpar.sharding.mesh import Link, Mesh


def test_text_round_trip() -> None:
    mesh = Mesh.parse(" dp=2, tp=4")
    assert mesh == Mesh((("dp", 2), ("tp", 4)))
    assert str(mesh) == "dp=2,tp=4"
    assert Mesh.parse(str(mesh)) == mesh == Mesh.parse(mesh)
    assert (mesh.names, mesh.sizes, mesh.size) == (("dp", "tp"), {"dp": 2, "tp": 4}, 8)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dp", "'dp'"),
        ("dp=2,,tp=2", "''"),
        ("dp=x", "'dp=x'"),
        ("2=dp", "'2=dp'"),
        ("dp=2,dp=3", "'dp' appears twice"),
        ("dp=0", "'dp' has size 0"),
        ("", "''"),
        (None, "None"),
    ],
)
def test_malformed_text_is_named(text: Any, named: str) -> None:
    with pytest.raises(MeshError, match=named) as error:
        Mesh.parse(text)
    assert error.value.fix


def test_unknown_axis_is_named() -> None:
    with pytest.raises(MeshError, match="'pp'"):
        Mesh.parse("dp=2").axis_size("pp")


def test_links_are_per_axis() -> None:
    slow = Link(1e9, 1e-4)
    mesh = Mesh((("node", 2), ("gpu", 4)), (slow, Link()))
    assert mesh.link("node") is slow
    assert mesh.link("gpu:(2)2") == Link()
    assert mesh != Mesh.parse("node=2,gpu=4")
    with pytest.raises(MeshError, match="1 links for 2 axes"):
        Mesh((("a", 2), ("b", 2)), (slow,))


def test_ranks_are_row_major() -> None:
    mesh = Mesh.parse("a=2,b=3,c=2")
    for rank in range(mesh.size):
        position = {axis: mesh.index(rank, (axis,)) for axis in mesh.names}
        assert rank == (position["a"] * 3 + position["b"]) * 2 + position["c"]
        assert mesh.rank(position) == rank
        assert mesh.index(rank, ("c", "a")) == position["c"] * 2 + position["a"]
        assert mesh.index(rank, mesh.names) == rank
    assert mesh.index(5, ()) == 0


def test_groups_partition_the_ranks_in_mesh_order() -> None:
    mesh = Mesh.parse("a=2,b=3,c=2")
    assert list(mesh.groups(["b"])) == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert mesh.group(5, ["c", "a"]) == mesh.group(10, ["a", "c"]) == (4, 5, 10, 11)
    for axes in (["a"], ["c", "b"], ["a", "b", "c"], []):
        ranks = [rank for group in mesh.groups(axes) for rank in group]
        assert sorted(ranks) == list(range(12))


def test_sub_axes_are_parts_of_an_axis() -> None:
    mesh = Mesh.parse("y=2,x=12")
    major, middle, minor = "x:(1)2", "x:(2)3", "x:(6)2"
    assert [mesh.axis_size(axis) for axis in (major, middle, minor)] == [2, 3, 2]
    for rank in range(mesh.size):
        position = mesh.index(rank, ["x"])
        assert mesh.index(rank, [major]) == position // 6
        assert mesh.index(rank, [middle]) == position // 2 % 3
        assert mesh.index(rank, [minor]) == position % 2
        assert mesh.index(rank, [major, middle, minor]) == position
        assert mesh.index(rank, [minor, "y"]) == position % 2 * 2 + rank // 12
    assert mesh.ordered([minor, "y", major]) == ("y", major, minor)
    assert mesh.group(13, [minor, "y"]) == (0, 1, 12, 13)
    assert mesh.sub_axis("x", 1, 12) == "x"
    assert mesh.sub_axis("x", 2, 3) == middle


@pytest.mark.parametrize("axis", ["x:(2)5", "x:(0)2", "z:(1)2", "x:(8)2"])
def test_impossible_sub_axes_are_refused(axis: str) -> None:
    with pytest.raises(MeshError, match="has no (axis|part)"):
        Mesh.parse("x=12").axis_size(axis)
