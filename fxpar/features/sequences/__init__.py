"""Adds attention over split sequences, and softmax over split dims.

In: a graph with attention, or with a maximum along a dim. Out: rows of the list, which
are on for it. Never: a change to a graph without them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fxpar.features.feature import Feature, has, steps_of

_step = steps_of(f"{__name__}.sequence_steps")


def _has_attention(names: Collection[str], _: Any) -> bool:
    return any("attention" in name for name in names)


FEATURE = Feature(
    "sequences",
    {
        "random_by_index": [_step("causal_masks", _has_attention)],
        "mark_first_rows": [_step("pair_reductions", has("aten.amax"))],
    },
)
