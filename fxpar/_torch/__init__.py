"""The only package that uses private torch names. Written for torch 2.13; 2.11 works.

Each name is imported where it is used first, since importing fxpar must stay light.
"""

from fxpar._torch import (
    aot,
    cpp_kernels,
    cuda,
    distributed,
    dtensor,
    dynamo,
    fake,
    inductor,
    inductor_lowerings,
    installation,
    known_values,
    loops,
    node_copies,
    objects,
    one_graph,
    pipelining,
    symbols,
    traced_once,
    version,
)

__all__ = [
    "aot",
    "cpp_kernels",
    "cuda",
    "distributed",
    "dtensor",
    "dynamo",
    "fake",
    "inductor",
    "inductor_lowerings",
    "installation",
    "known_values",
    "loops",
    "node_copies",
    "objects",
    "one_graph",
    "pipelining",
    "symbols",
    "traced_once",
    "version",
]
