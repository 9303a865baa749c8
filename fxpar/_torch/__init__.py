"""Holds all that uses private torch names. Torch 2.11 to 2.15 serve.

In: torch's objects and settings. Out: functions that the other packages call. Never: an
import of torch's internals before their first use, since importing fxpar must stay
light.
"""

from fxpar._torch import (
    aot,
    checkpoints,
    descriptors,
    distributed,
    dtensor,
    dynamo,
    fake,
    flat_regions,
    identical_layers,
    inductor,
    inductor_lowerings,
    layer_regions,
    loops,
    node_copies,
    node_texts,
    objects,
    one_graph,
    pipelining,
    symbols,
    traced_once,
    version,
)

__all__ = [
    "identical_layers",
    "aot",
    "checkpoints",
    "descriptors",
    "distributed",
    "dtensor",
    "dynamo",
    "fake",
    "flat_regions",
    "inductor",
    "inductor_lowerings",
    "layer_regions",
    "loops",
    "node_copies",
    "node_texts",
    "objects",
    "one_graph",
    "pipelining",
    "symbols",
    "traced_once",
    "version",
]
