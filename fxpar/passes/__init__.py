"""Rewrites of graphs, from what is traced to what a rank runs; ``fxpar.pipeline`` has
their order."""

from fxpar.passes import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
from fxpar.passes.normalize import random as _random  # noqa: F401
