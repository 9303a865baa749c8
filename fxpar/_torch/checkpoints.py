"""Regions of activation checkpointing in code that is traced without Dynamo.

In: calls of ``torch.utils.checkpoint``, of either kind, while a graph is traced. Out:
nodes with the tags that Dynamo gives them, from which the partitioner decides what the
backward computes again. Outside the context nothing is patched, and a region is never
run a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


@contextlib.contextmanager
def checkpoints_tagged() -> Iterator[None]:
    """Trace each region of ``torch.utils.checkpoint`` once, and tag its nodes as
    ``torch.compile`` does: ``meta["recompute"]`` is the user's policy, or else to
    recompute, and ``meta["ac_graph_id"]`` is the number of the region.

    Reentrant ones are traced as the others are, as Dynamo does; but no gradient passes
    one that is given no tensor that requires grad. What is random is drawn once: the
    tags say what the backward computes again, with the same seeds."""
    from unittest import mock

    import torch
    from torch._higher_order_ops import wrap
    from torch.fx.traceback import preserve_node_meta
    from torch.utils import checkpoint

    module: Any = checkpoint
    plain = module._checkpoint_without_reentrant_generator
    again = partial(
        module.create_selective_checkpoint_contexts,
        lambda *_args, **_kwargs: module.CheckpointPolicy.PREFER_RECOMPUTE,
    )

    def tagged(
        fn: Any,
        _preserve: Any,
        context_fn: Callable[[], Any],
        check: Any,
        debug: Any,
        _early: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        number = next(wrap.uid)

        def contexts() -> Any:
            plainly = context_fn is module.noop_context_fn
            forward, backward = (again if plainly else context_fn)()
            forward.ac_graph_id = number
            return forward, backward

        with preserve_node_meta():  # the tags of a region end with it
            yield from plain(fn, False, contexts, check, False, False, *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Any, _preserve: Any, *args: Any) -> Any:
            if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                with torch.no_grad():
                    return function(*args)
            return checkpoint.checkpoint(function, *args, use_reentrant=False)

    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", tagged),
        mock.patch.object(module, "CheckpointFunction", Reentrant),
    ):
        yield
