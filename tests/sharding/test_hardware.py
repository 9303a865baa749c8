"""Figures, names, files, and which link serves which axis."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fxpar.errors import DeviceError, OptionError
from fxpar.sharding.cost import hardware_table
from fxpar.sharding.cost.collectives import along
from fxpar.sharding.cost.hardware_table import (
    BUILT_IN,
    Hardware,
    Level,
    Peak,
    ProductDims,
    lookup,
    of_kind,
)
from fxpar.sharding.mesh import Link, Mesh
from tests.helpers.machines import products_alone

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference" / "hardware.md"
# Measured on a GPU before contracted dims were told from others.
H100_FILE = ROOT / "benchmarks" / "results" / "hardware_h100.json"


def link(name: str, mesh: str, axis: str) -> Link:
    return lookup(name).on(Mesh.parse(mesh)).link(axis)


def test_a_rate_saturates_at_the_peak_and_is_halved_where_it_says() -> None:
    peak = Peak(1e12, 0.5, half_flops=1e9, half_dim=64)
    assert peak.rate(1e30, ProductDims(1e30, 1e30, 1e30)) == pytest.approx(5e11)
    assert peak.rate(1e9) == pytest.approx(2.5e11)
    for dims in (ProductDims(64), ProductDims(n=64), ProductDims(k=64)):
        assert peak.rate(1e30, dims) == pytest.approx(2.5e11)
    # Of the smallest alone, where the contracted dim is not told from the others.
    assert peak.rate(1e30, ProductDims(64, 64, 64)) == pytest.approx(2.5e11)
    rates = peak.rate(np.logspace(3, 15, 50), ProductDims(128.0, 128.0, 128.0))
    assert (np.diff(rates) > 0).all()


def test_a_small_contracted_dim_may_cost_less_than_a_small_outer_one() -> None:
    peak = Peak(1e12, half_dim=64, half_contracted=16)
    assert peak.rate(1e30, ProductDims(64)) == pytest.approx(5e11)
    assert peak.rate(1e30, ProductDims(n=64)) == pytest.approx(5e11)
    assert peak.rate(1e30, ProductDims(k=16)) == pytest.approx(5e11)
    # Each has its part: operands are as large, and the result.
    assert peak.rate(1e30, ProductDims(64, 64, 16)) == pytest.approx(2.5e11)
    free = dataclasses.replace(peak, half_contracted=0.0)
    assert free.rate(1e30, ProductDims(k=1)) == pytest.approx(1e12)


def test_a_kernel_is_bound_by_launch_memory_or_arithmetic() -> None:
    h100 = lookup("h100")
    assert h100.kernel(1) < 1e-3 * h100.launch
    assert h100.kernel(1e12) == pytest.approx(1e12 / h100.bandwidth, rel=1e-3)
    # 8192^3 in bfloat16: 720 to 800 TFLOP/s on such a device, by its clock.
    flops, dims = 2.0 * 8192**3, ProductDims(8192, 8192, 8192)
    seconds = h100.kernel(3 * 2 * 8192**2, flops, dims, torch.bfloat16)
    assert flops / seconds == pytest.approx(770e12, rel=0.05)
    assert h100.kernel(1e12, flops, dims, "bfloat16") > 0.3


CALIBRATED = dataclasses.replace(
    lookup("cpu"),
    name="calibrated",
    peaks=tuple(
        (dtype, Peak(1e11, 1.0, 1e5, 20.0, 15.0)) for dtype, _ in lookup("cpu").peaks
    ),
)


@pytest.mark.parametrize(
    "machine", [*BUILT_IN, CALIBRATED], ids=lambda machine: machine.name
)
def test_a_contraction_that_grows_never_takes_less_time(machine: Hardware) -> None:
    """In each of m, n, k and with every dtype, on every machine that is known."""
    sizes = (1, 2, 7, 8, 16, 31, 32, 64, 100, 128, 512, 1000, 4096, 8192)
    for dtype, width in (("float64", 8), ("float32", 4), ("bfloat16", 2)):
        taken = {
            (m, n, k): machine.kernel(
                width * (m * k + k * n + m * n),
                2.0 * m * n * k,
                ProductDims(m, n, k),
                dtype,
            )
            for m, n, k in itertools.product(sizes, repeat=3)
        }
        for shape, seconds in taken.items():
            for d in range(3):
                at = sizes.index(shape[d]) + 1
                if at < len(sizes):
                    larger = (*shape[:d], sizes[at], *shape[d + 1 :])
                    assert taken[larger] >= seconds, (dtype, shape, larger)


def test_what_caches_hold_moves_faster() -> None:
    near = ((1e4, 1e11), (1e6, 4e10))
    some = dataclasses.replace(lookup("cpu"), bandwidth=1e10, near=near)
    assert some.streaming(10.0) == pytest.approx(10 / 1e11)
    assert some.streaming(1e4) == pytest.approx(1e4 / 1e11)
    assert some.streaming(1e5) == pytest.approx(1e5 / (4e21**0.5))
    assert some.streaming(1e6) == pytest.approx(1e6 / 4e10)
    assert some.streaming(2e6) == pytest.approx(2e6 / 2e10)
    assert some.streaming(1e9) == pytest.approx(1e9 / 1e10)
    times = [some.streaming(n) for n in np.logspace(0, 10, 200)]
    assert (np.diff(times) > 0).all() and some.streaming(0) == 0.0
    assert some.kernel(1e5) == some.streaming(1e5)
    assert some.at_speed(2.0).streaming(1e5) == pytest.approx(some.streaming(1e5) / 2)


def test_light_ops_may_take_longer_than_memory() -> None:
    cpu = dataclasses.replace(lookup("cpu"), light=())
    assert cpu.fused(1e6, {"exp": 1e9}) == cpu.launch + cpu.streaming(1e6)
    some = dataclasses.replace(cpu, light=(("step", 1e10), ("exp", 1e9)))
    counts = {"exp": 1e6, "step": 2e6, "draw": 1e6}
    assert some.fused(0, counts) == pytest.approx(cpu.launch + 1.2e-3)
    assert some.fused(1e9, counts) == pytest.approx(cpu.launch + some.streaming(1e9))
    twice = some.at_speed(2.0).fused(0, counts)
    assert twice == pytest.approx(cpu.launch + 0.6e-3)


@pytest.mark.parametrize(("ranks", "share"), [(1, 1.0), (2, 1.0), (4, 0.5), (8, 0.25)])
def test_ranks_share_the_cores_of_a_machine(ranks: int, share: float) -> None:
    """Each then launches, computes, moves and sends so much slower."""
    one, mesh = lookup("cpu:2"), Mesh((("tp", ranks),))
    some, dims = one.with_ranks(ranks), ProductDims(64.0, 64.0, 64.0)
    assert (some.ranks, some.cores, some.name) == (ranks, 2, "cpu:2")
    assert some.with_ranks(1).speed_of(ranks) == pytest.approx(share)
    assert some.speed_of(1) == pytest.approx(1 / share)
    for seconds in (
        lambda on: on.kernel(1e6),
        lambda on: on.kernel(1e4, 2.0 * 64**3, dims),
        lambda on: on.fused(1e6, {"exp": 1e6}),
        lambda on: along("all_reduce", on.on(mesh), ("tp",)).seconds(1e6),
        lambda on: along("all_gather", on.on(mesh), ("tp",)).seconds(1.0),
    ):
        assert seconds(some) == pytest.approx(seconds(one) / share)


def test_ranks_with_cores_or_devices_of_their_own_do_not_share() -> None:
    for name in ("cpu", "h100"):
        assert lookup(name).with_ranks(64) is lookup(name)
    for wrong in ("cpu:0", "cpu:", "cpu:two", "h100:2"):
        with pytest.raises(OptionError, match="unknown hardware"):
            lookup(wrong)


def test_families_of_ops_may_have_their_own_peak() -> None:
    h100 = products_alone(lookup("h100"))
    assert h100.peak("bfloat16", "attention") == h100.peak("bfloat16")
    own = (*h100.peaks, ("bfloat16 attention", Peak(4e14)))
    some = dataclasses.replace(h100, peaks=own)
    assert some.peak("bfloat16", "attention").flops == 4e14
    assert some.peak("float8_e5m2", "attention").flops == 1978.9e12
    assert some.peak("bfloat16", "attention backward") == h100.peak("bfloat16")
    work = some.kernel(0, 4e14, family="attention", dtype="bfloat16")
    assert work == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("h100", torch.float8_e4m3fn, 1978.9e12),
        ("a100", torch.float16, 312e12),
        ("a100", "float8_e5m2", 312e12),
        ("v100", "float16", 125e12),
        ("v100", "bfloat16", 15.7e12),
        ("v100", torch.int64, 15.7e12),
        ("tpu-v3", "bfloat16", 105e12),
    ],
)
def test_peaks_that_are_those_of_data_sheets(name: str, dtype, flops: float) -> None:
    assert lookup(name).peak(dtype).flops == flops


def test_tf32_is_a_choice_where_it_exists() -> None:
    assert lookup("a100").peak("float32").flops == 19.5e12
    assert lookup("a100").peak("tf32").flops == 156e12
    assert lookup("v100").peak("tf32").flops == 15.7e12


def test_an_axis_inside_a_node_has_the_nodes_link() -> None:
    nvlink, network = 18 * 20.6e9, 50e9
    assert link("h100", "tp=8", "tp").bandwidth == nvlink
    assert link("h100", "dp=2,tp=8", "tp").bandwidth == nvlink
    assert link("h100", "dp=2,tp=8", "dp").bandwidth == network
    assert link("h100", "dp=2,tp=2", "dp").bandwidth == nvlink
    # As the last axis, dp would be the one inside.
    assert link("h100", "tp=8,dp=2", "dp").bandwidth == nvlink
    assert link("h100", "tp=8,dp=2", "tp").bandwidth == network
    # Three ranks fit in a node, though no number of groups of three fills it.
    assert link("h100", "tp=3", "tp").bandwidth == nvlink
    assert link("h100", "dp=8,tp=3", "tp").bandwidth == network


def test_an_axis_that_leaves_the_node_knows_both_links() -> None:
    whole = link("h100", "dp=16", "dp")
    assert (whole.bandwidth, whole.inside) == (50e9, 8)
    assert whole.inner and whole.inner.bandwidth == 18 * 20.6e9
    half = link("h100", "dp=4,tp=4", "dp")
    assert half.inside == 2 and half.inner == whole.inner
    assert link("h100", "dp=2,tp=8", "dp").inner is None
    # Nodes hold 8, groups of 6 start at 0, 6, 12: two neighbours are sure to be inside.
    assert link("h100", "dp=4,tp=6", "tp").inside == 2


def test_devices_of_a_node_share_its_network() -> None:
    assert link("v100-dgx1", "dp=2,tp=8", "dp").bandwidth == pytest.approx(50e9 / 8)
    assert link("v100", "dp=2,tp=16", "dp").bandwidth == pytest.approx(80.8e9 / 16)
    assert link("p100", "dp=4,tp=4", "dp").bandwidth == pytest.approx(12.5e9 / 4)
    k80 = lookup("k80").on(Mesh.parse("node=16,pair=2,one=2"))
    assert [k80.link(a).bandwidth for a in k80.names] == [7e9 / 4, 12e9 / 2, 12e9]


def test_one_unlimited_level_serves_every_axis() -> None:
    mesh = lookup("cpu").on(Mesh.parse("dp=2,tp=2"))
    assert mesh.links[0] == mesh.links[1] and mesh.links[0].inner is None
    # The last level reaches as far as the mesh does.
    few = dataclasses.replace(lookup("cpu"), levels=(Level(2, 1e9, 1e-5),))
    assert few.on(Mesh.parse("dp=8")).link("dp").bandwidth == 1e9


def test_single_kinds_have_links_of_their_own() -> None:
    kinds = (("permute", of_kind(1e-3, 2e-3, 4e9)),)
    levels = (Level(2, 1e10, 1e-5), Level(0, 8e9, 1e-4, shared=True, kinds=kinds))
    few = dataclasses.replace(lookup("cpu"), levels=levels)
    network = few.on(Mesh.parse("dp=2,tp=2")).link("dp")
    assert network.bandwidth == 4e9
    assert network.kinds == (("permute", Link(2e9, 2e-3, 1e-3)),)


def test_links_are_hashed_cheaply_and_compared_fully() -> None:
    one, other = Link(1e9, 1e-5, 0.0), Link(1e9, 1e-5, 1.0)
    assert hash(one) == hash(other) and one != other


@pytest.mark.parametrize("built_in", BUILT_IN, ids=lambda h: h.name)
def test_files_round_trip(built_in: Hardware, tmp_path: Path) -> None:
    kinds = (("all_reduce", of_kind(1e-5, 1e-6, 1e9)),)
    levels = (dataclasses.replace(built_in.levels[0], kinds=kinds),)
    changed = dataclasses.replace(
        built_in,
        levels=levels,
        near=((1e4, 1e11),),
        beside=0.5,
        light=(("exp", 1e9),),
    )
    for written in (built_in, changed):
        written.save(tmp_path / "it.json")
        read = lookup(str(tmp_path / "it.json"))
        assert read == written and hash(read) == hash(written)


def test_files_that_do_not_tell_the_contracted_dim_mean_what_they_did(
    tmp_path: Path,
) -> None:
    path = tmp_path / "it.json"
    cpu = dataclasses.replace(
        lookup("cpu"), peaks=(("float32", Peak(1e11, 1.0, 1e5, 20.0, 10.0)),)
    )
    cpu.save(path)
    data = json.loads(path.read_text())
    del data["peaks"]["float32"]["half_contracted"]
    path.write_text(json.dumps(data))
    peak = lookup(str(path)).peak("float32")
    for dims in itertools.permutations((20.0, 1e3, 1e3)):
        assert peak.rate(1e30, ProductDims(*dims)) == pytest.approx(5e10)
    assert lookup(str(H100_FILE)).peak("bfloat16").half_contracted is None


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(OptionError, match="unknown hardware 'h10'") as error:
        lookup("h10")
    fix = error.value.fix or ""
    assert "did you mean 'h100'?" in fix and "python -m fxpar calibrate" in fix
    assert all(built_in.name in fix for built_in in BUILT_IN)
    assert lookup("V100") is lookup("v100-dgx2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.pop("format"), "format"),
        (lambda data: data.pop("memory"), "memory"),
        (lambda data: data.update(memry=1), "memry"),
        (lambda data: data.update(levels=[]), "level"),
        (lambda data: data["levels"][0].pop("kinds"), "kinds"),
        (lambda data: data["peaks"].pop("float32"), "float32"),
        (lambda data: data.update(bandwidth=0), "bandwidth is 0, not a number that"),
        (lambda data: data.update(memory=math.nan), "memory is nan"),
        (lambda data: data.update(launch="fast"), "launch is 'fast'"),
        (lambda data: data["peaks"]["float32"].update(flops=-1), "flops is -1"),
        (lambda data: data["levels"][0].update(latency=math.inf), "latency is inf"),
        (lambda data: data.update(light=[["exp", 0]]), "light exp is 0"),
        (lambda data: data.update(ranks=0), "ranks is 0"),
    ],
)
def test_bad_files_are_refused(change, why: str, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    lookup("cpu").save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(OptionError, match=why) as error:
        lookup(str(path))
    assert "calibrate" in (error.value.fix or "")
    for text in ("[1]", "{", ""):
        path.write_text(text)
        with pytest.raises(OptionError, match="cannot read hardware file"):
            lookup(str(path))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM3-32GB", "v100-dgx2"),
        ("Tesla V100-SXM2-16GB", "v100-dgx1"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("Tesla K80", "k80"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_known_by_name(
    device: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    if name:
        assert hardware_table.detect().name == name
        return
    with pytest.raises(DeviceError, match=re.escape(device)) as error:
        hardware_table.detect()
    fix = error.value.fix or ""
    assert "FXPAR_HARDWARE" in fix and "python -m fxpar calibrate" in fix


def test_without_a_gpu_it_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware_table.detect() is lookup("cpu")


def test_the_docs_list_every_built_in() -> None:
    page = DOCS.read_text()
    assert [h.name for h in BUILT_IN if f"| `{h.name}` |" not in page] == []
    assert hardware_table.FORMAT in page
