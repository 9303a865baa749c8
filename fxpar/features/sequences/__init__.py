"""Adds attention over split sequences, and softmax over split dims.

In: a graph with attention, or with a maximum along a dim. Out: rows of the list, which
are on for it; local forms of attention; verb ``balance``, and rings of keys and values,
for schedules. Never: a change to a graph without them.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, later, steps_of
from fxpar.fusion.apply_schedule import NODE, VERBS
from fxpar.fusion.schedule import PROPOSALS, Verb
from fxpar.fusion.verbs.overlap import SCHEMES, OverlapScheme
from fxpar.sharding.op_table import keys
from fxpar.sharding.ops import LOCAL

_VERBS = f"{__name__}.overlap_attention"
_ATTENTION = "*attention*"

FEATURE = Feature(
    "sequences",
    {
        "random_by_index": [
            steps_of(f"{__name__}.normalize_masks")("causal_masks", _ATTENTION)
        ],
        "exact_exchanges": [
            steps_of(f"{__name__}.softmax_pairs")("pair_reductions", "aten.amax")
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

VERBS["balance"] = Verb("balance(attention)", later(_VERBS, "balance"), (NODE,))
PROPOSALS.append((_ATTENTION, later(_VERBS, "proposals")))
SCHEMES.append(OverlapScheme(_ATTENTION, later(_VERBS, "overlap")))
