"""Facts about ops beside their rules: what makes an op fast, not only right.

In: the target of a call. Out: its ``OpFacts``. Most follow from torch (views, tags,
schemas) and from the family of the op's rule (pointwise); ``FACTS`` adds what neither
says, by name, ``"aten.index"`` or, where overloads differ, ``"aten.view.dtype"``. An op
of a family that says nothing of its ops (``UNSAID``) needs a row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.sharding.rules import pointwise


@dataclass(frozen=True)
class OpFacts:
    """What holds of every call of an op."""

    # It gives its operand's memory, seen in another way.
    view: bool = False
    # It takes the shape of its result and keeps the elements in order: a view where
    # strides allow.
    reshapes: bool = False
    # It gives the elements of its operand, all of them in the same order.
    keeps_order: bool = False
    # It gives the elements of its operand, all of them, the dims in another order.
    permutes: bool = False
    # It gives parts of its operand along a dim.
    splits: bool = False
    # It gives elements of its operands as they are, at other places, and constants.
    moves: bool = False
    # It goes through its operand's memory by strides that the call gives.
    by_strides: bool = False
    # It moves down with the wait whose result it rearranges: what lowering puts behind
    # a collective. (Of all that moves elements, some schedules come out slower.)
    sinks: bool = False
    # It gives its operand under another name.
    renames: bool = False
    # It gives its operand in another dtype.
    casts: bool = False
    # What it gives may be a copy of its whole operand.
    copies: bool = False
    # It multiplies or divides one operand by another.
    scales: bool = False
    # Each element of the result is made of one element of each operand.
    pointwise: bool = False
    # Along a free factor of its rule it makes rows one by one, wherever they lie.
    by_row: bool = False
    # It goes by the order of rows along a dim that it needs whole: an axis that splits
    # that dim splits another one instead.
    orders: bool = False
    # Which of its results counts places along a dim.
    places: int | None = None
    # Of all that an operand holds it reads as much as it gives.
    gathers: bool = False
    # Its threads write at indices, in any order.
    scatters: bool = False
    # Made of no operand's elements: "filled" with one value (or any), or "counted".
    constant: str = ""
    # Which argument is the dim along which it needs whole rows, though nothing gets
    # smaller.
    rows: int | None = None
    # Inductor has a kernel of its own for it, which nothing is fused with.
    alone: bool = False
    # Inductor chooses the strides of what it gives, with what is around it.
    chosen_strides: bool = False
    # It makes random numbers.
    random: bool = False
    # It takes random numbers from a generator, in order.
    draws: bool = False
    # It writes to an operand.
    mutates: bool = False
    # Compiled, it writes over its first operand where nothing reads that later.
    over_first: bool = False
    # Ranks meet in it.
    communicates: bool = False
    # What it does with each point, a class of ``hardware.LIGHT``.
    work: str = "step"
    # Of a pool and of its backward, which argument is the window; ``work`` is done with
    # each element of each window.
    window: int | None = None
    # Of a product of matrices, which argument is its first factor.
    product: int | None = None
    # The factors of the product, as in a rule; "" if it does more than multiply and
    # add.
    equation: str = ""


def _each(names: str, namespace: str = "aten", **facts: Any) -> dict[str, dict]:
    """The same facts for each of the named ops."""
    return {f"{namespace}.{name}": facts for name in names.split()}


# Ops of these namespaces communicate, and those that take one of these arguments.
_NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"}
_GROUPS = {"group", "group_name", "process_group"}

_ROWS: tuple[dict[str, dict], ...] = (
    # Shapes and places.
    _each("view _unsafe_view reshape", reshapes=True),
    _each("reshape", view=False),  # torch calls it one
    _each("reshape", "prims", reshapes=True),
    _each(
        "view _unsafe_view reshape unsqueeze squeeze alias detach clone "
        "lift_fresh_copy",
        keeps_order=True,
    ),
    _each("view.dtype", reshapes=False, keeps_order=False),
    _each("view.default alias detach", renames=True),
    _each("permute transpose t", permutes=True),
    _each("clone", copies=True, moves=True),
    _each("cat constant_pad_nd repeat", copies=True, moves=True),
    _each("_to_copy", copies=True, casts=True),
    _each("cat constant_pad_nd", pointwise=True),
    _each("convert_element_type", "prims", casts=True),
    _each(
        "view_copy _reshape_copy _reshape_alias_copy permute_copy transpose_copy "
        "t_copy expand_copy squeeze_copy unsqueeze_copy as_strided_copy "
        "view_as_real_copy view_as_complex_copy pixel_shuffle pixel_unshuffle "
        "native_channel_shuffle "
        "slice_copy select_copy "
        "narrow_copy split_copy unsafe_split split_with_sizes_copy unbind_copy "
        "unsafe_split_with_sizes diagonal_copy unfold_copy lift_fresh_copy _lazy_clone",
        moves=True,
    ),
    _each(
        "slice_backward slice_scatter select_backward select_scatter stack _stack "
        "diagonal_backward diagonal_scatter diag_embed as_strided_scatter tril triu "
        "flip roll rot90 reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
        moves=True,
    ),
    _each(
        "broadcast_in_dim reshape collapse collapse_view split_dim squeeze transpose "
        "as_strided as_strided_scatter view_of_dtype rev cat",
        "prims",
        moves=True,
    ),
    _each("as_strided as_strided_copy as_strided_scatter", by_strides=True),
    _each("as_strided as_strided_scatter", "prims", by_strides=True),
    _each("interleave", "fxpar", copies=True, moves=True),
    _each("split split_with_sizes", splits=True),
    _each("mul div", scales=True),
    _each(
        "view.default reshape permute clone slice unsqueeze squeeze.dims", sinks=True
    ),
    # At indices.
    _each(
        "embedding index _unsafe_index _unsafe_masked_index gather index_select take "
        "_embedding_bag _embedding_bag_forward_only",
        gathers=True,
    ),
    _each(
        "index_put index_put_ _index_put_impl _index_put_impl_ _unsafe_index_put "
        "_unsafe_masked_index_put_accumulate index_add index_add_ index_copy "
        "index_copy_ index_reduce scatter scatter_ scatter_add scatter_add_ "
        "scatter_reduce scatter_reduce_ embedding_dense_backward "
        "_embedding_bag_dense_backward",
        scatters=True,
    ),
    # Row by row.
    _each(
        "view _unsafe_view reshape expand unsqueeze squeeze permute transpose t slice "
        "select split split_with_sizes cat clone alias slice_backward slice_scatter "
        "mean amax amin mm _softmax _softmax_backward_data",
        by_row=True,
    ),
    _each("view.dtype", by_row=False),
    _each("own_expert_mm own_expert_outer", "fxpar", by_row=True),
    _each("sum.dim_IntList sum.default", by_row=True),
    _each("sort argsort median nanmedian mode topk kthvalue", orders=True),
    _each(
        "_flash_attention_forward _flash_attention_backward "
        "_efficient_attention_forward _efficient_attention_backward",
        orders=True,
    ),
    _each("_varlen_attn _varlen_attn_backward", "torch_attn", orders=True),
    _each("flex_attention flex_attention_backward", "higher_order", orders=True),
    _each("argmax argmin", places=0),
    _each("topk kthvalue sort max.dim min.dim", places=1),
    # Constants.
    _each(
        "full zeros ones empty empty_permuted empty_strided _efficientzerotensor "
        "full_like zeros_like ones_like empty_like new_full new_zeros new_ones "
        "new_empty new_empty_strided scalar_tensor",
        constant="filled",
    ),
    _each(
        "full empty empty_permuted empty_strided full_like scalar_tensor",
        "prims",
        constant="filled",
    ),
    _each("iota", "prims", constant="counted"),
    _each("arange linspace logspace eye tril_indices triu_indices", constant="counted"),
    _each("fft_fftfreq fft_rfftfreq", constant="counted"),
    # Whole rows, kernels of their own.
    _each("cumsum cumprod _softmax _log_softmax", rows=1),
    _each("_softmax_backward_data _log_softmax_backward_data", rows=2),
    _each(
        "sort topk nonzero nonzero_static nonzero_numpy unique_dim unique_consecutive "
        "unique_dim_consecutive median",
        alone=True,
    ),
    _each("convolution convolution_backward", chosen_strides=True),
    # Sums over microbatches.
    _each("accumulate", "fxpar", alone=True),
    _each("accumulate accumulate_product", "fxpar", over_first=True),
    # Random numbers by global index, and Inductor's own.
    _each("random randint seeds", "fxpar", random=True),
    _each(
        "inductor_seed inductor_seeds inductor_lookup_seed inductor_random "
        "inductor_randint inductor_rand_eager_offset inductor_rand_eager_offsets",
        "prims",
        random=True,
    ),
    # What a point takes.
    _each("div reciprocal sqrt rsqrt", work="root"),
    _each("div reciprocal sqrt rsqrt", "prims", work="root"),
    _each("exp sigmoid _softmax _log_softmax", work="exp"),
    _each("log log1p", work="log"),
    _each("sin cos", work="sin"),
    _each("tanh", work="tanh"),
    _each("erf gelu", work="erf"),
    _each("exp", "prims", work="exp"),
    _each("log log1p", "prims", work="log"),
    _each("sin cos", "prims", work="sin"),
    _each("tanh", "prims", work="tanh"),
    _each("erf", "prims", work="erf"),
    _each("random randint", work="draw"),
    _each("random randint", "fxpar", work="draw"),
    _each("inductor_random", "prims", work="draw"),
    _each(
        "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d "
        "avg_pool3d",
        work="pool",
        window=1,
    ),
    _each("_low_memory_max_pool_with_offsets", "prims", work="pool", window=1),
    _each(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
        "avg_pool2d_backward avg_pool3d_backward",
        work="pool",
        window=2,
    ),
    # Products.
    _each("mm bmm _scaled_mm", product=0),
    _each("expert_mm expert_outer grouped_mm grouped_outer", "fxpar", product=0),
    _each("own_expert_mm own_expert_outer", "fxpar", product=0),
    _each("addmm baddbmm", product=1),
    _each("accumulate_product", "fxpar", product=1),
    _each("accumulate_product.default", "fxpar", equation="m k, k n -> m n"),
    _each("mm.default addmm.default", equation="m k, k n -> m n"),
    _each("bmm.default baddbmm.default", equation="b m k, b k n -> b m n"),
)

FACTS: dict[str, dict[str, Any]] = {}
for _row in _ROWS:
    for _name, _facts in _row.items():
        FACTS[_name] = FACTS.get(_name, {}) | _facts

# Families of rules that say nothing of what their ops cost: each op has facts by torch
# or a row of ``FACTS``, or is listed in ``LIGHT`` as one that has none.
UNSAID = ("views", "slicing", "padding", "indexing", "sources")
LIGHT = _each(
    "unfold_backward reflection_pad1d_backward reflection_pad2d_backward "
    "reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward index_fill nll_loss_forward nll_loss2d_forward "
    "nll_loss_backward nll_loss2d_backward "
    "bucketize searchsorted masked_scatter masked_scatter_backward fill"
) | _each("fill", "prims")


@cache
def op_facts_of(target: Any) -> OpFacts:
    """The facts of a call's target; of what is no op of torch's, none hold."""
    if not isinstance(target, _torch.inductor.OpOverload):
        name = _torch.aot.higher_order_name(target) or ""
        return OpFacts(**FACTS.get(name.replace("::", "."), {}))
    tags, schema = target.tags, _torch.objects.schema_of(target)
    draws = torch.Tag.nondeterministic_seeded in tags
    view = bool(getattr(target, "is_view", False))
    single = not view and (torch.Tag.pointwise in tags or target in pointwise.ROWS)
    derived: dict[str, Any] = {
        "view": view,
        "moves": view,
        "pointwise": single,
        "by_row": single and not draws,
        "random": draws,
        "draws": draws,
        "mutates": schema.is_mutable,
        "communicates": target.namespace in _NAMESPACES
        or any(argument.name in _GROUPS for argument in schema.arguments),
    }
    if FACTS.get(name_of(target), {}).get("reshapes"):
        derived["moves"] = True
    return OpFacts(**derived | stated_facts(str(target)))


def takes_from_generator(node: fx.Node) -> bool:
    """Whether a call takes numbers from a generator, so that what draws before it
    counts. Numbers by index (``fxpar::random``) do not."""
    return op_facts_of(node.target).draws and not _drops_nothing(node)


def makes_random_numbers(node: fx.Node) -> bool:
    """Whether a call makes random numbers, from a generator or by index."""
    return op_facts_of(node.target).random and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a call is attention without dropout, which draws no numbers."""
    schema = _torch.objects.schema_of(node.target)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            positional = node.args[i] if i < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", positional) == 0.0
    return False


def stated_facts(name: str) -> dict[str, Any]:
    """What ``FACTS`` says of an overload, ``"aten.view.dtype"``."""
    return FACTS.get(name.rpartition(".")[0], {}) | FACTS.get(name, {})


def name_of(target: Any) -> str:
    """An op without its overload, as ``FACTS`` names it."""
    return str(target).rpartition(".")[0]
