"""Compute attention with dropout as products, a softmax and a mask of random numbers.

In: a Dynamo graph, or a function while it is traced. Out: the same program, in which
such attention is not one kernel: kernels of CUDA draw their masks by the index within
the rank's shard, so that each would run whole on every rank; numbers drawn by global
index can be split like any others. On the CPU, which has no such kernel, torch does the
same. Never: a change to attention without dropout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpar import _torch
from fxpar.errors import warn
from fxpar.sharding.program import user_line

_ATTEND = torch.nn.functional.scaled_dot_product_attention
# Position of ``dropout_p`` among the arguments.
_PLACE = 4


def attend_by_products(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ``scaled_dot_product_attention``, computed without its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return _ATTEND(*args, **kwargs)


def without_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a Dynamo graph whose attentions with dropout use no kernel,
    those in bodies included; ``gm`` itself if there are none."""
    if not any(map(_calls, _graphs(gm))):
        return gm
    copy = _torch.dynamo.copy_graph(gm)
    copy.meta = dict(gm.meta)
    for module in _graphs(copy):
        for node in _calls(module):
            node.target = attend_by_products
        module.recompile()
    return copy


def warn_of_products(gm: fx.GraphModule, device_types: Iterable[str]) -> None:
    """Warn that attention of a graph from ``without_kernels`` uses no kernel, where its
    device has some. ``device_types``: of the graph's inputs."""
    nodes = [
        node
        for module in _graphs(gm)
        for node in module.graph.find_nodes(
            op="call_function", target=attend_by_products
        )
    ]
    if not nodes or "cuda" not in device_types:
        return
    warn(
        "attention with dropout is computed by matrix products, not by a fused "
        f"kernel ({len(nodes)} calls): its memory grows with the square of the "
        "sequence, and its random mask differs from that of the kernel on one "
        "device",
        where=user_line(nodes[0]),
        fix="set the dropout of attention to 0 (attn_pdrop, "
        "attention_probs_dropout_prob, attention_dropout), which uses the kernels",
    )


class ByProducts(TorchFunctionMode):
    """Is a mode inside which attention with dropout uses no kernel."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTEND and _has_dropout(args, kwargs):
            func = attend_by_products
        return func(*args, **kwargs)


def _graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    nodes = gm.graph.find_nodes(op="call_function", target=_ATTEND)
    return [node for node in nodes if _has_dropout(node.args, node.kwargs)]


def _has_dropout(args: Any, kwargs: Any) -> bool:
    chance = args[_PLACE] if len(args) > _PLACE else kwargs.get("dropout_p", 0.0)
    return not isinstance(chance, (int, float)) or chance > 0
