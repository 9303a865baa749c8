"""Regions of activation checkpointing in code that is traced without Dynamo.

In: calls of ``torch.utils.checkpoint``, of either kind, while a graph is traced. Out:
nodes with the tags that Dynamo gives them, from which the partitioner decides what the
backward computes again. Outside the context nothing is patched, and a region is never
run a second time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class GradModeRead(RuntimeError):
    """Raised where a reentrant region asks whether gradients are taken: it hears no
    when it is run first, and yes when it is run again."""


@contextlib.contextmanager
def checkpoints_tagged() -> Iterator[None]:
    """Trace each region of ``torch.utils.checkpoint`` once, and tag its nodes as
    ``torch.compile`` does: ``meta["recompute"]`` is the user's policy, or else to
    recompute, and ``meta["ac_graph_id"]`` is the number of the region.

    Reentrant ones are traced as the others are, as Dynamo does; but no gradient passes
    one that is given no tensor that requires grad, nor a tensor that it returns in a
    list or a dict. What is random is drawn once: the tags say what the backward
    computes again, with the same seeds.

    Raises GradModeRead, not where torch's own code asks."""
    from unittest import mock

    import torch
    from torch._higher_order_ops import wrap
    from torch.fx.traceback import preserve_node_meta
    from torch.utils import checkpoint
    from torch.utils._pytree import tree_map_only

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
            forward, backward = context_fn()
            if isinstance(forward, contextlib.nullcontext):
                forward, backward = again()
            forward.ac_graph_id = number
            return forward, backward

        with preserve_node_meta():  # the tags of a region end with it
            yield from plain(fn, False, contexts, check, False, False, *args, **kwargs)

    is_grad_enabled = torch.is_grad_enabled

    def is_enabled() -> bool:
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if is_grad_enabled() and package not in ("torch", "functorch", "fxpar"):
            raise GradModeRead
        return is_grad_enabled()

    def reentrant(function: Any, _preserve: Any, *args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with torch.no_grad():
                return function(*args)
        with mock.patch.object(torch, "is_grad_enabled", is_enabled):
            result = checkpoint.checkpoint(function, *args, use_reentrant=False)
        if isinstance(result, tuple):
            return tuple(x if isinstance(x, torch.Tensor) else cut(x) for x in result)
        return result if isinstance(result, torch.Tensor) else cut(result)

    def cut(result: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", tagged),
        mock.patch.object(module.CheckpointFunction, "apply", reentrant),
    ):
        yield
