"""Code that another rank compiled: loaded without Inductor's lowerings, and where
nothing lies under its key, compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar import compile_job
from fxpar._torch import leader_code
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.skipif(not leader_code.can_load(), reason="torch 2.11")


def test_kernels_are_those_of_torch() -> None:
    from torch._inductor import lowering  # noqa: F401  (brings them)
    from torch._inductor.select_algorithm import extern_kernels

    late = leader_code._Kernels()
    for name in leader_code.KERNELS:
        assert getattr(late, name) is getattr(extern_kernels, name)
    assert late.bias_addmm is extern_kernels.bias_addmm


PROGRAM = """
import sys, torch
from torch import fx
from fxpar import _torch
from fxpar._torch import leader_code

def fn(x, w):
    return (torch.sin(torch.softmax(torch.mm(x, w), -1)),)

torch.manual_seed(0)
x, w = torch.randn(16, 32), torch.randn(32, 64, requires_grad=True)
gm = fx.symbolic_trace(fn)
want = fn(x, w)[0]
"""

COMPILES = """
with leader_code.keys_noted() as keys:
    how = {"joint_pass": lambda gm: None, "cached": True}
    compiled = _torch.aot.compile_fx(gm, [x, w], **how)
assert torch.allclose(compiled(x, w)[0], want)
assert len(keys) == 1
print(keys[0])
"""

LOADS = """
assert leader_code.load(gm, [x, w], "another") is None
compiled = leader_code.load(gm, [x, w], sys.argv[1])
got = compiled(x, w)[0]
assert torch.allclose(got, want)
(given,) = torch.autograd.grad(got.sum(), [w])
(taken,) = torch.autograd.grad(want.sum(), [w])
assert torch.allclose(given, taken, atol=1e-6)
late = ("select_algorithm", "lowering", "compile_fx", "graph", "debug", "ir")
assert not [name for name in late if f"torch._inductor.{name}" in sys.modules]
from torch._inductor.select_algorithm import extern_kernels, AlgorithmSelectorCache
from torch._inductor.graph import GraphLowering
assert callable(GraphLowering.run_node)
import torch._inductor.debug as debug
with debug.record_and_log_graph_execution_order():
    assert torch._inductor.debug.RECORD_GRAPH_EXECUTION
    compiled(x, w)
    assert len(debug.GRAPH_EXECUTION_ORDER) == 1
assert torch.allclose(torch.compile(fn)(x, w)[0], want)
"""


def test_it_is_loaded_without_lowerings(tmp_path: Path) -> None:
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(text: str, *args: str) -> str:
        command = [sys.executable, "-c", PROGRAM + text, *args]
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
        return done.stdout.decode()

    run(LOADS, run(COMPILES).strip())


def test_a_module_is_imported_for_another_name() -> None:
    names = ["torch._inductor.codegen.memory_planning", "torch._inductor.graph"]
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        with leader_code.late_modules():
            from torch._inductor.codegen.memory_planning import _align

            assert callable(_align)
            assert type(sys.modules[names[0]]).__name__ == "_LateModule"
            from torch._inductor.codegen.memory_planning import AllocationPool

            assert AllocationPool.__module__ == names[0]
        assert sys.modules[names[0]].AllocationPool is AllocationPool
        assert names[1] not in sys.modules
    finally:
        sys.modules.update({k: m for k, m in before.items() if m is not None})


def stepped(folder: str, is_lost: bool) -> dict[str, Any]:
    """A first step: how far apart from one device's, and what this rank did for it."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    imports, loads = [], []
    load_inductor, load = compile_job._load_inductor, leader_code.load

    def noted(*args: Any) -> Any:
        loads.append(None if is_lost else load(*args))
        return loads[-1]

    compile_job._load_inductor = lambda: imports.append(0) or load_inductor()
    leader_code.load = noted
    try:
        torch.manual_seed(0)
        w = torch.randn(16, 24, requires_grad=True)
        x = torch.randn(8, 16)
        options = {"mesh": "dp=2", "plan": "propagate"}
        program = torch.compile(
            lambda x: torch.tanh(x @ w).square().mean(),
            backend="fxpar",
            options=options,
        )
        program(x).backward()
        (want,) = torch.autograd.grad(torch.tanh(x @ w).square().mean(), [w])
        return {
            "apart": float((w.grad - want).abs().max()),
            "imports": len(imports),
            "loads": [compiled is not None for compiled in loads],
        }
    finally:
        compile_job._load_inductor, leader_code.load = load_inductor, load
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_lost", [False, True])
def test_who_follows_loads(tmp_path: Path, is_lost: bool) -> None:
    pool = shared_pool(2)
    pool.renew()  # ranks look at their folder when they meet
    leader, follower = pool.run(stepped, str(tmp_path), is_lost, timeout=300.0)
    pool.renew()
    assert leader["apart"] < 1e-6 and follower["apart"] < 1e-6
    assert leader["imports"] == 1 and leader["loads"] == []
    # Where nothing is there, it compiles by itself.
    assert follower["loads"] == [not is_lost]
    assert follower["imports"] == int(is_lost)
