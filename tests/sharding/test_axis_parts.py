"""Parts of an axis: their names, the meshes whose axes they are, specs and DTensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar.errors import MeshError, SpecError
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.sharding.cost.collectives import KINDS, along
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.mesh import Mesh, full_name, overlapping, split_name
from fxpar.sharding.reshard.route import steps
from fxpar.sharding.spec import Spec

WHOLE, PARTS = Mesh.parse("dp=2,tp=8"), Mesh.parse("dp=2,tp=2*4")


def test_names() -> None:
    assert split_name("tp:(2)4") == ("tp", 2, 4)
    assert split_name("tp") is None
    assert full_name("tp:2") == "tp:(1)2"
    assert full_name("tp") == "tp"
    assert overlapping(["tp:(1)2", "dp", "tp:(2)2"]) is None
    assert overlapping(["tp:(1)2", "tp:(1)4"]) == ("tp:(1)2", "tp:(1)4")
    assert overlapping(["tp", "tp:(2)2"]) == ("tp", "tp:(2)2")
    assert overlapping(["dp", "dp"]) == ("dp", "dp")


def test_a_refined_mesh_is_of_the_same_ranks() -> None:
    assert PARTS.axes == (("dp", 2), ("tp:(1)2", 2), ("tp:(2)4", 4))
    assert str(PARTS) == "dp=2,tp=2*4"
    assert PARTS.unrefined == WHOLE and WHOLE.unrefined is WHOLE
    assert WHOLE.refined(["tp:2"]) == PARTS == PARTS.refined(["tp", "dp"])
    assert WHOLE.refined(["tp", "dp", "tp:(1)8"]) is WHOLE
    assert str(WHOLE.refined(["tp:(2)2"])) == "dp=2,tp=2*2*2"
    for axes in (["tp"], ["tp:(1)2"], ["tp:(2)4", "dp"], ["tp:(4)2"], ["dp", "tp"]):
        assert list(PARTS.groups(axes)) == list(WHOLE.groups(axes))
        assert PARTS.ordered(axes) == WHOLE.ordered(axes)
        for rank in range(16):
            assert PARTS.index(rank, axes) == WHOLE.index(rank, axes)


def test_parts_are_joined_and_parted() -> None:
    fine = Mesh.parse("dp=2,tp=2*2*2")
    assert fine.parts(["tp"]) == ("tp:(1)2", "tp:(2)2", "tp:(4)2")
    assert fine.parts(["dp", "tp:(2)4"]) == ("dp", "tp:(2)2", "tp:(4)2")
    assert fine.joined(fine.parts(["dp", "tp:(2)4"])) == ("dp", "tp:(2)4")
    assert fine.joined(fine.parts(["tp"])) == ("tp",)
    assert fine.joined(["tp:(2)2", "tp:(1)2"]) == ("tp:(2)2", "tp:(1)2")
    assert fine.sub_axis("tp:(2)2", 1, 2) == "tp:(2)2"
    assert PARTS.sub_axis("tp:(2)4", 2, 2) == "tp:(4)2"
    with pytest.raises(MeshError, match=r"has no axis for part 'tp:\(1\)4'"):
        PARTS.parts(["tp:(1)4"])


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("tp=4", ["tp:(1)3"], "axis 'tp' of 4 ranks has no part 'tp:(1)3'"),
        ("tp=4", ["sp:2"], "has no axis 'sp:2'"),
        ("tp=12", ["tp:(1)2", "tp:(1)3"], "do not nest"),
        ("tp=4{1,1,1,0.5}", ["tp:2"], "devices of different speeds"),
    ],
)
def test_impossible_parts_are_refused(text: str, names: list[str], words: str) -> None:
    with pytest.raises(MeshError) as error:
        Mesh.parse(text).refined(names)
    assert words in str(error.value) and error.value.fix


@pytest.mark.parametrize(
    "axes",
    [
        (("tp:(2)2", 2),),
        (("tp:(1)2", 2), ("dp", 2), ("tp:(2)2", 2)),
        (("tp:(1)2", 3),),
        (("tp:x", 2),),
    ],
)
def test_a_mesh_has_the_parts_of_an_axis_in_order(
    axes: tuple[tuple[str, int], ...],
) -> None:
    with pytest.raises(MeshError, match="is no part that follows"):
        Mesh(axes)


def test_speeds_of_parts_are_refused() -> None:
    with pytest.raises(MeshError, match="devices of different speeds"):
        Mesh.parse("tp=2*2{1,1,1,0.5}")


def test_a_collective_over_parts_costs_what_it_costs_over_the_axis() -> None:
    hardware = lookup("h100")
    whole, parts = (hardware.on(Mesh.parse(t)) for t in ("dp=8,tp=8", "dp=2*4,tp=4*2"))
    assert parts.unrefined == whole and whole.refined(["dp:2", "tp:4"]) == parts
    for kind in KINDS:
        for axes in (("tp",), ("dp",), ("dp", "tp")):
            curve = along(kind, whole, axes)
            assert (
                along(kind, parts, parts.parts(axes))
                == curve
                == along(kind, parts, axes)
            )
        for part in ("dp:(1)2", "dp:(2)4", "tp:(4)2"):
            assert along(kind, parts, (part,)) == along(kind, whole, (part,))


def test_text_of_specs() -> None:
    spec = Spec("tp:2", "dp", partial={"tp:(2)2": "sum", "tp:(4)2": "max"})
    text = "[tp:(1)2, dp] partial(sum: tp:(2)2, max: tp:(4)2)"
    assert str(spec) == text and Spec.parse(text) == spec
    assert Spec.parse("f32[8@tp:2+dp, 4]") == Spec(("tp:(1)2", "dp"), None)
    assert eval(repr(spec)) == spec
    for wrong in ("[tp:]", "[tp:(0)2]", "[tp:(2)]", "[:2]"):
        with pytest.raises(SpecError):
            Spec.parse(wrong)


def test_overlapping_parts_are_refused() -> None:
    for dims in (("tp", "tp:2"), ("tp:(1)4", "tp:(2)2"), ("tp:2", "tp:(1)2")):
        with pytest.raises(SpecError, match="overlap|used twice"):
            Spec(*dims)
    with pytest.raises(SpecError, match="overlap"):
        Spec("tp:(2)2", partial={"tp": "sum"})


def test_specs_on_a_refined_mesh() -> None:
    spec = Spec("tp", ("dp", "tp:(2)4")[:1], partial=())
    fine = spec.refined(PARTS)
    assert fine == Spec(("tp:(1)2", "tp:(2)4"), "dp")
    assert fine.joined(PARTS) == spec and spec.refined(WHOLE) is spec
    for rank in range(16):
        assert fine.slices(PARTS, (16, 4), rank) == spec.slices(WHOLE, (16, 4), rank)
    sums = Spec("dp", partial={"tp": "sum"})
    assert sums.refined(PARTS).joined(PARTS) == sums
    mixed = Spec("dp", partial={"tp:(1)2": "sum", "tp:(2)4": "max"})
    assert mixed.joined(PARTS) == mixed


def test_a_part_is_gathered_over_what_is_beyond_it() -> None:
    """From and to a part only the rest of the axis communicates."""
    shape, part = (16, 64), Spec("tp:(1)2", None)
    whole = Spec("tp", None).refined(PARTS)
    (step,) = steps(whole, part, PARTS, shape)
    assert (step.kind, step.axes) == ("all_gather", ("tp:(2)4",))
    (back,) = steps(part, whole, PARTS, shape)
    assert (back.kind, back.axes) == ("slice", ("tp:(2)4",))


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def test_dtensors_of_parts(ranks: None) -> None:
    """A DeviceMesh that is split has the parts; DTensor's shards are ours."""
    mesh = Mesh.parse("dp=2,tp=4").refined(["tp:2"])
    spec = Spec("tp:2", ("dp",))
    assert spec.to_placements(mesh) == (Shard(1), Shard(0), Replicate())
    assert Spec.from_placements(spec.to_placements(mesh), mesh, 2) == spec
    assert Spec("tp").to_placements(mesh) == (Replicate(), Shard(0), Shard(0))
    sizes = tuple(size for _, size in mesh.axes)
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=mesh.names)
    assert Mesh.from_device_mesh(device_mesh) == mesh
    x = torch.arange(64.0).reshape(8, 8)
    given = distribute_tensor(
        x, device_mesh, spec.to_placements(mesh), src_data_rank=None
    )
    torch.testing.assert_close(given.to_local(), scatter(x, spec, mesh)[0])
    with pytest.raises(MeshError, match="has no axis for part"):
        spec.to_placements(mesh.unrefined)
