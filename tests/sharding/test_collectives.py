"""Predicted times: limits, published formulas and measurements, groups over levels."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from fxpar.sharding import mesh as meshes
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.collectives import KINDS, along, bound, message
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.mesh import Mesh
from tests.helpers.machines import collective_seconds as seconds

Link = functools.partial(meshes.Link, overhead=0.0)

SLOW, FAST = Link(1e10, 2e-5), Link(4e11, 1e-6)

MESHES = [
    lookup("h100").on(Mesh.parse("dp=4,tp=8")),
    lookup("h100").on(Mesh.parse("dp=32")),
    lookup("v100").on(Mesh.parse("a=2,b=8,c=4")),
    lookup("k80").on(Mesh.parse("dp=8,tp=4")),
    lookup("cpu").on(Mesh.parse("dp=2,tp=2")),
    Mesh((("x", 4), ("y", 2)), (SLOW, FAST)),
]


def axes_of(mesh: Mesh) -> list[tuple[str, ...]]:
    some = range(1, len(mesh.names) + 1)
    return [axes for n in some for axes in itertools.combinations(mesh.names, n)]


CASES = [
    (kind, mesh, axes) for mesh in MESHES for kind in KINDS for axes in axes_of(mesh)
]


@pytest.mark.parametrize(("kind", "mesh", "axes"), CASES)
def test_time_grows_with_bytes_from_latency_to_bandwidth(kind, mesh, axes) -> None:
    curve = along(kind, mesh, axes)
    nbytes = np.concatenate([[0.0], np.logspace(0, 12, 60)])
    times = curve.seconds(nbytes)
    assert times.shape == nbytes.shape and (np.diff(times) > 0).all()
    assert times[1] == pytest.approx(times[0], rel=1e-2)  # a byte costs latency
    assert times[-1] * 2 == pytest.approx(curve.seconds(2e12), rel=1e-2)
    assert [curve.seconds(float(n)) for n in nbytes] == pytest.approx(list(times))


@pytest.mark.parametrize(("kind", "mesh", "axes"), CASES)
def test_the_bound_is_one(kind, mesh, axes) -> None:
    least, fastest = bound(mesh)
    for nbytes in (1.0, 1e6, 1e12):
        taken = along(kind, mesh, axes).seconds(nbytes)
        assert taken >= least
        if kind == "all_gather":
            assert taken >= (mesh.count(axes) - 1) * nbytes / fastest


@pytest.mark.parametrize("n", [2, 4, 7, 64])
def test_one_level_is_the_textbook(n: int) -> None:
    link, size = Link(1e10, 1e-5), 1e9
    expected = {
        "all_reduce": (2 * (n - 1), 2 * (n - 1) / n),
        "all_gather": (n - 1, n - 1),
        "reduce_scatter": (n - 1, (n - 1) / n),
        "all_to_all": (n - 1, (n - 1) / n),
        "permute": (1, 1),
    }
    for kind, (hops, sent) in expected.items():
        assert seconds(kind, [n], [link], 0.0) == pytest.approx(hops * 1e-5)
        assert seconds(kind, [n], [link], size) == pytest.approx(
            hops * 1e-5 + sent * size / 1e10
        )


def test_the_overhead_counts_once() -> None:
    links = [Link(1e10, 0.0, overhead=3.0), Link(1e11, 0.0, overhead=2.0)]
    for kind in KINDS:
        assert seconds(kind, [4, 4], links, 0.0) == 3.0


def test_a_tree_is_for_small_all_reduces_over_many() -> None:
    link = Link(1e10, 1e-5, tree=True)
    mesh = Mesh((("dp", 1024),), (link,))
    curve = along("all_reduce", mesh, ("dp",))
    ring, tree = curve.lines
    assert curve.line(1e3) == tree and curve.line(1e12) == ring
    assert curve.seconds(0.0) == pytest.approx(2 * 10 * 1e-5)
    assert curve.seconds(1e12) == pytest.approx(2 * 1023 * 1e-5 + 2 * 1023 / 1024 * 100)
    assert seconds("all_gather", [1024], [link], 0.0) == pytest.approx(1023e-5)


def test_a_group_of_one_costs_nothing() -> None:
    for kind in KINDS:
        assert seconds(kind, [1, 1], [SLOW, SLOW], 1e9) == 0.0
        assert seconds(kind, [1, 4], [SLOW, FAST], 1e9) == seconds(
            kind, [4], [FAST], 1e9
        )


def test_how_axes_are_cut_does_not_matter_to_the_whole_group() -> None:
    """16 ranks are 16 ranks, in two nodes of 8, whatever the mesh calls them."""
    shapes = ("dp=16", "dp=2,tp=8", "dp=4,tp=4", "dp=8,tp=2", "a=2,b=2,c=4")
    for name, kind in itertools.product(("h100", "v100-dgx1"), KINDS):
        meshes = [lookup(name).on(Mesh.parse(text)) for text in shapes]
        curves = {along(kind, mesh, mesh.names) for mesh in meshes}
        assert len(curves) == 1


def test_a_ring_takes_all_the_links_between_nodes_an_all_to_all_one() -> None:
    mesh = lookup("h100").on(Mesh.parse("dp=2,tp=8"))
    large = 1e12
    ring = along("all_reduce", mesh, ("dp", "tp")).seconds(large)
    assert ring == pytest.approx(2 * 15 / 16 * large / (18 * 20.6e9), rel=1e-3)
    # Half of everything leaves the node, over one adapter for each device.
    exchange = along("all_to_all", mesh, ("dp", "tp")).seconds(large)
    assert exchange == pytest.approx(large / 2 / 50e9, rel=1e-3)
    # A shared network: 8 rings across, of an eighth of the node's bandwidth each.
    shared = lookup("v100-dgx1").on(Mesh.parse("dp=2,tp=8"))
    across = along("reduce_scatter", shared, ("dp",)).seconds(large)
    assert across == pytest.approx(large / 2 / (50e9 / 8), rel=1e-3)


def test_a_ring_passes_each_link_as_often_as_there_are_units() -> None:
    mesh = Mesh((("node", 3), ("device", 4)), (Link(1e9, 1e-3), Link(1e9, 1e-6)))
    taken = along("all_gather", mesh, mesh.names).seconds(0.0)
    assert taken == pytest.approx(2 * 1e-3 + 3 * 3 * 1e-6)
    exchange = along("all_to_all", mesh, mesh.names).seconds(0.0)
    assert exchange == pytest.approx(8 * 1e-3 + 3 * 1e-6)


def test_flat_is_as_good_as_by_hand_where_every_device_has_an_adapter() -> None:
    """Reduce inside, between, and gather inside: no gain at 64 MB on two H100 nodes."""
    mesh, nbytes = lookup("h100").on(Mesh.parse("dp=2,tp=8")), 64e6
    flat = along("all_reduce", mesh, ("dp", "tp")).seconds(nbytes)
    by_hand = (
        along("reduce_scatter", mesh, ("tp",)).seconds(nbytes)
        + along("all_reduce", mesh, ("dp",)).seconds(nbytes / 8)
        + along("all_gather", mesh, ("tp",)).seconds(nbytes / 8)
    )
    assert flat < by_hand < 2 * flat


@pytest.mark.parametrize(
    ("nbytes", "measured"),
    [(0.5e6, 24e-6), (8e6, 76e-6), (32e6, 195e-6), (64e6, 316e-6)],
)
def test_all_reduces_measured_on_8_h100(nbytes: float, measured: float) -> None:
    """NCCL's times in vLLM's pull request 42324."""
    mesh = lookup("h100").on(Mesh.parse("tp=8"))
    taken = along("all_reduce", mesh, ("tp",)).seconds(nbytes)
    assert taken == pytest.approx(measured, rel=0.25)


def test_all_reduces_measured_on_256_v100() -> None:
    """CoCoNeT, 16 DGX-2: 80.8 GB/s of 2 (N-1)/N bytes."""
    mesh = lookup("v100-dgx2").on(Mesh.parse("node=16,device=16"))
    taken = along("all_reduce", mesh, mesh.names).seconds(2.0**30)
    assert 2 * 255 / 256 * 2**30 / taken == pytest.approx(80.8e9, rel=0.05)


def test_sub_axes_have_the_links_of_their_part() -> None:
    mesh = lookup("h100").on(Mesh.parse("dp=32"))
    inside, outside = mesh.sub_axis("dp", 4, 8), mesh.sub_axis("dp", 1, 4)
    nodes = lookup("h100").on(Mesh.parse("node=4,device=8"))
    for kind in KINDS:
        assert along(kind, mesh, (inside,)) == along(kind, nodes, ("device",))
        assert along(kind, mesh, (outside,)) == along(kind, nodes, ("node",))
        assert along(kind, mesh, (outside, inside)) == along(kind, mesh, ("dp",))
        # Of 16 K80 in pairs and nodes of two pairs, the pairs, then the nodes.
        row, grid = Mesh.parse("x=16"), Mesh.parse("node=4,pair=2,one=2")
        row, grid = (lookup("k80").on(m) for m in (row, grid))
        for above, name in ((1, "node"), (4, "pair"), (8, "one")):
            part = row.sub_axis("x", above, grid.sizes[name])
            assert along(kind, row, (part,)) == along(kind, grid, (name,))
        # Six of twelve ranks, in nodes of four: the cost of leaving the node.
        twelve = Mesh((("x", 12),), (Link(1e9, inside=4, inner=Link(1e11)),))
        part = twelve.sub_axis("x", 2, 6)
        assert along(kind, twelve, (part,)).seconds(1e9) > 0.1


def test_kinds_may_have_links_of_their_own() -> None:
    own = (("all_to_all", Link(5e9, 1e-3)),)
    mesh = Mesh((("x", 4),), (Link(1e10, 1e-5, kinds=own),))
    plain = Mesh((("x", 4),), (Link(1e10, 1e-5),))
    for kind in KINDS:
        same = along(kind, mesh, ("x",)) == along(kind, plain, ("x",))
        assert same is (kind != "all_to_all")
    assert along("all_to_all", mesh, ("x",)).seconds(0.0) == pytest.approx(3e-3)
    assert bound(mesh) == (1e-5, 1e10)


def test_messages_are_permutes() -> None:
    slow = Link(1e8, 1e-3, overhead=1e-3)
    assert message(Link(1e10, 1e-5), 1e6) == pytest.approx(1e-4 + 1e-5)
    own = Link(1e10, 1e-5, kinds=(("permute", slow),))
    assert message(own, 1e6) == pytest.approx(1e-2 + 2e-3)
    other = Link(1e10, 1e-5, kinds=(("all_gather", slow),))
    assert message(other, 1e6) == pytest.approx(1e-4 + 1e-5)


def test_unlike_meshes_are_not_confused() -> None:
    """Hashes of meshes and links leave most out."""
    slow, fast = Mesh((("x", 4),), (SLOW,)), Mesh((("x", 4),), (FAST,))
    late = Mesh((("x", 4),), (Link(SLOW.bandwidth, SLOW.latency, overhead=1.0),))
    assert hash(slow) == hash(fast) == hash(late)
    taken = [along("permute", mesh, ("x",)).seconds(1e6) for mesh in (slow, fast, late)]
    assert len(set(taken)) == 3 and taken[2] == pytest.approx(taken[0] + 1)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError, match="broadcast"):
        seconds("broadcast", [2], [SLOW], 1.0)


def test_steps_of_reshards_are_of_these_kinds_and_send_as_much() -> None:
    from fxpar.sharding.reshard import steps

    sent = {kind: row.sent for kind, row in steps.KINDS.items() if row.sent}
    assert sent.keys() == set(collectives.KINDS)
    for kind, send in sent.items():
        for n in (2, 8):
            taken = seconds(kind, [n], [Link(1.0, 0.0)], 1.0)
            assert math.isclose(taken, send(n, 1.0)), kind
