"""Holds the passes, which rewrite a traced graph into the graph that a rank runs;
``fxpar.pipeline`` has their order."""

from fxpar.passes.normalize import random as _random  # noqa: F401
