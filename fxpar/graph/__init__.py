"""What passes make nodes with: the builder, steps of reshards, bodies, fxpar's ops."""

from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers fxpar's ops)
