"""What the process has done that tests fork ranks from: it has imported, traced and
planned what most of them begin with, for which each would need a second.

Imported once, by Python's fork server; never starts a thread or a process group, or
asks for a GPU, which its forks could not use.
"""

from __future__ import annotations

import contextlib
import importlib

import torch

from tests.helpers.processes import collect_rarely, set_aside

IMPORTED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "fxpar.backend",
    "numba",
    "scipy.optimize",
    "torch.distributed.optim",
    "transformers.models.llama.modeling_llama",
]


def prepare() -> None:
    import tqdm

    import fxpar

    tqdm.tqdm.monitor_interval = 0  # forks would lack its thread
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    for backend in ("aot_eager", "inductor"):
        with torch._inductor.config.patch(compile_threads=1):
            torch.compile(model, backend=backend)(x).sum().backward()
    # Compiles five programs in each folder of caches that is empty.
    torch._inductor.cpu_vec_isa.pick_vec_isa()
    fxpar.plan(model, x, mesh="dp=2,tp=2", mode="search", grad=True)
    torch._dynamo.reset()


collect_rarely()
for _name in IMPORTED:
    with contextlib.suppress(ImportError):  # what is not installed is left out
        importlib.import_module(_name)
if torch.version.cuda is None:  # else a backward starts threads, which forks lack
    prepare()
    set_aside()
