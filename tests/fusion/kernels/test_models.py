"""Real models: their regions' kernels equal the regions, and they train as before."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fxpar.fusion.kernels import run_kernels
from fxpar.fusion.kernels.emit import kernel_of
from fxpar.fusion.kernels.region_program import (
    CannotEmit,
    RegionProgram,
    stages_of,
)
from fxpar.fusion.kernels.templates import template_of
from tests.helpers.interpreter import run_interpreted
from tests.helpers.kernels import collective_cases as cases
from tests.helpers.kernels.ahead import RANDOM, Compiled, compile_ahead
from tests.helpers.kernels.model_regions import (
    check_parts,
    jobs_of,
    programs_of,
    regions_of,
    rounding_of,
    ways_of,
)
from tests.helpers.spawn import Pool, shared_pool
from tests.helpers.training import Run, compare, train

triton = pytest.importorskip("triton")

F32 = 1e-6

GOLDEN = Path(__file__).parent / "golden_regions.json"
GRID = 116  # programs at a time on an H100, of which some are left to others

# Regions of forward and backward on tp=2.
REGIONS = {"llama": (5, 5), "gpt2": (5, 1), "bert": (4, 0)}

MESHES = ("tp=2", "tp=4", "dp=2 step")
MESHES_OF = {1: ("tp=2",), 2: ("tp=2", "dp=2 step"), 4: ("tp=4",)}  # ranks


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("mesh", MESHES)
def test_parts_of_regions(mesh: str) -> None:
    """What stands between collectives, by kernels."""
    for graph in regions_of(mesh):
        before, after = graph.bytes
        assert after < before or not graph.regions or "step" in mesh
        for program in graph.programs:
            check_parts(program)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("name", REGIONS)
def test_as_many_regions_as_there_were(name: str) -> None:
    counts = {"forward": 0, "backward": 0}
    graphs = [graph for graph in regions_of("tp=2") if graph.name == name]
    for graph in graphs:
        counts[graph.which] += graph.regions
    near_misses = [graph.near_misses for graph in graphs]
    assert tuple(counts.values()) == REGIONS[name], near_misses


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", MESHES_OF)
def test_whole_regions(ranks: int) -> None:
    """With the collective inside, on so many ranks."""
    jobs, refused = jobs_of(programs_of(MESHES_OF[ranks]), ranks)
    for why in refused:
        assert "is one number" in why or "no multiple of 128" in why
    assert len(jobs) >= 15
    runs = cases.run_cases(jobs, ranks, seconds=1500)
    assert not any(run.signals for run in runs), "signals are not lowered again"
    for name, case in cases.compared(jobs, runs).items():
        assert case.error <= F32 + rounding_of(jobs[name]), name
        assert case.same, f"{name}: ranks differ in what they hold alike"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_compiled_ahead(mesh: str) -> None:
    """All kernels of all regions, for sm_90a: no spills, and no more registers and
    shared memory than ``golden_regions.json`` has (EXPECTTEST_ACCEPT=1 updates it)."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found = {}
    graphs = run_interpreted(regions_of, mesh, seconds=1500.0)
    for text in dict.fromkeys(text for graph in graphs for text in graph.texts):
        for name, made in kernels_of(RegionProgram.parse(text)):
            assert made.target == "sm_90a" and made.spilled == 0, name
            found[name] = [made.registers, made.shared]
    if os.environ.get("EXPECTTEST_ACCEPT"):
        GOLDEN.write_text(json.dumps(golden | found, indent=0, sort_keys=True) + "\n")
        return
    assert found
    if triton.__version__.startswith("3.7."):
        for name, (registers, shared) in found.items():
            assert registers <= golden[name][0] and shared <= golden[name][1], name


def kernels_of(program: RegionProgram) -> Iterator[tuple[str, Compiled]]:
    """Those of its parts, and those with its collective inside."""
    for i, step in enumerate(stages_of(program)):
        if isinstance(step, RegionProgram):
            kernel = kernel_of(step, random=RANDOM)
            yield f"{program.title} part {i}", compile_ahead(kernel)
    for name, how in ways_of(program).items():
        with contextlib.suppress(CannotEmit):
            made = template_of(program, programs=GRID, random=RANDOM, **how)
            yield f"{program.title} {name}", compile_ahead(made.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_training_interpreted(codegen: str) -> None:
    """Op by op, regions change no bit; in compiled code, what stands around them."""
    options = {"mesh": "tp=2", "codegen": codegen}
    pool = shared_pool(2)
    want = pool.run(train, "llama", options, 1, timeout=600.0)
    got = pool.run(train, "llama", options | {"fuse": "interpret"}, 1, timeout=600.0)
    for a, b in zip(want, got, strict=True):
        if codegen == "inductor":
            compare([b], a)
            continue
        assert a.losses == b.losses
        assert all(a.gradients[n].equal(b.gradients[n]) for n in a.gradients)


def train_counting(name: str, options: dict[str, str]) -> tuple[Run, int]:
    """As ``train``, and how often a kernel was launched."""
    with mock.patch.object(
        run_kernels, "function_of", wraps=run_kernels.function_of
    ) as asked:
        return train(name, options, 2), asked.call_count


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_training_by_kernels(name: str) -> None:
    """With generated kernels, in Triton's interpreter."""
    options = {"mesh": "tp=2", "codegen": "eager"}
    with Pool(2, env={"TRITON_INTERPRET": "1"}) as pool:
        want = pool.run(train, name, options, 2, timeout=600.0)
        got = pool.run(
            train_counting, name, options | {"fuse": "triton"}, timeout=600.0
        )
    for a, (b, launched) in zip(want, got, strict=True):
        compare([b], a)
        assert launched > 0
