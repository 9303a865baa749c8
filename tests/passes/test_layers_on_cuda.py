"""Layers that repeat, lowered by Inductor for CUDA without a GPU: one of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar import _torch
from fxpar.passes.order.outline_layers import outline_layers
from tests.helpers.pretended_cuda import Generated, generating

ROOT = Path(__file__).parents[2]
LAYERS = 5


def lowered(*, calls: bool, **settings: Any) -> tuple[int, Generated]:
    """A stack of layers, lowered for CUDA; how many calls of bodies it has."""
    from torch._inductor import compile_fx, config

    def stack(x: torch.Tensor, *ws: torch.Tensor) -> Any:
        for w in ws:
            x = (
                x
                + torch.sigmoid(torch.nn.functional.layer_norm(x, (64,)) @ w) * x.exp()
            )
        return (x.sum(),)

    with FakeTensorMode(), generating() as made, config.patch(settings):
        x = torch.empty(32, 64, device="cuda")
        ws = [torch.empty(64, 64, device="cuda") for _ in range(LAYERS)]
        table = _torch.inductor.decompositions()
        module = make_fx(stack, decomposition_table=table)(x, *ws)
        count = outline_layers(module.graph) if calls else 0
        module.recompile()
        compile_fx.compile_fx_inner(module, [x, *ws])
    (graph,) = made
    return count, graph


def test_layers_are_called_on_cuda() -> None:
    """The calls launch what the flat graph does, and move as much but what is handed
    from layer to layer."""
    (none, flat), (count, called) = lowered(calls=False), lowered(calls=True)
    assert (none, count) == (0, LAYERS)
    assert len(called.code) < len(flat.code)
    one, other = flat.walk(), called.walk()
    assert other.launches <= one.launches + LAYERS
    assert other.peak <= one.peak + 2 * 32 * 64 * 4


@pytest.mark.parametrize("setting", ["cpp_wrapper", "triton.cudagraphs"])
def test_layers_stay_flat_where_inductor_takes_no_calls(setting: str) -> None:
    from torch._inductor import config

    def stack(x: torch.Tensor, *ws: torch.Tensor) -> Any:
        for w in ws:
            x = torch.sigmoid((x * 2).sin() @ w) * x.exp()
        return (x,)

    given = [torch.randn(8, 8) for _ in range(1 + LAYERS)]
    with config.patch({setting: True}):
        module = make_fx(stack, tracing_mode="fake")(*given)
        assert outline_layers(module.graph) == 0
    assert outline_layers(module.graph) >= LAYERS - 1


def compared(folder: Path, side: str, layers: tuple[int, int], *how: str) -> Any:
    """Figures of a tiny Llama, with so many layers and with so many."""
    command = [sys.executable, str(ROOT / "benchmarks/bench_layers.py")]
    command += ["--device", "cuda", "--scale", "tiny", "--mesh", "dp=2,tp=2"]
    command += ["--side", side, *how, "--json", str(folder / "figures.json")]
    command += [word for depth in layers for word in ("--layers", str(depth))]
    subprocess.run(command, check=True, timeout=600)
    return json.loads((folder / "figures.json").read_text())["rows"]


@pytest.mark.slow
def test_a_llama_has_as_many_kernels_with_eight_layers_as_with_sixteen(
    tmp_path: Path,
) -> None:
    eight, sixteen = compared(tmp_path, "compile", (8, 16), "--no-triton")
    assert sixteen["kernels"] < 1.1 * eight["kernels"]
    assert sixteen["characters"] < 1.5 * eight["characters"]


@pytest.mark.slow
def test_fsdp2_compiles_one_layer_for_all(tmp_path: Path) -> None:
    """The peer of the benchmark is what its users have, down to Triton's code."""
    two, four = compared(tmp_path, "fsdp2", (2, 4))
    assert two["graphs"] == four["graphs"] == 2
    assert two["kernels"] == four["kernels"] <= four["configurations"]
    assert four["launches"] == 2 * two["launches"]
