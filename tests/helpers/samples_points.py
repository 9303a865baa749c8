"""Sample calls for the rows of embeddings in bags, statistics, distances and the like:
``SAMPLES[op] = [(args, kwargs), ...]``, small float64 tensors whose dims divide by 2
and mostly by 4. Ops in ``SHAPES_ONLY`` draw random numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpar.sharding.op_table import keys

_generator = torch.Generator().manual_seed(11)

Sample = tuple[tuple, dict[str, Any]]

SAMPLES: dict[Any, list[Sample]] = {}
UNRUNNABLE: dict[Any, list[Sample]] = {}
SHAPES_ONLY: set[Any] = set(keys("multinomial"))

aten = torch.ops.aten


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def _u(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64)


def _i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def _s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


def _add(names: str, *calls: Sample) -> None:
    for key in keys(names):
        SAMPLES.setdefault(key, []).extend(calls)


# The loss of a linear layer, in chunks of the batch

_X, _W, _LABELS = _f(8, 4), _f(6, 4), _i(6, 8)
_LABELS[3] = 2
_LOSS = "torch_nn::_linear_cross_entropy_batch_chunked"
_HOW = (2, "balanced", torch.float64)


def _loss(reduction: str, *wanted: bool, ignore: int = -100, given: bool) -> Sample:
    more = (_f(6), _u(6)) if given else (None, None)
    smoothing = 0.0
    return _s(
        *(_X, _W, _LABELS, *more, reduction, ignore, smoothing, *_HOW, True, *wanted)
    )


SAMPLES[_LOSS] = [
    _loss("sum", True, True, True, given=True),
    _loss("sum", True, False, False, given=False, ignore=2),
    _loss("mean", True, True, False, given=True, ignore=2),
]
SAMPLES[f"{_LOSS}_no_reduction"] = [
    _s(_X, _W, _LABELS, None, None, 2, *_HOW),
    _s(_X, _W, _LABELS, _f(6), _u(6), -100, *_HOW),
]

# Bags: sums, means and maxima, scaled, by count, with padding

_TABLE, _INDEX, _FIRST = _f(10, 8), _i(10, 12), torch.tensor([0, 3, 3, 8])
_SCALES = _f(12)
_BAGS: list[dict[str, Any]] = [
    {"mode": 0},
    {"mode": 1},
    {"mode": 2},
    {"mode": 0, "per_sample_weights": _SCALES},
    {"mode": 1, "padding_idx": 3},
    {"mode": 2, "padding_idx": 3},
    {"mode": 0, "per_sample_weights": _SCALES, "padding_idx": 9},
    {"mode": 0, "scale_grad_by_freq": True},
]
for _how in _BAGS:
    _call = (_TABLE, _INDEX, _FIRST), _how
    _add("_embedding_bag _embedding_bag_forward_only", _call)
    _, _bag_of, _sizes, _found = aten._embedding_bag(*_call[0], **_how)
    _rest = (
        *(10, _how.get("scale_grad_by_freq", False), _how["mode"]),
        *(_how.get("per_sample_weights"), _how.get("padding_idx", -1)),
    )
    _add(
        "_embedding_bag_dense_backward",
        _s(_f(4, 8), _INDEX, _bag_of, _sizes, _found, *_rest),
    )
    _head = (_f(4, 8), _INDEX, _FIRST, _bag_of, _sizes, _found)
    _add("_embedding_bag_backward", _s(*_head, *_rest[:3], False, *_rest[3:]))
_add(
    "_embedding_bag _embedding_bag_forward_only",
    (
        (_TABLE, _INDEX, torch.tensor([0, 0, 5, 12])),
        {"mode": 1, "include_last_offset": True},
    ),
)
_of = aten._embedding_bag(_TABLE, _INDEX, _FIRST, False, 0, False, _SCALES)[1]
_add(
    "_embedding_bag_per_sample_weights_backward",
    _s(_f(4, 8), _TABLE, _INDEX, _FIRST, _of, 0),
    _s(_f(4, 8), _TABLE, _INDEX, _FIRST, _of, 0, 3),
)

# What counts, or draws, along whole dims

_MASK = _i(2, 4, 8).bool()
_add(
    "masked_scatter_backward",
    _s(_f(4, 8), _MASK, [40]),
    _s(_f(4, 8), _MASK, [6, 8]),
    _s(_f(4, 8), _i(2, 4, 1).bool(), [32]),
    _s(_f(2, 4, 8), _MASK, [8, 8]),
)
_add("nonzero_static", _s(_i(2, 4, 8), size=12), _s(_f(4), size=2, fill_value=7))
_add("multinomial", _s(_u(4, 8), 2), _s(_u(8), 4, True))
_add("hash_tensor", _s(_f(4, 8)), _s(_f(4, 8), [1]), _s(_f(4, 8), [0], keepdim=True))

# Histograms, with bins that are given and such as depend on the data

_EDGES = torch.linspace(-2, 2, 5, dtype=torch.float64)
_ENDS = {"range": [-2.0, 2.0]}
_add("histogram.bins_tensor", _s(_f(4, 8), _EDGES), _s(_f(8), _EDGES, density=True))
_add("histogram.bins_tensor", _s(_f(4, 8), _EDGES, weight=_u(4, 8)))
_add(
    "histogram.bin_ct",
    _s(_f(4, 8), 4),
    _s(_f(4, 8), 4, **_ENDS),
    _s(_f(4, 8), 4, **_ENDS, weight=_u(4, 8)),
    _s(_f(8), 4, **_ENDS, density=True),
)
_BOTH = {"range": [-2.0, 2.0, -1.0, 1.0]}
_add(
    "_histogramdd_from_bin_cts _histogramdd_bin_edges",
    _s(_f(8, 2), [4, 2]),
    _s(_f(8, 2), [4, 2], **_BOTH),
    _s(_f(4, 8, 2), [4, 2], **_BOTH, weight=_u(4, 8)),
    _s(_f(8, 2), [4, 2], **_BOTH, density=True),
)
_add(
    "_histogramdd_from_bin_tensors",
    _s(_f(8, 2), [_EDGES, _EDGES]),
    _s(_f(4, 8, 2), [_EDGES, _EDGES / 2], weight=_u(4, 8)),
    _s(_f(8, 2), [_EDGES, _EDGES], density=True),
)

# Segments

_LENGTHS = torch.tensor([[3, 0, 5], [4, 4, 0], [1, 1, 6], [8, 0, 0]])
_STARTS = torch.nn.functional.pad(_LENGTHS.cumsum(1), (1, 0))
for _name in ("sum", "mean", "max", "min", "prod"):
    for _x, _cut in (
        (_f(8, 4), {"lengths": _LENGTHS[0]}),
        (_f(8, 4), {"offsets": _STARTS[0]}),
        (_f(4, 8, 2), {"lengths": _LENGTHS, "axis": 1}),
    ):
        _how = {**_cut, "initial": 1.0}
        _y = aten.segment_reduce(_x, _name, **_how)
        _add("segment_reduce", _s(_x, _name, **_how))
        _back = _s(_f(*_y.shape), _y, _x, _name, **_how)
        _add("_segment_reduce_backward", _back)

# Distances by several norms, of batches that stretch

for _p in (2.0, 0.0, 1.0, 3.0, float("inf")):
    for _x, _y in (
        (_f(4, 8), _f(6, 8)),
        (_f(2, 1, 4, 8), _f(4, 6, 8)),
    ):
        _add("_cdist_forward", _s(_x, _y, _p, None))
    _x, _y = _f(2, 4, 8), _f(2, 6, 8)
    _far = aten._cdist_forward(_x, _y, _p, None)
    _add("_cdist_backward", _s(_f(2, 4, 6), _x, _y, _p, _far))
    _x = _f(4, 8)
    _add("_pdist_forward", _s(_x, _p))
    _add("_pdist_backward", _s(_f(6), _x, _p, aten._pdist_forward(_x, _p)))

# Products of three, as a bilinear layer makes them, and pools at random places

_add(
    "_trilinear",
    _s(_f(8, 4), _f(6, 4, 2), _f(8, 2), [1, 3], [0], [1, 2], [2, 3]),
    _s(_f(8, 4), _f(1, 4), _f(8, 4), [1], [1], [1], [2]),
    _s(_f(8, 4), _f(8, 4), _f(8, 4), [], [], [], [0]),
)
for _k in (2, 3):
    for _lead in ((2, 4), (4,)):
        _x, _where = _f(*_lead, *[6] * _k), _u(*(1, *_lead)[-2:], _k)
        _pool = getattr(aten, f"fractional_max_pool{_k}d")
        _y, _at = _pool(_x, [2] * _k, [3] * _k, _where)
        _add(f"fractional_max_pool{_k}d", _s(_x, [2] * _k, [3] * _k, _where))
        _back = _s(_f(*_y.shape), _x, [2] * _k, [3] * _k, _at)
        _add(f"fractional_max_pool{_k}d_backward", _back)
