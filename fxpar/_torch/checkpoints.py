"""Tags regions of activation checkpointing in code that is traced without Dynamo.

In: calls of ``torch.utils.checkpoint``, of either kind, while a graph is traced. Out:
nodes with the tags that Dynamo gives them, from which the partitioner decides what the
backward recomputes. Never: a patch outside the context, or a region run a second time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class GradModeRead(RuntimeError):
    """Says that a reentrant region asks whether gradients are taken, or whether a value
    that it computes requires one: the answer is no in its first run, and yes when it is
    run again."""


@contextlib.contextmanager
def checkpoints_tagged() -> Iterator[None]:
    """Trace each region of ``torch.utils.checkpoint`` once, and tag its nodes as
    ``torch.compile`` does: ``meta["recompute"]`` is the user's policy, or else to
    recompute, and ``meta["ac_graph_id"]`` is the number of the region.

    Reentrant ones are traced as the others are, as Dynamo does; but no gradient passes
    one that is given no tensor that requires grad, nor a tensor that it returns in a
    list or a dict. What is random is drawn once: the tags say what the backward
    computes again, with the same seeds.

    Raises GradModeRead, but not if the code of torch asks."""
    from unittest import mock

    import torch
    from torch._higher_order_ops import wrap
    from torch.fx.traceback import preserve_node_meta
    from torch.overrides import TorchFunctionMode
    from torch.utils import checkpoint
    from torch.utils._pytree import tree_map_only

    module: Any = checkpoint
    again = partial(
        module.create_selective_checkpoint_contexts,
        lambda *_args, **_kwargs: module.CheckpointPolicy.PREFER_RECOMPUTE,
    )

    def tagged(
        context_fn: Callable[[], Any], run: Callable[[Any], Iterator[None]]
    ) -> Iterator[None]:
        number = next(wrap.uid)

        def contexts() -> Any:
            forward, backward = context_fn()
            if isinstance(forward, contextlib.nullcontext):
                forward, backward = again()
            forward.ac_graph_id = number
            return forward, backward

        with preserve_node_meta():  # the tags of a region end with it
            yield from run(contexts)

    def by_place(
        fn: Any, _preserve: Any, context_fn: Any, check: Any, *rest: Any, **kw: Any
    ) -> Iterator[None]:
        off = (False, False, *rest[2:])
        return tagged(context_fn, lambda x: plain(fn, False, x, check, *off, **kw))

    def by_name(
        fn: Any, args: Any, kw: Any, *, context_fn: Any, **how: Any
    ) -> Iterator[None]:
        how |= dict.fromkeys(("preserve_rng_state", "debug", "early_stop"), False)
        return tagged(context_fn, lambda x: plain(fn, args, kw, context_fn=x, **how))

    instead: Callable[..., Iterator[None]]
    name, instead = "_checkpoint_without_reentrant_generator", by_place
    if hasattr(module, f"{name}_impl"):  # since 2.14
        name, instead = f"{name}_impl", by_name
    plain = getattr(module, name)

    is_grad_enabled = torch.is_grad_enabled
    tensor: Any = torch.Tensor
    getters = {tensor.requires_grad.__get__, tensor.grad_fn.__get__}
    getters.add(tensor.is_leaf.__get__)

    def is_enabled() -> bool:
        if is_grad_enabled() and _is_asked_by_user():
            raise GradModeRead
        return is_grad_enabled()

    class RefusesReads(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in getters and args[0].grad_fn is not None and _is_asked_by_user():
                raise GradModeRead
            return func(*args, **(kwargs or {}))

    def reentrant(function: Any, _preserve: Any, *args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with torch.no_grad():
                return function(*args)
        with mock.patch.object(torch, "is_grad_enabled", is_enabled), RefusesReads():
            result = checkpoint.checkpoint(function, *args, use_reentrant=False)
        if isinstance(result, tuple):
            return tuple(x if isinstance(x, torch.Tensor) else cut(x) for x in result)
        return result if isinstance(result, torch.Tensor) else cut(result)

    def cut(result: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    with (
        mock.patch.object(module, name, instead),
        mock.patch.object(module.CheckpointFunction, "apply", reentrant),
    ):
        yield


def _is_asked_by_user() -> bool:
    """Return whether code outside torch called the caller of this function."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] not in ("torch", "functorch", "fxpar")
