"""What a process has done from which tests fork ranks: imported, planned and traced
what most ranks begin with, since each of them would need a second for it.

Imported once, by Python's fork server; never starts a thread, nor a process group.
"""

from __future__ import annotations

import contextlib
import importlib

from tests.helpers.processes import collect_rarely

IMPORTED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "fxpar.backend",
    "numba",
    "scipy.optimize",
    "tqdm",
    "transformers.models.llama.modeling_llama",
]

collect_rarely()
for _name in IMPORTED:
    with contextlib.suppress(ImportError):  # what is not installed is left out
        importlib.import_module(_name)


def _prepare() -> None:
    import torch
    import tqdm

    import fxpar

    tqdm.tqdm.monitor_interval = 0  # its thread would be missing in forks
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    fxpar.plan(model, x, mesh="dp=2,tp=2", mode="search", grad=True)
    torch._dynamo.reset()


_prepare()
