"""Gives in-place collectives of the user's code the gradients that eager code has.

In: a Dynamo graph in local mode. ``dist.all_reduce(x)`` and the like are there as
functional collectives, whose result ``copy_`` writes to ``x``. In eager code they write
to memory that autograd does not see: the gradient of the tensor written to goes to its
value before, and none goes to the tensor sent. Functional ones send gradients through
collectives instead. Out: the same graph, changed in place, with the gradients of eager
code. Never: other gradients of functional collectives that the user calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers its ops)


def take_eager_gradients(gm: fx.GraphModule) -> None:
    """Give in-place collectives the gradients of eager code; change ``gm`` in place."""
    for node in list(gm.graph.find_nodes(op="call_method", target="copy_")):
        written, value = node.args[:2]
        launch = _launch_of(value)
        if launch is None:
            continue
        for sent in launch.all_input_nodes:
            if isinstance(sent.meta.get("example_value"), torch.Tensor):
                with gm.graph.inserting_before(launch):
                    detached = gm.graph.call_method("detach", (sent,))
                detached.meta = dict(sent.meta)
                launch.replace_input_with(sent, detached)
        with gm.graph.inserting_before(node):
            redirected = gm.graph.call_function(
                torch.ops.fxpar.with_gradient_of, (value, written)
            )
        redirected.meta = {
            **node.meta,
            "example_value": value.meta.get("example_value"),
        }
        node.replace_input_with(value, redirected)
    gm.recompile()


def _launch_of(value: Any) -> fx.Node | None:
    """Return the functional collective whose result a value is, or None."""
    if not isinstance(value, fx.Node) or "wait_tensor" not in str(value.target):
        return None
    launch = value.args[0]
    is_functional = "_c10d_functional" in str(getattr(launch, "target", ""))
    return launch if isinstance(launch, fx.Node) and is_functional else None
