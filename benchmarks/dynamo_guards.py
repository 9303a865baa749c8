"""Why Dynamo traces at every start: what its own record of a trace leaves out.

    python benchmarks/dynamo_guards.py

torch 2.13 can leave what Dynamo traced on disk, with its guards
(``TORCH_CACHING_PRECOMPILE=1``), for a start that traces nothing. Guards on which
function, class or module something is cannot be kept, and are dropped with a warning.
Here a model is compiled by Inductor in two starts that share a folder, with another
activation in the second: it is given the first one's program. "off by" is the largest
error of the compiled model against the same model uncompiled.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile

import torch

ACTIVATIONS = ("relu", "gelu")


class Block(torch.nn.Module):
    """A layer that holds its activation, a function."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.activation = getattr(torch.nn.functional, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))


def start(activation: str) -> None:
    """Compile, run and record a model; print how far off it is."""
    from torch._dynamo.precompile_context import PrecompileContext

    logging.getLogger("torch._dynamo.guards").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, x = Block(activation), torch.randn(4, 8)
    result = torch.compile(model, dynamic=False)(x)
    result.sum().backward()
    PrecompileContext.save_to_dynamo_cache()
    print(f"{activation}: off by {(result - model(x)).abs().max():.2g}")


def main() -> None:
    if sys.argv[1:]:
        start(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TORCH_CACHING_PRECOMPILE": "1",
            "TORCHINDUCTOR_CACHE_DIR": folder,
        }
        for activation in ACTIVATIONS:
            command = [sys.executable, __file__, activation]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
