"""Calibration: fits recover what made the times, ranks measure, the file is usable."""

from __future__ import annotations

import dataclasses
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import fxpar
from fxpar.__main__ import main
from fxpar.config import Options
from fxpar.errors import MeshError
from fxpar.runtime.calibrate import measure as calibrate
from fxpar.runtime.calibrate import probe_device
from fxpar.runtime.ranks import groups
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost import op as one_op
from fxpar.sharding.cost.hardware_table import Hardware, Peak, ProductDims, lookup
from fxpar.sharding.mesh import Link, Mesh
from tests.helpers.machines import collective_seconds
from tests.helpers.spawn import shared_pool

NOISE = np.random.default_rng(0)


def noisy(seconds: float) -> float:
    return seconds * float(np.exp(0.05 * NOISE.standard_normal()))


def test_a_peak_is_found_again() -> None:
    """What a small contracted dim costs is told from what a small outer one does."""
    for half_dim, half_contracted in ((40.0, 10.0), (10.0, 40.0)):
        true = Peak(5e11, 1.0, 2e6, half_dim, half_contracted)
        points = []
        for m, k, n in probe_device._SUITES["cpu"].shapes:
            flops, dims = 2.0 * m * k * n, ProductDims(m, n, k)
            points.append((flops, dims, noisy(flops / true.rate(flops, dims))))
        found = probe_device.fit_peak(points)
        assert found.flops == pytest.approx(5e11, rel=0.1)
        assert found.half_flops == pytest.approx(2e6, rel=0.5)
        assert found.half_dim == pytest.approx(half_dim, rel=0.3)
        assert found.half_contracted == pytest.approx(half_contracted, rel=0.3)


@pytest.mark.parametrize("kind", collectives.KINDS)
@pytest.mark.parametrize("sizes", [(4,), (2, 8)])
def test_a_link_is_found_again(kind: str, sizes: tuple[int, ...]) -> None:
    """Of one size of groups, what a collective costs at all counts as latency."""
    true = Link(2e9, 3e-5, overhead=2e-4)
    points = [
        (n, 4.0**i, noisy(collective_seconds(kind, (n,), (true,), 4.0**i)))
        for n in sizes
        for i in range(4, 14)
    ]
    found = probe_device.fit_collective(kind, points)
    assert found.bandwidth == pytest.approx(2e9, rel=0.15)
    for n, nbytes, seconds in points:
        predicted = collective_seconds(kind, (n,), (found,), nbytes)
        assert predicted == pytest.approx(seconds, rel=0.3)
    if len(sizes) == 1:
        assert found.overhead == 0.0
    elif kind != "permute":  # which takes one step in groups of every size
        assert found.overhead == pytest.approx(2e-4, rel=0.5)
        assert found.latency == pytest.approx(3e-5, rel=0.5)


def test_one_outlier_does_not_decide() -> None:
    true = Link(2e9, 1e-4, 0.0)
    points = [
        (2, 4.0**i, collective_seconds("all_reduce", (2,), (true,), 4.0**i))
        for i in range(4, 14)
    ]
    points[-3] = (2, points[-3][1], 2 * points[-3][2])
    found = probe_device.fit_collective("all_reduce", points)
    assert found.bandwidth == pytest.approx(2e9, rel=0.3)
    assert found.latency == pytest.approx(1e-4, rel=0.3)


def test_groups_are_inside_nodes_or_between_them() -> None:
    mesh = Mesh.parse("node=2,device=4")
    assert not calibrate._is_across_nodes(mesh, ["device"], 4)
    assert calibrate._is_across_nodes(mesh, ["node"], 4)
    with pytest.raises(MeshError, match="node\\+device are partly") as error:
        calibrate._is_across_nodes(mesh, ["node", "device"], 4)
    assert "node=2,device=4" in (error.value.fix or "")


def measure(mesh: str, quick: bool = True, limit: float = 60.0) -> Hardware:
    return calibrate.calibrate(mesh, quick=quick, limit=limit)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_measure_their_link(tmp_path: Path) -> None:
    first, second = shared_pool(4).run(measure, "dp=2", ranks=2)
    assert first == second  # every rank has the figures of the slowest
    cpu = lookup("cpu")
    (level,) = first.levels
    assert dict(level.kinds).keys() == set(collectives.KINDS)
    assert level.devices == 0 and level.bandwidth != cpu.levels[0].bandwidth
    # Wide enough for any machine; a factor of 1000 would be a wrong unit.
    for _, own in level.kinds:
        assert 1e6 < own.bandwidth < 1e12 and 1e-7 < own.latency < 1
    assert 1e8 < first.bandwidth < 1e13 and 1e-8 < first.launch < 1e-2
    (near,) = first.near
    assert near[0] == pytest.approx(1 << 19, rel=1e-3) and near[1] > first.bandwidth
    assert 1e8 < first.peak("float32").rate(1e9) < 1e14
    assert "2 ranks on mesh dp=2" in first.about
    first.save(tmp_path / "it.json")
    assert lookup(str(tmp_path / "it.json")) == first
    assert first.ranks == 2 and first.cores >= 1
    link = first.on(Mesh.parse("dp=2,tp=2")).link("tp")
    assert dict(link.kinds)["all_reduce"].bandwidth == link.bandwidth


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_nodes_are_two_levels() -> None:
    env = {"LOCAL_WORLD_SIZE": "1"}
    for found in shared_pool(4).run(measure, "dp=2", ranks=2, env=env):
        inner, outer = found.levels
        assert (inner.devices, inner.kinds) == (1, ())
        assert outer.devices == 0 and len(outer.kinds) == len(collectives.KINDS)


def moved(kind: str) -> tuple[list[float], list[float]]:
    """What a collective along two ranks gives; calibration only times it."""
    import torch.distributed as dist

    from fxpar import _torch

    me = dist.get_rank()
    x = torch.tensor([1.0, 2.0]) * (me + 1)
    group = _torch.distributed.default_group().group_name
    out = calibrate.START[kind](x, 2, group, me)
    return x.tolist(), torch.ops._c10d_functional.wait_tensor(out).tolist()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "results"),
    [
        ("all_reduce", [[3.0, 6.0], [3.0, 6.0]]),
        ("all_gather", [[1.0, 2.0, 2.0, 4.0]] * 2),
        ("reduce_scatter", [[3.0], [6.0]]),
        ("all_to_all", [[1.0, 2.0], [2.0, 4.0]]),
        ("permute", [[2.0, 4.0], [1.0, 2.0]]),
    ],
)
def test_what_is_timed_is_the_collective(kind: str, results: list) -> None:
    outcomes = shared_pool(4).run(moved, kind, ranks=2)
    assert [out for _, out in outcomes] == results


def probe(mesh: str = "dp=1", **suite: object) -> probe_device.Probe:
    """A probe of the quick suite, but for ``suite``."""
    ranks = groups.join(Options(mesh=mesh))
    made = dataclasses.replace(probe_device._SUITES["quick cpu"], **suite)

    class Some(probe_device.Probe):
        suite = made

    return Some(torch.device("cpu"), ranks, time.monotonic() + 60, False)


def test_families_are_measured_forward_and_backward() -> None:
    some = probe(
        convolved=((1, 2, 4, 8, 3), (2, 4, 4, 8, 3), (2, 4, 8, 8, 1)),
        attended=((1, 2, 8, 4), (2, 2, 16, 8), (2, 2, 32, 8)),
        families=("float32",),
    )
    found = dict(probe_device.families(some))
    assert list(found) == [
        "float32 convolution",
        "float32 convolution backward",
        "float32 attention",
        "float32 attention backward",
    ]
    dims = ProductDims(8, 8, 8)
    assert all(1e6 < peak.rate(1e5, dims) < 1e13 for peak in found.values())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (probe_device._convolved, (2, 3, 4, 8, 3)),
        (probe_device._attended, (2, 3, 16, 8)),
    ],
)
def test_flops_are_those_of_a_local_graph(make, shape) -> None:
    """What calibration divides by is what a simulation multiplies with."""
    operands, op, flops, late_flops, dims = make(
        torch.device("cpu"), torch.float32, *shape
    )
    graph = fxpar.plan(op, *operands, mesh="dp=1", grad=True).result.local
    counted = [
        (
            one_op.flops_of(n),
            one_op.dims_of(n),
            one_op.family_of(n.target),
        )
        for n in graph.nodes
        if n.op == "call_function" and one_op.is_contraction(n.target)
    ]
    name = "attention" if make is probe_device._attended else "convolution"
    assert counted == [(flops, dims, name), (late_flops, dims, f"{name} backward")]


def test_operands_are_not_those_of_the_last_call() -> None:
    x, seen = torch.zeros(1 << 24), []
    call = probe_device._in_turn(lambda y: seen.append(y), x)
    for _ in range(3):
        call()
    assert seen[0].data_ptr() == seen[2].data_ptr() != seen[1].data_ptr()
    assert torch.equal(seen[1], x)


def test_ranks_that_take_turns_are_timed_together(monkeypatch) -> None:
    """What counts is when the last rank is done, not what each takes by itself."""
    some, clock = probe(), [0.0]
    monkeypatch.setattr(probe_device.time, "perf_counter", lambda: clock[0])

    def other_rank() -> None:
        clock[0] += 1.0

    monkeypatch.setattr(probe_device.worlds, "barrier", other_rank)
    assert some._time(lambda: None, 1) == 0.0
    assert some._time(lambda: None, 1, meet=True) == 1.0


@pytest.mark.parametrize(
    ("together", "lost"), [(3.0, 0.0), (4.0, 0.5), (5.0, 1.0), (7.0, 1.0), (2.9, 0.0)]
)
def test_what_a_collective_takes_from_kernels(monkeypatch, together, lost) -> None:
    some = probe("dp=1")
    times = iter([0.02, 3.0, 2.0, together])  # a product, the collective, work, both
    monkeypatch.setattr(probe_device.Probe, "median", lambda self, fn: next(times))
    monkeypatch.setattr(calibrate, "local_ranks", lambda size: size)
    ranks = types.SimpleNamespace(mesh=Mesh.parse("dp=2"), group=lambda axes: "g")
    found = calibrate.overlap_loss(dataclasses.replace(some, ranks=ranks))
    assert found == pytest.approx(lost)


@pytest.mark.parametrize(
    ("causal", "share"), [(2.0, 1.0), (1.001953125, 0.0), (0.9, 0.0), (2.1, 1.0)]
)
def test_whether_attention_skips_what_a_mask_hides(monkeypatch, causal, share) -> None:
    times = iter([2.0, causal])  # without a mask, with it; of 512 queries
    monkeypatch.setattr(probe_device.Probe, "median", lambda self, fn: next(times))
    some = probe(families=("float32",), attended=((2, 4, 512, 64),))
    assert probe_device.masked(some) == pytest.approx(share)


@pytest.mark.parametrize(
    ("cores", "threads", "count"),
    [
        (["0 1", "0 1"], 1, 2),
        (["0", "1", "0"], 1, 2),
        (["0 1 2 3"], 2, 2),
        (["5"], 8, 1),
    ],
)
def test_cores_of_all_ranks_count_once(monkeypatch, cores, threads, count) -> None:
    """Whether a rank may run on all of them or is kept to its own."""
    monkeypatch.setattr(probe_device.meeting, "gather", lambda tag, text: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    some = probe()
    assert probe_device.cores(some) == count
    on_gpu = dataclasses.replace(some, device=torch.device("cuda"))
    assert probe_device.cores(on_gpu) == 0


def test_out_of_time_the_built_in_figures_stay(tmp_path: Path, capsys) -> None:
    begin, path = time.monotonic(), tmp_path / "it.json"
    assert main(["calibrate", "--quick", "--limit", "0", "--out", str(path)]) == 0
    assert time.monotonic() - begin < 20
    found, cpu = lookup(str(path)), lookup("cpu")
    assert (found.peaks, found.levels) == (cpu.peaks, cpu.levels)
    assert (found.bandwidth, found.launch) == (cpu.bandwidth, cpu.launch)
    printed = capsys.readouterr().out
    assert f"FXPAR_HARDWARE={path}" in printed and "float32: 99 GFLOP/s" in printed


def test_what_does_not_compile_is_measured_eagerly(monkeypatch) -> None:
    def broken(fn, **_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="no compiler"):
        found = measure("dp=1", quick=False, limit=0.0)
    assert found.bandwidth == lookup("cpu").bandwidth


def test_ranks_that_do_not_end_are_ended(capfd) -> None:
    begin = time.monotonic()
    assert calibrate.spawn(2, ["--quick", "--out", "/dev/null"], timeout=0.5) == 1
    assert time.monotonic() - begin < 30
    assert "not finished after 0.5 s" in capfd.readouterr().err


def test_mesh_and_ranks_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--mesh", "dp"]) == 1
    assert "cannot read mesh 'dp'" in capsys.readouterr().err
    with pytest.raises(MeshError, match="has 2 ranks, but 1 process runs"):
        calibrate.calibrate("dp=2", quick=True)


def test_what_cannot_be_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", None)
    assert main(["calibrate", "--out", "/missing/machine.json"]) == 1
    assert "'/missing' does not exist" in capsys.readouterr().err
    for wrong in (["--limit", "-1"], ["--limit", "nan"], ["--ranks", "0"]):
        with pytest.raises(SystemExit):
            main(["calibrate", *wrong])
        assert "invalid number of at least" in capsys.readouterr().err
