"""Process groups, meshes and devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fxpar import _torch
from fxpar.config import Options
from fxpar.errors import DeviceError, FxparError, MeshError
from fxpar.runtime.ranks import groups
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.spec import Spec
from tests.helpers.scripts import run_script
from tests.helpers.spawn import shared_pool

MESH = Mesh.parse("dp=2,tp=2")


def test_resolve_mesh() -> None:
    def resolve(mesh, size):
        return groups.resolve_mesh(Options(mesh=mesh), size)

    assert resolve(None, 4) == Mesh.parse("dp=4")
    assert resolve("dp=2,tp=2", 4) == MESH
    assert resolve(MESH, 4) is MESH
    device_mesh = SimpleNamespace(mesh_dim_names=("a", "b"), mesh=torch.arange(4))
    device_mesh.mesh = device_mesh.mesh.view(2, 2)
    assert resolve(device_mesh, 4) == Mesh.parse("a=2,b=2")
    with pytest.raises(
        MeshError, match="8 ranks, but 2 processes run\n.*-node 8.*dp=2"
    ):
        resolve("dp=2,tp=4", 2)
    with pytest.raises(MeshError, match="but 1 process runs"):
        resolve("tp=2", 1)


def test_launch_environment() -> None:
    whole = dict.fromkeys(groups.ENVIRONMENT, "1")
    assert groups.is_launched(whole)
    assert not groups.is_launched({})
    assert not groups.is_launched({"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(FxparError, match="WORLD_SIZE is 2, but RANK, .* not set"):
        groups.is_launched({"WORLD_SIZE": "2", "MASTER_ADDR": "here"})


def test_one_process_needs_no_group(monkeypatch) -> None:
    for name in groups.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert groups.ensure_process_group() == 1
    assert groups.join(Options()) == groups.Ranks(Mesh.parse("dp=1"), 0)
    assert not dist.is_initialized()


def test_shared_devices() -> None:
    groups.check_sharing(["a", "a", "b"], ["0", "1", "0"])
    with pytest.raises(DeviceError, match="ranks 1, 2 on host b use one") as caught:
        groups.check_sharing(["a", "b", "b"], ["0", "GPU-1", "GPU-1"])
    assert "--virtual-local-rank" in str(caught.value)


def groups_along_axes() -> dict[str, list]:
    ranks = groups.join(Options(mesh="dp=2,tp=2"))
    named = {}
    for axes in (["tp"], ["dp"], ["tp", "dp"], ["tp"]):
        name = ranks.group(axes)
        total = torch.ops._c10d_functional.all_reduce(
            torch.tensor([float(10**ranks.rank)]), "sum", name
        )
        total = torch.ops._c10d_functional.wait_tensor(total)
        named["+".join(axes)] = [name, total.item()]
    padded = groups.group_of(Mesh.parse("dp=2,one=1,tp=2"), ["one", "tp"])
    whole, parts = Mesh.parse("all=4"), Mesh.parse("all=2*2")
    parted = [
        groups.group_of(mesh, axes)
        for mesh, axes in (
            (whole, ["all:(2)2"]),
            (parts, ["all:(2)2"]),
            (parts, ["all:(1)2", "all:(2)2"]),
        )
    ]
    world = dist.group.WORLD.group_name
    part = torch.full((2, 3), float(ranks.rank))
    whole = ranks.dtensor(part, Spec("dp", "tp"))
    again = ranks.dtensor(part, Spec("dp", partial={"tp": "sum"}))
    same = whole.device_mesh is again.device_mesh
    shown = (list(whole.shape), whole.full_tensor()[::2, ::3].tolist())
    found = {"world": world, "padded": padded, "parted": parted}
    return {**named, **found, "dtensor": shown, "same": same}


@pytest.mark.multiprocess
def test_groups_along_axes() -> None:
    results = shared_pool(4).run(groups_along_axes)
    for rank, result in enumerate(results):
        for axes in (["tp"], ["dp"], ["tp", "dp"]):
            members = MESH.group(rank, axes)
            assert result["+".join(axes)][1] == sum(10**member for member in members)
        assert result["tp+dp"][0] == result["world"]
        assert result["dtensor"] == ([4, 6], [[0.0, 1.0], [2.0, 3.0]])
        assert result["same"]
        one, again, both = result["parted"]
        assert one == again and both == result["world"]
    names = [result["tp"][0] for result in results]
    assert len(set(names)) == 1  # each rank's own group, by one name


def sums_of_two_lives() -> list[float]:
    """A group name must not outlive the process group it was made in, nor a mesh what
    DTensor remembers of it."""
    store, rank, size = (
        _torch.distributed.default_store(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    out = []
    for life in range(2):
        ranks = groups.join(Options(mesh="dp=2,tp=2"))
        # Another number of groups in each life, so that equal names are other groups.
        name = [ranks.group(axes) for axes in (["tp"], ["dp"])[life:]][-1]
        double = ranks.dtensor(torch.tensor([10.0**rank]), Spec("dp")) * 2
        out.append(double.full_tensor().sum().item() / 2)
        x = torch.ops._c10d_functional.all_reduce(
            torch.tensor([10.0**rank]), "sum", name
        )
        out.append(torch.ops._c10d_functional.wait_tensor(x).item())
        dist.barrier()
        dist.destroy_process_group()
        store = dist.PrefixStore(f"life{life}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return out


@pytest.mark.multiprocess
def test_groups_end_with_their_process_group() -> None:
    pool = shared_pool(4)
    for rank, sums in enumerate(pool.run(sums_of_two_lives)):
        assert sums == [sum(10**m for m in MESH.group(rank, ["dp"]))] * 4
    pool.renew()


STARTED = """
import os, torch, torch.distributed as dist
from fxpar.config import Options
from fxpar.errors import MeshError
from fxpar.runtime.ranks import groups
try:
    groups.join(Options(mesh="dp=3"))
except MeshError as error:
    print(str(error).splitlines()[0], dist.is_initialized())
ranks = groups.join(Options())
import torch.distributed._functional_collectives as fc
x = fc.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
print(ranks.mesh, ranks.rank, (x + 0).tolist(), dist.get_backend(), flush=True)
"""


@pytest.mark.multiprocess
def test_a_group_is_started_from_torchrun() -> None:
    ended = run_script(STARTED, ranks=2, env={"CUDA_VISIBLE_DEVICES": ""}, fork=True)
    for rank, result in enumerate(ended):
        assert result.code == 0, result.output
        assert result.output.splitlines() == [
            "mesh dp=3 has 3 ranks, but 2 processes run False",
            f"dp=2 {rank} [2.0, 2.0, 2.0, 2.0] gloo",
        ]
