"""The only package that uses private torch names. Written for torch 2.13; 2.11 works.

Each name is imported where it is used first, since importing fxpar must stay light.
"""

from fxpar._torch import (
    alike_layers,
    aot,
    cpp_kernels,
    cuda,
    distributed,
    dtensor,
    dynamo,
    fake,
    flat_regions,
    inductor,
    inductor_lowerings,
    installation,
    known_values,
    layer_regions,
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
    "alike_layers",
    "aot",
    "cpp_kernels",
    "cuda",
    "distributed",
    "dtensor",
    "dynamo",
    "fake",
    "flat_regions",
    "inductor",
    "inductor_lowerings",
    "installation",
    "known_values",
    "layer_regions",
    "loops",
    "node_copies",
    "objects",
    "one_graph",
    "pipelining",
    "symbols",
    "traced_once",
    "version",
]
