from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar.errors import SpecError
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.sharding import shard_sizes
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec
from tests.helpers.every_spec import every_spec

MESH = Mesh.parse("a=2,b=3,c=2")


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_text_round_trip(ndim: int) -> None:
    for spec in every_spec(MESH, ndim, "sum"):
        assert Spec.parse(str(spec)) == spec
        assert Spec.parse(spec.format((12,) * ndim, "f32")) == spec
        assert Spec.of(spec.dims, spec.partial) == spec
        assert eval(repr(spec)) == spec


def test_text_form() -> None:
    spec = Spec("dp", None, ("tp", "sp"), partial={"pp": "max", "ep": "sum"})
    assert str(spec) == "[dp, _, tp+sp] partial(sum: ep, max: pp)"
    assert spec.format((8, 64, 128), "f32") == (
        "f32[8@dp, 64, 128@tp+sp] partial(sum: ep, max: pp)"
    )
    both = Spec(None, partial={"a": "sum", "b": "sum"})
    assert str(both) == "[_] partial(sum: a+b)"
    assert Spec.parse(str(both)) == both
    assert str(Spec()) == "[]"


@pytest.mark.parametrize(
    "text", ["", "dp", "[a-b]", "[x@a]", "[8@]", "[a] partial", "[a] partial(sum)"]
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Spec.parse(text)


def test_equal_specs_are_one_key() -> None:
    assert Spec("a", partial={"c": "sum", "b": "max"}) == Spec(
        ["a"], partial=[("b", "max"), ("c", "sum")]
    )
    assert hash(Spec("a", None)) == hash(Spec(("a",), ()))
    assert Spec(("a", "b")) != Spec(("b", "a"))


def test_impossible_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="'a' is used twice"):
        Spec("a", "a")
    with pytest.raises(SpecError, match="'a' is used twice"):
        Spec("a", partial={"a": "sum"})
    with pytest.raises(SpecError, match="unknown reduction 'mean'"):
        Spec(None, partial={"a": "mean"})


def test_check_names_what_does_not_fit() -> None:
    with pytest.raises(SpecError, match=r"axis 'z', which mesh a=2,b=3,c=2"):
        Spec("z").check(MESH, (8,))
    with pytest.raises(SpecError, match=r"has 1 dims, tensor \[8, 8\]"):
        Spec("a").check(MESH, (8, 8))


def test_shapes() -> None:
    spec = Spec(("a", "b"), None, "c")
    assert spec.is_even(MESH, (12, 5, 4))
    assert spec.local_shape(MESH, (12, 5, 4)) == (2, 5, 2)
    assert {spec.rank_shape(MESH, (12, 5, 4), r) for r in range(12)} == {(2, 5, 2)}


def test_an_uneven_dim_is_cut_axis_by_axis() -> None:
    """7 rows over 2 x 3: 4 and 3 rows, of which 2, 2, 0 and 1, 1, 1."""
    spec, rows = Spec(("a", "b")), []
    for rank in range(0, 12, 2):
        (cut,) = spec.slices(MESH, (7,), rank)
        rows.append((cut.start, cut.stop))
    assert rows == [(0, 2), (2, 4), (4, 4), (4, 5), (5, 6), (6, 7)]
    assert not spec.is_even(MESH, (7,))
    assert spec.local_shape(MESH, (7,)) == (2,)


def test_what_may_be_split() -> None:
    mesh = Mesh.parse("dp=2,tp=4")

    def may(rows: int, *axes: str) -> bool:
        return shard_sizes.can_split(rows, mesh, axes)

    assert may(8, "dp", "tp") and may(7, "dp") and may(6, "tp") and may(5, "tp")
    assert not may(1, "dp") and not may(3, "tp")  # no row for each rank
    assert not may(12, "dp", "tp")  # either axis alone divides it
    assert may(68, "dp", "tp")  # many rows for each rank
    assert shard_sizes.idle(6, mesh, ("tp",)) == 0.25
    assert shard_sizes.idle(8, mesh, ("tp",)) == 0


@pytest.fixture
def ranks() -> Iterator[Iterator[tuple[int, object]]]:
    """(rank, DeviceMesh) for each rank of MESH, one after the other."""

    def each() -> Iterator[tuple[int, object]]:
        for rank in range(MESH.size):
            store = FakeStore()
            dist.init_process_group("fake", rank=rank, world_size=12, store=store)
            yield rank, init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=MESH.names)
            dist.destroy_process_group()

    yield each()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_strided(placement: object) -> bool:
    return getattr(placement, "split_factor", 1) > 1


def test_placements_give_the_shards_dtensor_gives(ranks) -> None:
    specs = [spec for ndim in (1, 2) for spec in every_spec(MESH, ndim)]
    assert any(len(spec.dims[0]) == 3 for spec in specs)
    for rank, device_mesh in ranks:
        assert Mesh.from_device_mesh(device_mesh) == MESH
        for spec, size in itertools.product(specs, (12, 7, 3)):
            shape = (size,) * len(spec.dims)
            if any(map(is_strided, spec.to_placements(MESH))) and size != 12:
                continue
            x = torch.arange(size ** len(shape)).view(shape)
            placements = spec.to_placements(MESH)
            theirs = distribute_tensor(x, device_mesh, placements, src_data_rank=None)
            ours = scatter(x, spec, MESH)[rank]
            assert torch.equal(theirs.to_local(), ours), (spec, placements, rank)


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_placements_round_trip(ndim: int) -> None:
    for spec in every_spec(MESH, ndim, "max"):
        assert Spec.from_placements(spec.to_placements(MESH), MESH, ndim) == spec


def test_placements_without_an_axis_order_are_refused() -> None:
    from fxpar._torch.dtensor import Replicate, Shard, strided_shard

    placements = (strided_shard(0, 5), Shard(0), Replicate())
    with pytest.raises(SpecError, match="no axis order expresses"):
        Spec.from_placements(placements, MESH, 1)


def test_the_smallest_shard_is_that_of_any_rank() -> None:
    """Nested chunks: of 7 rows over 2 and 3 ranks they are 2, 2, 0, 1, 1, 1."""
    for text in ("a=2,b=3", "a=3,b=2", "a=4,b=3"):
        mesh = Mesh.parse(text)
        for rows in range(1, 40):
            held = [
                shard_sizes.shard(rows, mesh, ("a", "b"), rank)[1]
                for rank in range(mesh.size)
            ]
            assert shard_sizes.smallest(rows, mesh, ("a", "b")) == min(held)
            assert shard_sizes.largest(rows, mesh, ("a", "b")) == max(held)
