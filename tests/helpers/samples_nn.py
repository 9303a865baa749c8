"""Sample calls for every row of the indexing, normalization, convolution and attention
tables: ``SAMPLES[op] = [(args, kwargs), ...]``, small float64 tensors whose dims divide
by 2 and mostly by 4. ``UNRUNNABLE`` holds, on the meta device, the ops that no CPU
kernel computes; of those only rule and shapes are checked. Keys are overloads, or names
of ops that torch registers late.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

aten = torch.ops.aten

_generator = torch.Generator().manual_seed(7)

Sample = tuple[tuple, dict[str, Any]]

SAMPLES: dict[Any, list[Sample]] = {}
UNRUNNABLE: dict[Any, list[Sample]] = {}


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def _i(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator)


def _b(*shape: int) -> torch.Tensor:
    return _i(2, *shape).bool()


def _perm(n: int, dim: int, *shape: int) -> torch.Tensor:
    """Indices below ``n``, no two alike along ``dim``."""
    keys = list(shape)
    keys[dim] = n
    order = torch.rand(*keys, generator=_generator).argsort(dim)
    return order.narrow(dim, 0, shape[dim]).contiguous()


def _s(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


# Indexing

_LISTS = [
    (_f(8, 4), [_i(8, 4, low=-8)]),
    (_f(8, 4), [_i(8, 4, 8)]),
    (_f(8, 4), [None, _i(4, 8)]),
    (_f(8, 4), [_i(8)]),
    (_f(8), [_i(8)]),
    (_f(4, 8, 4), [None, _i(8, 4, 4, low=-8)]),
    (_f(4, 8, 4), [None, _i(8, 4, 4), _i(4, 4)]),
    (_f(4, 8, 4), [_i(4, 8), None, _i(4, 8, low=-4)]),
    (_f(4, 8, 4), [_i(4, 4, 1), _i(8, 1, 8)]),
    (_f(4, 8, 4), [_i(4, 4, 1), None, _i(4, 8)]),
    (_f(4, 4, 8, 4), [None, _i(4, 8), None, _i(4, 4, 8)]),
]

for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
    SAMPLES[op] = [_s(x, indices) for x, indices in _LISTS]
SAMPLES[aten.index.Tensor] += [
    _s(_b(8, 4), [_i(8, 4)]),
    _s(_i(9, 8, 4), [_i(8, 4)]),
]


def _read(x: torch.Tensor, indices: list) -> torch.Tensor:
    return _f(*aten.index.Tensor(x, indices).shape)


for op in (aten.index_put.default, aten._unsafe_index_put.default):
    SAMPLES[op] = [
        *(_s(x, indices, _read(x, indices), True) for x, indices in _LISTS),
        _s(_f(8, 4), [_i(8, 4, 8)], _f(1, 4), True),
        _s(_f(8, 4), [_i(8, 4, 8)], _f(8, 1), True),
        _s(_f(8, 4), [_i(8, 4)], _f(), True),
        _s(_f(8, 4), [_perm(8, 0, 4)], _f(4, 4)),
        _s(_f(8, 4), [_perm(8, 0, 4) - 8], _f(4, 4), False),
        _s(_f(4, 8, 4), [None, _perm(8, 0, 4)], _f(4, 4, 4)),
        _s(_f(4, 8, 4), [_perm(4, 0, 4), None, _i(4, 4)], _f(4, 8)),
        _s(_f(4, 8, 4), [_perm(4, 0, 4), _i(8, 4)], _f(1, 1)),
        _s(_f(8, 4), [_b(8, 4)], _f()),
        _s(_f(8, 4), [_b(8, 4)], _f(1), True),
        _s(_f(8, 4), [_b(8)], _f(4)),
        _s(_f(4, 8, 4), [None, _b(8)], _f(4)),
        _s(_f(8, 4), [torch.tensor([True, False] * 4)], _f(4, 4)),
    ]

SAMPLES[aten._unsafe_masked_index.default] = [
    _s(_f(4, 8, 4), _b(8, 1), [None, _i(8, 8, 1), _i(4, 4)], 0),
    _s(_f(4, 8), _b(8), [None, _i(8, 8)], 2.5),
    _s(_f(4, 8), _b(4, 8), [None, _i(8, 8, low=-3)], 0.0),
]
SAMPLES[aten._unsafe_masked_index_put_accumulate.default] = [
    _s(_f(4, 8, 4), _b(8, 1), [None, _i(8, 8, 1), _i(4, 4)], _f(4, 8, 4)),
    _s(_f(4, 8), _b(8), [None, _i(8, 4, 8)], _f(4, 4, 8)),
]

SAMPLES[aten.gather.default] = [
    _s(_f(4, 8), 1, _i(8, 4, 4)),
    _s(_f(4, 8), -1, _i(8, 4, 1)),
    _s(_f(8, 4), 0, _i(8, 4, 4)),
    _s(_f(8, 4), 0, _i(8, 4, 2)),
    _s(_f(4, 8, 4), 1, _i(8, 4, 4, 4)),
    _s(_b(4, 8), 1, _i(8, 4, 4)),
]
SAMPLES[aten.scatter.src] = [
    _s(_f(4, 8), 1, _perm(8, 1, 4, 4), _f(4, 4)),
    _s(_f(4, 8), -1, _i(8, 4, 1), _f(4, 1)),
    _s(_f(8, 4), 0, _perm(8, 0, 4, 4), _f(8, 8)),
    _s(_f(8, 4), 0, _perm(8, 0, 4, 2), _f(4, 2)),
    _s(_f(4, 8, 4), 1, _perm(8, 1, 4, 8, 4), _f(4, 8, 4)),
]
SAMPLES[aten.scatter.value] = [
    _s(_f(4, 8), 1, _i(8, 4, 1), -1.0),
    _s(_f(4, 8, 4), 1, _i(8, 4, 1, 4), 3),
    _s(_f(4, 8), 1, _i(8, 4, 4), 2.0),
    _s(_f(8, 4), 0, _i(8, 2, 4), 0),
]
_ADDED = [
    (_f(4, 8), 1, _i(8, 4, 4), _f(4, 4)),
    (_f(4, 8), -1, _i(8, 4, 1), _f(4, 1)),
    (_f(8, 4), 0, _i(8, 4, 4), _f(8, 4)),
    (_f(8, 4), 0, _i(8, 4, 4), _f(4, 8)),
    (_f(8, 4), 0, _i(8, 16, 4), _f(16, 4)),
    (_f(4, 8, 4), 1, _i(8, 4, 4, 4), _f(4, 4, 4)),
    (_f(4, 8, 4), 1, _i(8, 2, 4, 4), _f(2, 4, 4)),
]
SAMPLES[aten.scatter_add.default] = [_s(*args) for args in _ADDED]
SAMPLES[aten.scatter.reduce] = [
    _s(*args, reduce=name) for args in _ADDED[:3] for name in ("add", "multiply")
]
SAMPLES[aten.scatter.value_reduce] = [
    _s(*args[:3], 1.5, reduce=name)
    for args in _ADDED[:3]
    for name in ("add", "multiply")
]
SAMPLES[aten.scatter_reduce.two] = [
    _s(*args, name, include_self=include)
    for args in _ADDED[:3]
    for name in ("sum", "prod", "mean", "amax", "amin")
    for include in (True, False)
] + [_s(*_ADDED[4], "sum")]

SAMPLES[aten.index_add.default] = [
    _s(_f(8, 4), 0, _i(8, 4), _f(4, 4)),
    _s(_f(4, 8), -1, _i(8, 4), _f(4, 4), alpha=2),
    _s(_f(8, 4), 0, _i(8), _f(1, 4)),
]
SAMPLES[aten.index_reduce.default] = [
    _s(_f(8, 4), 0, _i(8, 4), _f(4, 4), name, include_self=include)
    for name in ("prod", "mean", "amax", "amin")
    for include in (True, False)
]

SAMPLES[aten.embedding.default] = [
    _s(_f(8, 4), _i(8, 4, 8)),
    _s(_f(8, 4), _i(8, 4), 3),
    _s(_f(8, 4), _i(8)),
    _s(_f(8, 4), _i(8, 4).int()),
]
SAMPLES[aten.embedding_dense_backward.default] = [
    _s(_f(4, 8, 4), _i(8, 4, 8), 8, -1, False),
    _s(_f(16, 4), _i(8, 16), 8, 3, False),
    _s(_f(16, 4), _i(8, 16), 8, 3, True),
]

_EDGES = _f(8).sort().values
SAMPLES[aten.bucketize.Tensor] = [
    _s(_f(4, 8), _EDGES),
    _s(_f(4), _EDGES, out_int32=True, right=True),
]
SAMPLES[aten.searchsorted.Tensor] = [
    _s(_EDGES, _f(4, 8)),
    _s(_f(4, 8).sort().values, _f(4, 4)),
    _s(x := _f(4, 8), _f(4, 4), sorter=x.argsort()),
]
SAMPLES[aten.masked_scatter.default] = [_s(_f(4, 8), _b(4, 8), _f(32))]


# Attention


def _attention_samples() -> None:
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for kv_heads, s, causal, mask in (
        (8, 4, False, None),
        (8, 8, True, None),
        (4, 4, False, None),
        (2, 8, False, None),
        (1, 8, True, None),
        (8, 4, False, (4, 8)),
        (8, 4, False, (4, 1, 4, 8)),
        (8, 4, False, (1, 8, 4, 8)),
        (4, 4, False, (4, 8, 4, 8)),
        (8, 4, False, (1, 1, 1, 8)),
    ):
        q, k, v = _f(4, 8, s, 4), _f(4, kv_heads, 8, 4), _f(4, kv_heads, 8, 4)
        kwargs = {} if mask is None else {"attn_mask": _f(*mask)}
        SAMPLES.setdefault(flash, []).append(_s(q, k, v, 0.0, causal, **kwargs))
        out, lse = flash(q, k, v, 0.0, causal, **kwargs)
        if kv_heads == 8:
            grads = (_f(*out.shape), q, k, v, out, lse, 0.0, causal)
            SAMPLES.setdefault(backward, []).append(_s(*grads, scale=0.5, **kwargs))


_attention_samples()


def _whole_layer_samples() -> None:
    layer = aten._transformer_encoder_layer_fwd.default
    heads = aten._native_multi_head_attention.default
    x, linear = _f(4, 3, 8), (_f(24, 8), _f(24), _f(8, 8), _f(8))
    norms, mlp = (_f(8), _f(8), _f(8), _f(8)), (_f(16, 8), _f(16), _f(8, 16), _f(8))
    of_batch = torch.zeros(4, 3, dtype=torch.bool)
    of_batch[:, 2] = True
    of_queries = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for mask in ((None, None), (of_batch, 1), (of_queries, 0)):
        for first in (False, True):
            rest = (False, first, 1e-5, *norms, *mlp, *mask)
            call = _s(x, 8, 2, *linear, *rest)
            SAMPLES.setdefault(layer, []).append(call)
        for average in (True, False):  # without weights, there is no second result
            call = _s(x, x, x, 8, 2, *linear, mask[0], True, average, mask[1])
            SAMPLES.setdefault(heads, []).append(call)


_whole_layer_samples()


def _fused_attention_samples() -> None:
    def m(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def add(name: str, *args: Any, **kwargs: Any) -> None:
        op = getattr(aten, name).default
        UNRUNNABLE.setdefault(op, []).append((args, kwargs))

    n, h, s, t, d = 4, 8, 8, 4, 16
    seed, none = m(dtype=torch.int64), (None, None)
    state, unused = m(2, dtype=torch.uint64), m(dtype=torch.uint64)
    for kv in (8, 2):
        q, k, v = m(n, h, s, d), m(n, kv, t, d), m(n, kv, t, d)
        qt, kt, vt = m(n, s, h, d), m(n, t, kv, d), m(n, t, kv, d)
        out, outt, lse = m(n, h, s, d), m(n, s, h, d), m(n, h, s, dtype=torch.float32)
        padded, one = m(n, h, 32, dtype=torch.float32), lse.unsqueeze(-1)
        for causal in (False, True):
            add("_scaled_dot_product_flash_attention", q, k, v, 0.0, causal, scale=0.1)
            add(
                "_scaled_dot_product_flash_attention_backward",
                *(out, q, k, v, out, lse, *none, s, t, 0.0, causal, state, unused),
            )
            add("_scaled_dot_product_flash_attention", q, k, v, 0.5, causal)
            add("_flash_attention_forward", qt, kt, vt, *none, s, t, 0.0, causal, False)
            add(
                "_flash_attention_backward",
                *(outt, qt, kt, vt, outt, lse, *none, s, t, 0.0, causal, state, unused),
            )
        for bias in (None, m(n, h, s, t), m(n, 1, s, t), m(1, h, s, t)):
            add("_scaled_dot_product_cudnn_attention", q, k, v, bias, True)
            add("_scaled_dot_product_fused_attention_overrideable", q, k, v, bias)
            add(
                "_scaled_dot_product_cudnn_attention_backward",
                *(out, q, k, v, out, one, seed, seed, bias, *none, s, t, 0.0, False),
            )
            if kv != h:
                continue
            add("_scaled_dot_product_efficient_attention", q, k, v, bias, True)
            add("_efficient_attention_forward", qt, kt, vt, bias, *[None] * 4, 0.0, 0)
            for wanted in (True, False):
                mask = [True, True, True, wanted]
                add(
                    "_scaled_dot_product_efficient_attention_backward",
                    *(out, q, k, v, bias, out, padded, seed, seed, 0.0, mask),
                )
            add(
                "_efficient_attention_backward",
                *(outt, qt, kt, vt, bias, outt, *none, s, t, padded, 0.0, seed, seed),
                *(0, bias is not None),
            )
            if bias is not None:
                add(
                    "_scaled_dot_product_fused_attention_overrideable_backward",
                    *(out, q, k, v, bias, [True] * 4, out, lse, *none, s, t, 0.0),
                    *(False, seed, seed),
                )
    # Of so many rows the memory-efficient kernel's log-sum-exp has one for each.
    s = t = 32
    for kv in (8, 2):
        q, k, v = m(n, h, s, d), m(n, kv, t, d), m(n, kv, t, d)
        out, lse = m(n, h, s, d), m(n, h, s, dtype=torch.float32)
        for causal in (False, True):
            add("_scaled_dot_product_cudnn_attention", q, k, v, None, True, 0.0, causal)
            add(
                "_scaled_dot_product_cudnn_attention_backward",
                *(out, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, *none, s, t),
                *(0.0, causal),
            )
            if kv != h:
                continue
            name = "_scaled_dot_product_efficient_attention"
            add(name, q, k, v, None, True, 0.0, causal)
            add(
                f"{name}_backward",
                *(out, q, k, v, None, out, lse, seed, seed, 0.0),
                *([True, True, True, False], causal),
            )


_fused_attention_samples()


def _packed_attention_samples() -> None:
    importlib.import_module("torch.nn.attention.varlen")  # registers the ops

    def m(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    starts, state = m(3, dtype=torch.int32), m(2, dtype=torch.uint64)
    for heads in (8, 4):
        q, k, lse = m(16, 8, 16), m(16, heads, 16), m(8, 16, dtype=torch.float32)
        forward = (q, k, k, starts, starts, 8, 8, True)
        backward = (q, q, k, k, q, lse, starts, starts, 8, 8, True, state)
        for name, args in (("", forward), ("_backward", backward)):
            key = f"torch_attn::_varlen_attn{name}"
            UNRUNNABLE.setdefault(key, []).append((args, {}))


_packed_attention_samples()


# Convolution


def _convolution_samples() -> None:
    for x, w, stride, padding, dilation, transposed, extra, groups in (
        (_f(4, 4, 6, 6), _f(8, 4, 3, 3), 1, 1, 1, False, 0, 1),
        (_f(4, 4, 7, 7), _f(8, 4, 3, 3), 2, 0, 2, False, 0, 1),
        (_f(4, 8, 6, 6), _f(8, 2, 3, 3), 1, 1, 1, False, 0, 4),
        (_f(4, 8, 6, 6), _f(8, 4, 1, 1), 1, 0, 1, False, 0, 2),
        (_f(4, 4, 6, 6), _f(8, 1, 3, 3), 1, 1, 1, False, 0, 4),
        (_f(4, 4, 8), _f(4, 4, 3), 1, 1, 1, False, 0, 1),
        (_f(4, 4, 4, 4, 4), _f(4, 4, 2, 2, 2), 2, 0, 1, False, 0, 1),
        (_f(4, 4, 5, 5), _f(4, 8, 3, 3), 2, 1, 1, True, 1, 1),
        (_f(4, 8, 5, 5), _f(8, 2, 3, 3), 1, 1, 1, True, 0, 4),
        # Windows laid out evenly: a shard reads rows around it, of several shards.
        (_f(2, 2, 8, 12), _f(2, 2, 7, 7), 2, 3, 1, False, 0, 1),
        (_f(2, 2, 8, 4), _f(2, 1, 3, 3), 1, 2, 2, False, 0, 2),
        (_f(2, 2, 8), _f(2, 2, 1), 2, 0, 1, False, 0, 1),
        (_f(2, 2, 4, 4), _f(2, 2, 4, 4), 2, 1, 1, True, 0, 1),
        (_f(2, 2, 4, 4), _f(2, 2, 3, 3), 2, 1, 1, True, 1, 1),
        (_f(2, 4, 4), _f(4, 1, 1), 3, 0, 1, True, 2, 2),
        (_f(2, 2, 4), _f(2, 2, 5), 2, 3, 2, True, 1, 1),
    ):
        k = x.dim() - 2
        rest = ([stride] * k, [padding] * k, [dilation] * k, transposed, [extra] * k)
        channels = w.shape[1] * groups if transposed else w.shape[0]
        for bias in (None, _f(channels)):
            args = (x, w, bias, *rest, groups)
            SAMPLES.setdefault(aten.convolution.default, []).append(_s(*args))
        grad = _f(*aten.convolution.default(*args).shape)
        for mask in (
            [True] * 3,
            [True, True, False],
            [False, True, True],
            [True, False, True],
        ):
            sizes = [channels] if mask[2] else None
            SAMPLES.setdefault(aten.convolution_backward.default, []).append(
                _s(grad, x, w, sizes, *rest, groups, mask)
            )


_convolution_samples()


def _image(k: int, n: int = 6) -> torch.Tensor:
    return _f(4, 8, *[n] * k)


def _add(name: str, *args: Any, **kwargs: Any) -> Any:
    op = getattr(aten, name).default
    SAMPLES.setdefault(op, []).append((args, kwargs))
    return op(*args, **kwargs)


def _pool_samples() -> None:
    for k in (2, 3):
        for x in (_image(k), _image(k)[0]):
            window = ([3] * k, [2] * k, [1] * k)
            args = (x, *window, [1] * k, False)
            out, where = _add(f"max_pool{k}d_with_indices", *args)
            grad = _f(*out.shape)
            _add(f"max_pool{k}d_with_indices_backward", grad, *args, where)
            out = _add(f"avg_pool{k}d", x, *window)
            grad = _f(*out.shape)
            _add(f"avg_pool{k}d_backward", grad, x, *window, False, True, None)
            out = _add(f"_adaptive_avg_pool{k}d", x, [2] * k)
            _add(f"_adaptive_avg_pool{k}d_backward", _f(*out.shape), x)
            out, where = _add(f"adaptive_max_pool{k}d", x, [2] * k)
            _add(f"adaptive_max_pool{k}d_backward", _f(*out.shape), x, where)
    # Windows that overlap, several shards of rows, and those that count what is padded.
    x = _f(2, 2, 4, 8)
    for window in (([5, 3], [1, 2], [2, 1]), ([3, 2], [2, 2], [0, 0])):
        args = (x, *window, [1, 1], not any(window[2]))
        out, where = _add("max_pool2d_with_indices", *args)
        _add("max_pool2d_with_indices_backward", _f(*out.shape), *args, where)
    for rest in ((False, True, None), (False, False, None), (False, False, 3)):
        args = (x, [3, 3], [1, 2], [1, 1], *rest)
        out = _add("avg_pool2d", *args)
        _add("avg_pool2d_backward", _f(*out.shape), *args)
    large = (20000 + x).half()  # of which float16 cannot hold the sum of a window
    _add("avg_pool2d", large, [3, 3], [1, 2], [1, 1], False, False)
    out = _add("avg_pool2d", x, [3, 2], [], [1, 0], True, False)
    out = _add("_adaptive_avg_pool2d", x, [2, 4])
    _add("_adaptive_avg_pool2d_backward", _f(*out.shape), x)
    x = _image(2)
    pool = ([3, 3], [2, 2], [1, 1], [1, 1])
    SAMPLES["prims::_low_memory_max_pool_with_offsets"] = [
        _s(x, *pool, False),
        _s(_f(2, 2, 4, 8), [5, 3], [1, 2], [2, 1], [1, 1], False),
    ]
    offsets = _i(9, 4, 8, 3, 3).to(torch.int8)
    SAMPLES["prims::_low_memory_max_pool_offsets_to_indices"] = [
        _s(offsets, pool[0], [6, 6], *pool[1:]),
        _s(offsets[:, :, :2], [3, 3], [4, 6], [2, 2], [1, 1], [1, 1]),
    ]


# Sizes that images become, by weights of all the rows that each covers.
_COVERED = (
    ([7, 5], (False,)),
    ([7, 12], (True,)),
    ([4, 10], (False, 0.35, None)),
    ([18, 5], (False, None, 0.5)),
)


def _resample_samples() -> None:
    for name, ranks, aligned in (
        ("upsample_bilinear{}d", (2,), (True,)),
        ("upsample_bicubic{}d", (2,), (False,)),
        ("upsample_trilinear{}d", (3,), (False,)),
        ("_upsample_bilinear{}d_aa", (2,), (False,)),
        ("_upsample_bicubic{}d_aa", (2,), (False,)),
        ("_upsample_lanczos{}d_aa", (2,), (False,)),
    ):
        for k in ranks:
            op = name.format(k)
            if not hasattr(aten, op):
                continue
            x = _image(k, 4)
            out = _add(op, x, [6] * k, *aligned)
            grad = _f(*out.shape)
            _add(f"{op}_backward", grad, [6] * k, list(x.shape), *aligned)
            for size, how in _COVERED if op.endswith("_aa") else ():
                x = _f(2, 3, 12, 10)
                out = _add(op, x, size, *how)
                _add(f"{op}_backward", _f(*out.shape), size, list(x.shape), *how)


def _rearrange_samples() -> None:
    for k in (2, 3):
        x, grid = _image(k, 4), _f(4, *[4, 8, 2][:k], k)
        out = getattr(aten, f"grid_sampler_{k}d")(x, grid, 0, 0, False)
        if k == 3:
            _add("grid_sampler_3d", x, grid, 0, 0, False)
        for mask in ([True, True], [False, True], [True, False]):
            grad = _f(*out.shape)
            _add(f"grid_sampler_{k}d_backward", grad, x, grid, 0, 0, False, mask)


_pool_samples()
_resample_samples()
_rearrange_samples()
