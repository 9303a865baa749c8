"""What Dynamo's packages would spare a rank that calls what another rank has traced.

    python benchmarks/dynamo_packages.py [--short] [--layers N] [--json FILE]

Plain torch (``torch._dynamo.package``) under a backend of our own, whose product is
kept. Two models: ``plain``, of modules of this file, and Hugging Face's ``llama``. One
process traces a model and saves the package, another loads it and calls the model;
``trace`` and ``load`` are their CPU seconds up to the end of the first call, or to the
``error`` that loading ended with; ``graphs``: that were traced though there was a
package; ``unguarded``: guards that torch leaves out of a package, by kind. What those
look at is compared by nobody, so a rank with another program would be given this one:
``dynamo_guards.py`` shows the wrong numbers.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import conditions, llama, write
from torch import nn
from torch._dynamo import config, package
from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(256) for _ in range(2)])
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.gate, self.up = nn.Linear(256, 704), nn.Linear(256, 704)
        self.down = nn.Linear(704, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, 8, 32)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2048, 256), nn.Linear(256, 2048)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Product(BackendCacheArtifact[Any]):
    """What the backend makes of a graph: zeros, as many as it has results."""

    def after_deserialization(self) -> Any:
        return lambda *_: [torch.zeros(()) for _ in range(self.content)]


class Unguarded(logging.Handler):
    """Counts the guards that torch says it leaves out, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if "is dropped with caching_precompile" in str(record.msg):
            kind, _ = record.args or ("", "")
            self.kinds[str(kind)] += 1


def worker(state: str, name: str, layers: int, folder: str) -> dict[str, Any]:
    """Trace a model and save the package, or load it; what that took."""
    torch.set_num_threads(1)
    config.caching_precompile = True
    unguarded, guards = Unguarded(), logging.getLogger("torch._dynamo.guards")
    guards.addHandler(unguarded)
    guards.propagate = False
    logging.getLogger("torch._guards").setLevel(logging.CRITICAL)  # is in ``error``
    model = Plain(layers) if name == "plain" else llama(layers)
    ids, store = torch.zeros(2, 128, dtype=torch.long), package.DiskDynamoStore(folder)
    graphs: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        product = Product(gm._backend_id, len(gm.graph.output_node().args[0]))
        PrecompileContext.record_artifact(product)
        return product.after_deserialization()

    begun, error = time.process_time(), ""
    try:
        if state == "trace":
            made = package.CompilePackage(model.forward)
        else:
            made, backends = store.load_package(model.forward, "package")
            made.install(backends)
        run = torch._dynamo.optimize(backend, package=made)(model)
        run(input_ids=ids, labels=ids)
    except Exception as raised:
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    cpu = time.process_time() - begun
    if state == "trace":
        store.save_package(made, "package")
        return {"trace": cpu, "unguarded": dict(unguarded.kinds)}
    return {"load": cpu, "graphs": len(graphs), "error": re.sub(r"_\d{6,}", "", error)}


def run(name: str, layers: int) -> dict[str, Any]:
    """Both states, each in a process of its own."""
    figures: dict[str, Any] = {"model": name, "layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        for state in ("trace", "load"):
            out = Path(folder, f"{state}.json")
            command = [sys.executable, __file__, "--worker", state, folder, str(out)]
            command += ["--model", name, "--layers", str(layers)]
            subprocess.run(command, check=True)
            figures |= json.loads(out.read_text())
    print(figures, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="2 layers")
    parser.add_argument("--layers", type=int, action="append")
    parser.add_argument("--model", action="append", choices=("plain", "llama"))
    parser.add_argument("--json")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        state, folder, out = args.worker
        figures = worker(state, args.model[0], args.layers[0], folder)
        Path(out).write_text(json.dumps(figures))
        return
    before = conditions()
    depths = args.layers or ([2] if args.short else [2, 32])
    rows = [run(x, n) for x in args.model or ("plain", "llama") for n in depths]
    write(args.json, "dynamo_packages", {"conditions": before, "rows": rows})


if __name__ == "__main__":
    main()
