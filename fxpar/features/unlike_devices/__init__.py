"""Adds shares of the batch for ranks of different speed.

In: a mesh with speeds or shares, or a plan with them. Out: the mesh with shares of its
batch axes. Never: a difference between ranks.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, steps_of

_step = steps_of(f"{__name__}.speed_shares")

FEATURE = Feature(
    "unlike_devices",
    {"show_bodies": [_step("share_by_speed", setting="request.has_unlike_ranks")]},
)
