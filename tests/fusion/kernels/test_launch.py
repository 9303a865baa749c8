"""How a kernel is launched: what it reads and writes, and what is said of failures."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fxpar.errors import FxparError
from fxpar.fusion.kernels import region_op, run_kernels
from fxpar.fusion.kernels.emit import Kernel, kernel_of
from fxpar.fusion.kernels.region_program import RegionProgram, Tensor
from fxpar.fusion.kernels.symmetric_memory import Unshared
from tests.helpers.kernels import samples
from tests.helpers.kernels.compare_kernels import outlined, traced
from tests.helpers.kernels.fused_graphs import GRAPHS, fused
from tests.helpers.kernels.shared_memory import virtual

CPU = torch.device("cpu")


def made(fn: Any, *given: torch.Tensor, **how: Any) -> tuple[RegionProgram, Kernel]:
    program = outlined(traced(fn, given))[0].program
    return program, kernel_of(program, **how)


def test_a_kernel_that_does_not_start_is_named(monkeypatch) -> None:
    program, kernel = made(lambda x: x * 2, torch.ones(8))
    problem = RuntimeError("out of resource: shared memory\nmore")
    function = mock.MagicMock()
    function.__getitem__.return_value.side_effect = problem
    monkeypatch.setattr(run_kernels, "function_of", lambda _: function)
    monkeypatch.setattr(run_kernels, "LINES", {program.hash: "model.py:7, y = f(x)"})
    with pytest.raises(FxparError) as error:
        run_kernels.call(kernel, (), program)
    assert error.value.__cause__ is problem
    text = str(error.value)
    assert program.title in text and "out of resource: shared memory" in text
    assert "at: model.py:7" in text
    assert 'fix: compile with options={"fuse": "none"}' in text


def test_lines_of_regions_are_known() -> None:
    (program,) = fused(GRAPHS["epilogue"])[1].programs
    assert program.hash in run_kernels.LINES


def test_what_is_read_begins_at_16_bytes() -> None:
    """Triton makes other code elsewhere; ranks are to run the same."""
    t = Tensor("x", (8,), (1,), "float32")
    whole = torch.arange(12.0)
    assert run_kernels.as_read(whole[4:], t, CPU).data_ptr() == whole[4:].data_ptr()
    read = run_kernels.as_read(whole[1:9], t, CPU)
    assert read.data_ptr() % 16 == 0 and torch.equal(read, whole[1:9])
    one = Tensor("x", (), (), "float32")
    assert run_kernels.as_read(whole[1], one, CPU).data_ptr() == whole[1].data_ptr()


def test_what_is_written_begins_at_16_bytes() -> None:
    _, kernel = made(lambda x: x * 2, torch.ones(8))
    (t,) = kernel.writes
    whole = torch.zeros(12)
    for first, fits in ((4, True), (1, False)):
        target = whole[first : first + 8]
        assert run_kernels.fits(kernel, [torch.ones(8)], t, target) == fits
        (written,) = run_kernels.places(kernel, [torch.ones(8)], {t.name: target}, CPU)
        assert (written.data_ptr() == target.data_ptr()) == fits


def test_numbers_on_the_cpu_are_no_tensors_elsewhere() -> None:
    """A copy to the device would wait for it."""
    fn, names = samples.PIECES["adamw"]
    given = [samples.make(name) for name in names]
    program, _ = made(fn, *given)
    inputs = [
        torch.empty(t.shape, dtype=getattr(torch, t.dtype), device=d)
        for t in program.inputs
        for d in ["meta" if t.shape else "cpu"]
    ]
    alone = run_kernels.alone_of(program, inputs, torch.device("meta"))
    assert alone == {t.name for t in program.inputs if not t.shape} and len(alone) == 2
    assert not run_kernels.alone_of(program, given, CPU)
    kernel = kernel_of(program, alone=alone)
    assert not alone & {t.name for t in kernel.reads}
    values = {name: torch.tensor(0.1, dtype=torch.float64) for name in alone}
    values |= {t.name: torch.empty(t.shape, device="meta") for t in kernel.reads}
    arguments, _ = run_kernels.arguments_of(
        kernel, values, (), torch.device("meta"), {}
    )
    assert list(arguments[-2:]) == [0.1, 0.1]


def test_such_a_kernel_compiles() -> None:
    pytest.importorskip("triton")
    if run_kernels.has_kernels(CPU):
        pytest.skip("Triton is an interpreter here")
    from tests.helpers.kernels.ahead import RANDOM, compile_ahead

    fn, names = samples.PIECES["adamw"]
    given = [samples.make(name) for name in names]
    program, _ = made(fn, *given)
    alone = {t.name for t in program.inputs if not t.shape}
    kernel = kernel_of(program, random=RANDOM, alone=alone)
    assert len(kernel.alone) == 2
    assert compile_ahead(kernel).spilled == 0


def test_without_room_collectives_run_between_kernels(monkeypatch) -> None:
    (program,) = fused(GRAPHS["prologue"])[1].programs
    (provider,) = virtual(1, CPU, programs=2)
    monkeypatch.setattr(run_kernels, "has_kernels", lambda _: True)
    monkeypatch.setattr(region_op, "provider_of", lambda *_: provider)
    monkeypatch.setattr(region_op, "planned", lambda *_: mock.Mock())
    monkeypatch.setattr(run_kernels, "run", lambda *_: ["by itself"])

    def none(*_: Any) -> Any:
        raise Unshared("no room")

    monkeypatch.setattr(region_op, "launched", none)
    inputs = [torch.ones(t.shape) for t in program.inputs]
    assert region_op.run(program, inputs, group="g") == ["by itself"]
