"""Collectives of the user's own code, with the gradients that eager code has.

In: a Dynamo graph in local mode. ``dist.all_reduce(x)`` and the like are there as
functional collectives, of which ``x`` takes the result by ``copy_``. In eager code they
write to memory that autograd does not see: the gradient of what was written to goes to
what it was before, and none goes to what was sent. Functional ones send gradients
through collectives instead. Out: the same graph, changed in place, with the gradients
of eager code. Functional collectives that the user calls keep theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers its ops)


def take_eager_gradients(gm: fx.GraphModule) -> None:
    """Give collectives in place the gradients of eager code."""
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
    """The functional collective that a value is the result of; None if it is not."""
    if not isinstance(value, fx.Node) or "wait_tensor" not in str(value.target):
        return None
    launch = value.args[0]
    is_functional = "_c10d_functional" in str(getattr(launch, "target", ""))
    return launch if isinstance(launch, fx.Node) and is_functional else None
