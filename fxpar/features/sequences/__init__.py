"""Adds attention over split sequences, and softmax over split dims.

In: a graph with attention, or with a maximum along a dim. Out: rows of the list, which
are on for it; local forms of attention; verb ``balance``, and rings of keys and values,
for schedules. Never: a change to a graph without them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from fxpar.features.feature import Feature, has, later, names_of_ops, steps_of
from fxpar.fusion.apply_schedule import NODE, VERBS
from fxpar.fusion.schedule import PROPOSALS, Schedule, Verb
from fxpar.fusion.verbs.overlap import SCHEMES, OverlapScheme
from fxpar.sharding.op_table import keys
from fxpar.sharding.ops import LOCAL

_RINGS = f"{__name__}.overlap_attention"


def _has_attention(names: Collection[str], _: Any = None) -> bool:
    return any("attention" in name for name in names)


def _is_attended(_: Sequence[fx.Node], ends: Sequence[fx.Node]) -> bool:
    return "attention" in str(ends[0].target)


def _lines(state: Any) -> dict[str, Schedule]:
    names = names_of_ops(state.graph(state.schedule))
    if not (_has_attention(names) and _is_ring_or_causal(names, state)):
        return {}
    lines: dict[str, Schedule] = _lines_of_attention(state)
    return lines


_is_ring_or_causal = has(
    "all_gather fxpar.causal_attention fxpar.causal_attention_backward"
)
_lines_of_attention = later(_RINGS, "proposals")

FEATURE = Feature(
    "sequences",
    {
        "random_by_index": [
            steps_of(f"{__name__}.normalize_masks")("causal_masks", _has_attention)
        ],
        "exact_exchanges": [
            steps_of(f"{__name__}.softmax_pairs")("pair_reductions", has("aten.amax"))
        ],
    },
    ops=[f"{__name__}.causal_attention"],
)

# Module -> namespace and names of the ops to which, and to whose backwards, it gives
# local forms.
_FORMS = {
    "local_attention": "_scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    "local_documents": "torch_attn::_varlen_attn",
    "local_flex": "higher_order::flex_attention",
}
for _module, _names in _FORMS.items():
    for _end, _form in (("", "forward"), ("_backward", "backward")):
        _ops = keys(" ".join(name + _end for name in _names.split()))
        LOCAL.update(dict.fromkeys(_ops, later(f"{__name__}.{_module}", _form)))

_BALANCE = later(f"{__name__}.balance", "balance")
VERBS["balance"] = Verb("balance(attention)", _BALANCE, (NODE,))
PROPOSALS.append(_lines)
SCHEMES.append(OverlapScheme(_is_attended, later(_RINGS, "overlap")))
