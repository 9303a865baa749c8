"""Programs as data: text and back, names, index maps, cutting at collectives, and
finding a program again."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar import cache_files
from fxpar.errors import FxparError
from fxpar.fusion.kernels import region_op
from fxpar.fusion.kernels.placement import (
    Map,
    Reduction,
    broadcast,
    reduction_of,
    reduction_of_output,
    strided,
    view_map,
)
from fxpar.fusion.kernels.region_program import (
    CollectiveStep,
    Ref,
    RegionProgram,
    Statement,
    contiguous,
    op_named,
    stages_of,
)
from tests.helpers.kernels import samples
from tests.helpers.kernels.compare_kernels import outlined, traced
from tests.helpers.kernels.fused_graphs import GRAPHS, all_reduce, fused, inputs


def programs() -> list[RegionProgram]:
    out = [p for fn in GRAPHS.values() for p in fused(fn)[1].programs]
    for fn, names in samples.PIECES.values():
        given = [samples.make(name) for name in names]
        out.append(outlined(traced(fn, given))[0].program)
    return out


def test_text_and_back() -> None:
    for program in programs():
        again = RegionProgram.parse(program.text)
        assert again.text == program.text and again.hash == program.hash
        assert str(again) == str(program)
    infinite = outlined(traced(lambda x: x.masked_fill(x > 0, -torch.inf), [ONE]))[0]
    assert RegionProgram.parse(infinite.program.text) == infinite.program


ONE = torch.ones(4)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "another"}', "no json"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        RegionProgram.parse(text)


def test_the_hash_is_of_content() -> None:
    fns = [lambda x: x * 2 + 1, lambda x: x * 2 + 1, lambda x: x * 2 + 1.5]
    first, alike, other = (outlined(traced(fn, [ONE]))[0].program for fn in fns)
    wider = outlined(traced(fns[0], [torch.ones(5)]))[0].program
    assert first.hash == alike.hash
    assert len({first.hash, other.hash, wider.hash}) == 3


def test_equal_layers_are_one_program() -> None:
    _, found = fused(GRAPHS["two"])
    assert len(found.programs) == 2
    assert found.programs[0] == found.programs[1]


def test_what_differs_between_ranks_is_a_number() -> None:
    """The hash does not know where this rank's part of a mask begins."""
    (program,) = fused(GRAPHS["dropout"])[1].programs
    assert program.numbers == 3  # two offsets, and which seed
    assert "fxpar.random" in program.text
    assert '"0"' not in program.text, "the group's name is no part of a program"


def indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def applied(to: Map, number: int) -> int:
    return eval(to.text("c"), {"c": number})


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 1, 5), (7,), (1,), (2, 1), ()])
def test_places_in_memory(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    views = [x, x.permute(list(reversed(range(x.dim())))), x.expand(2, *shape)]
    views += [x[..., 1:], x[..., ::2]] if shape and shape[-1] > 1 else []
    for view in views:
        to = strided(view.shape, view.stride(), 3)
        for number, index in enumerate(indices(tuple(view.shape))):
            want = 3 + sum(i * s for i, s in zip(index, view.stride(), strict=True))
            assert applied(to, number) == want


def test_maps_of_views() -> None:
    x = torch.arange(2 * 3 * 4).view(2, 3, 4)
    row = torch.arange(6).view(2, 3, 1)

    def view(name: str, *args: Any) -> Map:
        op = f"aten.{name}"
        shape = tuple(op_named(op)(x, *args).shape)
        line = Statement("view", op, (Ref("x"), *args), (), shape, "int64")
        return view_map(line, tuple(x.shape))

    cases = [
        (view("permute.default", (2, 0, 1)), x.permute(2, 0, 1)),
        (view("transpose.int", 0, -1), x.transpose(0, -1)),
        (view("slice.Tensor", 1, 1), x[:, 1:]),
        (view("slice.Tensor", -1, None, None, 2), x[..., ::2]),
        (view("slice.Tensor", 1, -2, 9), x[:, 1:]),
        (view("select.int", 1, -1), x[:, 2]),
        (view("expand.default", (5, 2, -1, 4)), x.expand(5, 2, 3, 4)),
        (view("reshape.default", (6, 4)), x.view(6, 4)),
        (broadcast((2, 3, 1), (5, 2, 3, 4)), row.expand(5, 2, 3, 4)),
        (broadcast((4,), (2, 3, 4)), torch.arange(4).expand(2, 3, 4)),
    ]
    for to, want in cases:
        got = [applied(to, number) for number in range(want.numel())]
        assert got == want.flatten().tolist()


def test_dims_that_stay_together_are_one_term() -> None:
    assert strided((3, 4, 5), contiguous((3, 4, 5))).is_identity
    assert broadcast((3, 4, 1), (3, 4, 5)).text("c") == "c // 5"
    assert broadcast((5,), (3, 4, 5)).text("c") == "c % 5"


def test_stages() -> None:
    """What does not need the collective is computed behind it."""
    (program,) = fused(GRAPHS["backward"])[1].programs
    move, part = stages_of(program)
    assert isinstance(move, CollectiveStep) and isinstance(part, RegionProgram)
    assert move.kind == "all_reduce" and move.operand == "in0"
    assert "rsqrt" in [line.name for line in part.lines]
    (program,) = fused(GRAPHS["update"])[1].programs
    kinds = [
        s.kind if isinstance(s, CollectiveStep) else "part" for s in stages_of(program)
    ]
    assert kinds == ["reduce_scatter_tensor", "part", "all_gather_into_tensor"]
    (program,) = fused(GRAPHS["prologue"])[1].programs
    assert [type(s) for s in stages_of(program)] == [RegionProgram, CollectiveStep]


def test_sums_of_a_number_alone() -> None:
    """A loss that is reduced, and then summed along a dim it does not have."""

    def loss(x: Any, w: Any, r: Any) -> Any:
        y = all_reduce(((x @ w) * r).sum())
        return (y * 2).sum(-1), y.mean(0)

    assert reduction_of("sum", (None, (-1,)), ()) == Reduction("all", 1, 1)
    fused(loss)


def test_a_sum_that_is_rounded_on_the_way_is_no_sum() -> None:
    x = torch.zeros(4, 8)
    for fn, known in (
        (lambda x: x.sum(0).bfloat16(), True),
        (lambda x: x.sum(0).bfloat16().float(), False),
    ):
        program = outlined(traced(fn, [x]))[0].program
        name = program.outputs[0].name
        assert (reduction_of_output(program, name) is not None) == known


def test_a_program_is_found_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache_files, "folder", lambda: tmp_path)
    monkeypatch.setattr(region_op, "_KNOWN", {})
    program = outlined(traced(lambda x: x * 3 + 1, [ONE]))[0].program
    name = region_op.remember(program)
    region_op._KNOWN.clear()
    assert region_op.lookup(name) == program
    region_op._KNOWN.clear()
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text().replace("mul", "add"))
    with pytest.raises(FxparError, match="is not known"):
        region_op.lookup(name)
    with pytest.raises(FxparError, match="fix: compile again"):
        region_op.lookup("0123456789abcdef")


def test_a_profile_calls_a_region_by_its_ops() -> None:
    found, order = outlined(traced(lambda x, y: torch.tanh(x + y) * 2, inputs()[::2]))
    name = region_op.remember(found.program)
    given = [inputs()[::2][i] for i in order]
    with torch.profiler.profile() as profile:
        torch.ops.fxpar.region(given, [], name, "", "interpret")
    names = [event.key for event in profile.key_averages()]
    assert f"fxpar::region add tanh mul {found.program.hash}" in names
