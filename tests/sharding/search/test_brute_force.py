"""Searches of random traced programs against every choice there is.

The cost of a choice is written here once more, from what plans are made of: the
strategy of each op, where inputs and outputs rest, for every value read more than once
the spec it settles in, and which values and copies are part of fused kernels. Nothing
of the formulation or the solver is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import fxpar
from fxpar.sharding.cost import program_kernels
from fxpar.sharding.cost.program_kernels import kernels_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Program
from fxpar.sharding.reshard import all_pairs
from fxpar.sharding.search import search_space
from fxpar.sharding.search.run_search import SearchOptions, search
from fxpar.sharding.shard_sizes import can_split
from fxpar.sharding.spec import Spec
from tests.helpers.machines import machine
from tests.helpers.random_programs import Case

MOST = 200_000  # choices of a program


class Few(Case):
    """A random program of one or two statements on a small mesh."""

    def _statement(self) -> None:
        if len(self.lines) < 1 + self.seed % 2:
            super()._statement()

    def _mesh(self) -> str:
        return "x=2" if self.seed % 4 else "x=2,y=2"


@dataclass(frozen=True)
class End:
    """Who makes or reads a value."""

    # The axis of the joint choice that decides it; None: nothing else depends on it.
    axis: Any
    # Its spec under each option.
    specs: Sequence[Spec]
    # Its kernels are generated: copies beside a collective are part of them.
    light: bool = False


class Everything:
    """Every joint choice of a program, and what it costs."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        self.fused = kernels_of(program)
        self.axes: dict[Any, int] = {}
        self.makers: dict[int, End] = {}
        self.readers: dict[int, list[End]] = {v.index: [] for v in program.values}
        for op in program.ops:
            found = [*search_space.strategies(op.rule, mesh).values()]
            self.axes["op", op.index] = len(found)
            rows = [search_space.specs(op.rule, strategy) for strategy in found]
            for i, v in enumerate(op.tensors):
                read = i < len(op.operands)
                fused = self.fused
                light = (
                    fused.is_read_by_light(op.index)
                    if read
                    else fused.is_made_by_light_op(v)
                )
                end = End(("op", op.index), [row[i] for row in rows], light)
                if read:
                    self.readers[v].append(end)
                else:
                    self.makers[v] = end
        self._borders()

    def _borders(self) -> None:
        program, signature = self.program, self.program.signature
        tangents = dict(signature.tangents)
        for i, (declared, v) in enumerate(
            zip(signature.inputs, program.inputs, strict=True)
        ):
            if v is not None and i not in tangents:
                self.makers[v] = self._border(("in", i), v, declared.at_rest)
        for k, (out, v) in enumerate(
            zip(signature.outputs, program.outputs, strict=True)
        ):
            if v is None:
                continue
            of = program.inputs[out.of] if out.of is not None else None
            if of is not None and of != v and out.at_rest is None:
                end = self.makers[of]
            else:
                end = self._border(("out", k), v, out.at_rest)
            self.readers[v].append(end)
            for i, other in tangents.items():
                if other == k and program.inputs[i] is not None:
                    self.makers[program.inputs[i]] = end
        for value in program.values:
            if value.index not in self.makers:
                self.makers[value.index] = End(None, [Spec.whole(len(value.shape))])

    def _border(self, axis: Any, v: int, rest: Spec | None) -> End:
        specs = [rest] if rest is not None else self._lying(v)
        self.axes[axis] = len(specs)
        return End(axis, specs)

    def _lying(self, v: int) -> list[Spec]:
        """Every way to lie with nothing partial, axes in the order of the mesh or batch
        axes last."""
        shape, found = self.program.values[v].shape, {}
        specs = [Spec.of([()] * len(shape))]
        for order in search_space.orders(self.mesh):
            these = [[()] * len(shape)]
            for axis in order:
                these += [
                    [(*e, axis) if d == at else e for d, e in enumerate(dims)]
                    for dims in these
                    for at in range(len(shape))
                ]
            specs += [Spec.of(dims) for dims in these]
        for spec in specs:
            if all(
                can_split(n, self.mesh, axes)
                for n, axes in zip(shape, spec.dims, strict=True)
            ):
                found[spec] = None
        return list(found)

    @property
    def count(self) -> float:
        return float(np.prod([float(n) for n in self.axes.values()]))

    def least(self) -> float:
        """Seconds of the best choice, launches apart."""
        place = {axis: i for i, axis in enumerate(self.axes)}
        total = np.zeros(tuple(self.axes.values()))
        hardware = machine()
        works = self.fused.works
        for op in self.program.ops:
            found = [*search_space.strategies(op.rule, self.mesh).values()]
            mine = works[op.index]
            seconds = [
                program_kernels.seconds(op, mine, s, self.mesh, hardware) for s in found
            ]
            total = total + _along(np.array(seconds), [place["op", op.index]], total)
        for value in self.program.values:
            if self.readers[value.index]:
                total = total + self._moved(value.index, place, total)
        return float(total.min())

    def _moved(self, v: int, place: dict[Any, int], total: np.ndarray) -> Any:
        """Seconds to bring a value from its maker to its readers, over all choices."""
        maker, readers = self.makers[v], self.readers[v]
        if len(readers) == 1:
            return self._between(v, maker, readers[0], place, total)
        settled = dict.fromkeys([*maker.specs, *(s for r in readers for s in r.specs)])
        least: Any = np.inf
        for spec in settled:
            here = End(None, [spec])
            read = replace(here, light=all(reader.light for reader in readers))
            way = self._between(v, maker, read, place, total)
            for reader in readers:
                way = way + self._between(v, here, reader, place, total)
            least = np.minimum(least, way)
        return least

    def _between(
        self, v: int, a: End, b: End, place: dict[Any, int], total: np.ndarray
    ) -> Any:
        value = self.program.values[v]
        table = all_pairs.matrix(
            a.specs,
            b.specs,
            self.mesh,
            value.shape,
            value.dtype.itemsize,
            (not a.light, not b.light),
        )
        if self.fused.base[v] not in self.fused.written:
            # What one kernel would keep to itself is written, and read by another.
            held = [
                [
                    value.nbytes / self.mesh.count(spec.sharded_axes)
                    for spec in end.specs
                ]
                for end in (a, b)
            ]
            table = table + np.add.outer(*held) / machine().bandwidth * (table > 0)
        if a.axis is not None and a.axis == b.axis:
            return _along(table.diagonal(), [place[a.axis]], total)
        axes = [place[end.axis] for end in (a, b) if end.axis is not None]
        rows = slice(None) if a.axis is not None else 0
        columns = slice(None) if b.axis is not None else 0
        return _along(table[rows, columns], axes, total)


def _along(array: np.ndarray, axes: Sequence[int], total: np.ndarray) -> np.ndarray:
    """An array over some axes of the joint choice, to be broadcast over the others."""
    order = np.argsort(axes)
    shape = [1] * total.ndim
    for axis, size in zip(axes, array.shape, strict=True):
        shape[axis] = size
    return array.transpose(order).reshape(shape)


def check(plan: Any, what: str = "") -> bool:
    """Whether the program was small enough; raises where the search is not right."""
    program, mesh = plan.result.decision.program, plan.mesh
    every = Everything(program, machine().on(mesh))
    if not program.ops or every.count > MOST or len(every.axes) > 24:
        return False
    least = every.least()
    found = search(program, mesh, SearchOptions(machine(), 60.0), {})
    assert found.solution.cost == pytest.approx(least, rel=1e-6, abs=1e-15), what
    assert found.solution.bound <= least * (1 + 1e-6) + 1e-15
    return True


def check_random(seed: int) -> bool:
    case = Few(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = fxpar.plan(
            case.program(),
            *case.tensors(),
            mesh=case.mesh,
            in_specs=case.in_specs,
            out_specs=case.out_specs,
            mode="replicate",
            grad=case.grad,
        )
    return check(plan, str(case))


def two_readers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sort(0)[0], x.cumsum(0)


@pytest.mark.parametrize("spec", [("x", None), (None, "x"), None])
def test_readers_that_need_the_same_share_it(spec: tuple | None) -> None:
    x = torch.randn(8, 4)
    assert check(fxpar.plan(two_readers, x, mesh="x=2", in_specs=[spec]))


# Some that are small enough: dims that divide and that do not, copies that are part of
# the kernels around them.
QUICK = (2, 4, 5, 8, 13, 14, 18, 26)


def test_no_plan_of_a_random_program_is_better() -> None:
    assert all(map(check_random, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 25))
def test_no_plan_of_many_random_programs_is_better(block: int) -> None:
    seeds = range(16 * block, 16 * block + 16)
    assert sum(check_random(seed) for seed in seeds) >= 3
