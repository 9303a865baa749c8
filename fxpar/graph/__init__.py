"""Has what passes build nodes with: the builder, steps, bodies, and fxpar's ops."""

from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
