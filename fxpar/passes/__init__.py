"""Rewrites of graphs, from what is traced to what a rank runs; ``fxpar.pipeline`` has
their order."""

from fxpar.passes.normalize import random as _random  # noqa: F401
