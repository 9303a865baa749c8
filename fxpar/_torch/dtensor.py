"""Changes what DTensor's ops do to shards, and reads DTensors' parts.

In: DTensors, and functions that serve their ops. Out: handlers in DTensor's dispatcher,
and DTensors. Never: serves ops on a mesh for which ``is_served`` is false.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fxpar._torch.dynamo import not_compiled
from fxpar._torch.objects import memory_of, schema_of, thawed
from fxpar.errors import ShardError

__all__ = ["Partial", "Replicate", "Shard"]

# Op -> what DTensor calls in its place.
_HANDLERS: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return DTensor's placement for a dim that more major axes of later mesh dims
    split."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def has_mesh_in_operands(x: Any) -> bool:
    """Return whether code that was compiled for ``x`` uses no mesh except the one that
    comes with its operands: not so for DTensors where (2.11) the mesh is kept with the
    code, whose process groups are those of the process that compiled it."""
    return not isinstance(x, DTensor) or "device_mesh" in x.__tensor_flatten__()[0]


def _handle(op: Any, handler: Callable[..., Any]) -> None:
    """Let DTensor call ``handler(op, args, kwargs)`` in place of an op. Dynamo would
    compile it where code between graphs runs the op."""
    _HANDLERS[op] = not_compiled(handler)


@contextlib.contextmanager
def _left_to_dtensor(op: Any) -> Iterator[None]:
    """Let DTensor's own handling of an op run inside, not the handler set for it."""
    handler = _HANDLERS.pop(op)
    try:
        yield
    finally:
        _HANDLERS[op] = handler


def on_random_op(draw: Callable[..., Any]) -> None:
    """Let ``draw(op, args, kwargs, shape, start)`` run random ops on DTensors on CPU.

    ``args[0]``: this rank's part, which begins at ``start`` of the global ``shape``.
    """
    from torch.distributed.tensor import _random
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.utils._python_dispatch import TorchDispatchMode

    class Draw(TorchDispatchMode):
        def __init__(self, more: dict[str, Any], *where: Any) -> None:
            super().__init__()
            self.more, self.where = more, where

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return draw(func, args, {**(kwargs or {}), **self.more}, *self.where)

    class Tracker(_random.OffsetBasedRNGTracker):
        def __init__(self) -> None:
            self._use_distribute_region = True
            if torch.cuda.is_available():
                self._device = torch.device("cuda", torch.cuda.current_device())
                self._device_handle = torch.cuda

        @contextlib.contextmanager
        def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[Any]:
            if spec.mesh.device_type != "cpu":
                with super()._distribute_region(spec, generator):
                    yield
                return
            _, start = compute_local_shape_and_global_offset(
                spec.shape, spec.mesh, spec.placements
            )
            with Draw({"generator": generator} if generator else {}, spec.shape, start):
                yield

    _random._rng_tracker = Tracker()


def reduce_before_item() -> None:
    """Let ``item()`` and ``bool()`` of a partial DTensor give the reduced value, where
    torch 2.13 gives this rank's summand (pytorch issue 166638): loops that end when no
    element is left, as in ``trunc_normal_``, must take as many rounds on every rank."""

    def item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        partial = any(placement.is_partial() for placement in x.placements)
        return op(x.full_tensor() if partial else x.to_local())

    _handle(torch.ops.aten._local_scalar_dense.default, item)


def keep_nan_in_extremes() -> None:
    """Let a maximum or minimum of a DTensor be NaN where one of its elements is, as in
    torch: of a NaN and a number from two ranks, backends take either, depending on
    their order."""

    def keeping_nan(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(reduce)
        def reduced(self: Any, x: torch.Tensor, *where: Any) -> torch.Tensor:
            value = reduce(self, x, *where)
            if self.reduce_op not in ("max", "min") or not x.is_floating_point():
                return value
            beyond = x.isnan().to(x.dtype) * (1 if self.reduce_op == "max" else -1)
            return value.masked_fill(reduce(self, beyond, *where) != 0, math.nan)

        return reduced

    partial: Any = Partial
    partial._reduce_value = keeping_nan(partial._reduce_value)
    partial._reduce_shard_value = keeping_nan(partial._reduce_shard_value)


def combine_with_plain_numbers() -> None:
    """Let a number that is a plain tensor with a gradient be added to a DTensor, or
    scale one, as a loss and a penalty on weights: its gradient is plain again. DTensor
    (2.13) gives a DTensor as gradient of both, which ops after the number refuse."""

    def plain(gradient: Any) -> torch.Tensor:
        is_plain = not isinstance(gradient, DTensor)
        return gradient if is_plain else gradient.full_tensor()

    def combine(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args:
            is_plain = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
            if is_plain and x.dim() == 0 and x.requires_grad and x.grad_fn is not None:
                x.register_hook(plain)
        with _left_to_dtensor(op):
            return op(*args, **kwargs)

    aten = torch.ops.aten
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        _handle(op, combine)


def reduce_norms(norm: Callable[..., Any]) -> None:
    """Let ``norm(x, order, dims, keepdim, dtype)`` compute norms of DTensors; of lists
    of DTensors only norms of infinite order: ``_foreach_norm`` (2.13) raises for empty
    shards on the ranks that have one, while other ranks wait for these."""

    def vector_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        defaults = (2.0, None, False)
        x, order, dims, keepdim = (*args, *defaults[len(args) - 1 :])[:4]
        return norm(x, order, dims, keepdim, kwargs.get("dtype"))

    _handle(torch.ops.aten.linalg_vector_norm.default, vector_norm)

    def norms_of_list(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, order = (*args, 2.0)[:2]
        dtype = (*args, None, None)[2] or kwargs.get("dtype")
        if math.isinf(order):
            return [norm(x, order, None, False, dtype) for x in tensors]
        with _left_to_dtensor(op):
            return op(*args, **kwargs)

    _handle(torch.ops.aten._foreach_norm.Scalar, norms_of_list)


def find_overflows_of_all() -> None:
    """Let ``GradScaler`` find what is not finite in any part of any gradient, where
    torch 2.13 asks only ranks that hold parts of the first of them."""
    unscale_op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    inherited = _HANDLERS.get(unscale_op)
    if inherited is None:
        return

    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inherited(op, args, kwargs)
        overflow, mesh = args[1], args[0][0].device_mesh
        anywhere = DTensor.from_local(overflow, mesh, [Partial("max")] * mesh.ndim)
        overflow.copy_(anywhere.full_tensor())

    _handle(unscale_op, unscale)


class CopiedView(DTensor):
    """Is a view of a DTensor with which no local tensor of its own shares memory, as
    one row of a tensor that is split by rows: it is computed whenever it is read."""

    base: DTensor  # the DTensor that it is a view of
    # The same view, of a global value in place of the DTensor.
    replay: Callable[[torch.Tensor], torch.Tensor]
    whole_of: Callable[[DTensor], torch.Tensor]  # the global value of a DTensor

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.replay(self.whole_of(self.base))

    @_local_tensor.setter
    def _local_tensor(self, stand_in: torch.Tensor) -> None:
        """Drop what the constructor sets."""

    def __tensor_flatten__(self) -> Any:
        raise ShardError(
            f"a view {list(self.shape)} of a sharded tensor enters compiled code, "
            "where writes to the view would be lost",
            fix="pass view.clone(), or view.full_tensor()",
        )


class _SpecOfView(DTensorSpec):
    """Is equal to no other spec, so that torch caches nothing of ops on copied
    views."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _as_read(x: Any) -> Any:
    if not isinstance(x, CopiedView):
        return x
    spec = DTensorSpec(x.device_mesh, x.placements, x._spec.tensor_meta)
    return DTensor(x._local_tensor, spec, requires_grad=False)


def copied_view(
    base: DTensor,
    replay: Callable[[torch.Tensor], torch.Tensor],
    whole_of: Callable[[DTensor], torch.Tensor],
    like: torch.Tensor,
) -> CopiedView:
    """Return ``replay`` of the global value of ``base``, in the form of ``like`` on
    meta."""
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    spec = _SpecOfView(base.device_mesh, (Replicate(),) * base.device_mesh.ndim, meta)
    stand_in = torch.empty((), dtype=like.dtype, device=base.device).expand(like.shape)
    with torch.inference_mode(False):  # it counts writes with its base
        view = CopiedView(stand_in, spec, requires_grad=False)
    view.base, view.replay, view.whole_of = base, replay, whole_of
    return view


def base_of(x: DTensor) -> tuple[DTensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the DTensor that ``x`` is a view of, or itself; and the view of its
    value."""
    if isinstance(x, CopiedView):
        return x.base, x.replay
    if isinstance(x._base, DTensor):
        return x._base, x._view_func_unsafe
    return x, lambda whole: whole


def change_form(
    x: DTensor, op: Any, args: Any, kwargs: Any, value: torch.Tensor
) -> None:
    """Let ``x`` be ``value`` on every rank, in the form that an op gives it."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    placements = (Replicate(),) * x.device_mesh.ndim
    x._local_tensor, x._spec = value, DTensorSpec(x.device_mesh, placements, meta)
    return_and_correct_aliasing(op, args, kwargs, x)


def lay_out(x: DTensor, local: torch.Tensor, placements: Sequence[Any]) -> None:
    """Give ``x`` other placements on its mesh, and ``local`` as its local tensor."""
    spec = DTensorSpec(x.device_mesh, tuple(placements), x._spec.tensor_meta)
    x._local_tensor, x._spec = local, spec


# Types of tensors without behaviour of their own.
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_plain_local(x: DTensor) -> bool:
    """Return whether the local tensor of a DTensor is plain: not quantized, for
    example."""
    return isinstance(x, CopiedView) or type(x._local_tensor) in _PLAIN


def has_layout_of(x: Any, y: DTensor) -> bool:
    """Return whether ``x`` is a DTensor with the layout of ``y``: the same shape, mesh,
    placements, and local shape, strides and offset."""
    if not isinstance(x, DTensor) or isinstance(x, CopiedView) or x.shape != y.shape:
        return False
    if not has_plain_local(x):
        return False
    if (x.device_mesh, x.placements) != (y.device_mesh, y.placements):
        return False
    a, b = x._local_tensor, y._local_tensor
    return (a.shape, a.stride(), a.storage_offset()) == (
        (b.shape, b.stride(), b.storage_offset())
    )


def serve_aliases(serve: Callable[..., Any], is_served: Callable[[Any], bool]) -> None:
    """Let ``serve(op, args, kwargs)`` run ops that write to DTensors, or make views of
    them, where DTensor would do so with copies of what a rank holds, or not at all.
    Plain tensors among the operands of ops that write are the same on every rank.

    is_served: whether this holds for DTensors on a mesh. If DTensor can run an op,
    torch caches that, and does not ask again.
    """
    dispatcher: Any = DTensor._op_dispatcher
    unwrap = dispatcher.unwrap_to_op_info
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    as_strided = torch.ops.aten.as_strided.default
    as_strided_alone = _HANDLERS[as_strided]

    def has_served(args: Any, kwargs: Any) -> bool:
        leaves = tree_leaves((args, kwargs))
        return any(isinstance(x, DTensor) and is_served(x.device_mesh) for x in leaves)

    def unwrapped(op: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, CopiedView) for x in tree_leaves((args, kwargs))):
            return None  # which reads them
        return unwrap(op, args, kwargs)

    def propagated(op: Any, args: Any, kwargs: Any, info: Any, cached: bool) -> Any:
        if info is None:
            if _has_aliases(op):
                return serve(op, args, kwargs)
            args, kwargs = tree_map(_as_read, (args, kwargs))
            return op(*args, **kwargs)
        if not _has_aliases(op) or _are_we_tracing() or not has_served(args, kwargs):
            return propagate(op, args, kwargs, info, cached)
        # Not where sizes or random numbers of a part alone would be wrong.
        is_factory = not any(isinstance(x, torch.Tensor) for x in tree_leaves(args))
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        is_local = op in dispatcher._random_ops and args[0].is_contiguous()
        if is_factory or (is_random and not is_local):
            return serve(op, args, kwargs)
        try:
            sharding = propagate(op, args, kwargs, info, cached)
        except Exception:  # there is no rule, or none that writes in place
            return serve(op, args, kwargs)
        if _has_copied_operands(op, info.schema, sharding):
            return serve(op, args, kwargs)
        return sharding

    def with_plain_tensors(op: Any, args: Any, kwargs: Any) -> Any:
        with _left_to_dtensor(op):
            if not _has_plain(args, kwargs) or not has_served(args, kwargs):
                return op(*args, **kwargs)
            if _has_plain(args[:1], kwargs):  # one is written, or gives no mesh
                return serve(op, args, kwargs)
            from torch.distributed.tensor.experimental import implicit_replication

            with implicit_replication():
                return op(*args, **kwargs)

    def strided(op: Any, args: Any, kwargs: Any) -> Any:
        try:
            return as_strided_alone(op, args, kwargs)
        except RuntimeError:
            if not has_served(args, kwargs):
                raise
            return serve(op, args, kwargs)

    dispatcher.unwrap_to_op_info = not_compiled(unwrapped)
    dispatcher._propagate_op_sharding_dispatch_slow_path = not_compiled(propagated)
    torch._C._clear_DTensor_sharding_propagator_cache()
    _handle(as_strided, strided)
    for op in _ops_that_write_by_tensors():
        if op not in _HANDLERS:
            _handle(op, with_plain_tensors)


def _has_plain(args: Any, kwargs: Any) -> bool:
    """Return whether some operands are plain tensors; quickly: optimizers wait for
    it."""
    for x in (*args, *kwargs.values()):
        for y in x if isinstance(x, (list, tuple)) else (x,):
            if isinstance(y, torch.Tensor) and not isinstance(y, DTensor):
                return True
    return False


def _ops_that_write_by_tensors() -> Iterator[Any]:
    """Yield the ops that write to an operand and have others; a list counts as many."""
    for schema in torch._C._jit_get_all_schemas():
        types = [str(a.type) for a in schema.arguments if "Tensor" in str(a.type)]
        if not schema.is_mutable or (len(types) < 2 and "List[Tensor]" not in types):
            continue
        namespace, name = schema.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        op = getattr(packet, schema.overload_name or "default", None)
        if op is not None:
            yield op


def _has_aliases(op: Any) -> bool:
    return any(a.alias_info is not None for a in schema_of(op).arguments)


def _has_copied_operands(op: Any, schema: Any, sharding: Any) -> bool:
    """Return whether DTensor runs an op with copies of operands, as ``schema`` has
    them, that it writes to or makes views of, or makes views that no Spec describes."""
    if not isinstance(sharding, OutputSharding):
        return False  # the results themselves
    if op is torch.ops.aten.index_put_.default:  # a mask is no index of one dim (2.13)
        dtypes = [x.tensor_meta.dtype for x in schema.args_schema[1] if x is not None]
        if torch.bool in dtypes:
            return True
    used = sharding.redistribute_schema if sharding.needs_redistribute else None
    used = schema if used is None else used
    by_alias: dict[tuple[str, ...], Any] = {}
    for i, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is None:
            continue
        by_name = schema.kwargs_schema.get(argument.name)
        before = schema.args_schema[i] if i < len(schema.args_schema) else by_name
        by_alias[tuple(argument.alias_info.before_set)] = before
        if i < len(schema.args_schema) and before != used.args_schema[i]:
            return True
    results: Any = sharding.output_spec
    results = results if isinstance(results, (tuple, list)) else [results]
    for result, spec in zip(schema_of(op).returns, results, strict=False):
        spec = spec[0] if isinstance(spec, (tuple, list)) and spec else spec
        if result.alias_info is None or not isinstance(spec, DTensorSpec):
            continue
        alias = tuple(result.alias_info.before_set)  # none of a list of views
        before = by_alias.get(alias, schema.args_schema[0])
        if result.alias_info.is_write:
            moves = before.placements != spec.placements
            if moves and torch.Tag.inplace_view not in op.tags:
                return True
            continue
        kinds, kinds_before = ({*map(type, x.placements)} for x in (spec, before))
        if not kinds <= kinds_before | {Replicate}:
            return True
        if spec.shape != before.shape and not _is_regular(before):  # 2.13 is wrong
            return True
    return False


def _is_regular(spec: Any) -> bool:
    """Return whether all shards are equal, and no dim is split over two axes."""
    dims = set()
    for placement, size in zip(spec.placements, spec.mesh.shape, strict=True):
        if placement.is_replicate() or placement.is_partial():
            continue
        if placement.dim in dims or spec.shape[placement.dim] % size:
            return False
        dims.add(placement.dim)
    return True


def on_set_data(
    part_of: Callable[[Any, torch.Tensor], torch.Tensor],
    is_served: Callable[[Any], bool],
) -> None:
    """Let ``x.data = y`` of a DTensor set the data of its local tensor to
    ``part_of(x, y)``, where torch (2.13) sets the data of the wrapper, which nothing
    reads. ``is_served``: whether this holds for DTensors on a mesh."""
    inherited: Any = torch.Tensor.data

    def read(x: Any) -> torch.Tensor:
        data: torch.Tensor = inherited.__get__(x)
        return data

    def write(x: Any, y: torch.Tensor) -> None:
        if is_served(x.device_mesh):
            x._local_tensor.data = part_of(x, y)
        else:
            inherited.__set__(x, y)

    # Compiled by themselves, they would call themselves, or take parts for wholes.
    DTensor.data = property(not_compiled(read), not_compiled(write))  # type: ignore[assignment]


def count_writes(tensors: Sequence[Any]) -> None:
    """Count writes to DTensors as writes to their local tensors, which is what the
    backward of a compiled graph saves and checks; torch (2.13) has a count for each."""
    for x in tensors:
        if x.is_inference() or x._version == x.__dict__.get("_fxpar_counted", 0):
            continue
        x._fxpar_counted = x._version
        if not x._local_tensor.is_inference():
            torch.autograd.graph.increment_version(x._local_tensor)


def record_overflow(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    overflow: torch.Tensor,
) -> None:
    """Report to a scaler whether gradients were not finite, 1.0 or 0.0, for
    ``update()``."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {overflow.device: overflow}


def newton_schulz(instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return ``iterate(gradient, *settings)``, by which ``torch.optim.Muon`` makes a
    matrix orthogonal; from now on ``instead``, if that is given."""
    from torch.optim import _muon

    if instead is not None:
        _muon._zeropower_via_newtonschulz = instead
    return _muon._zeropower_via_newtonschulz


def local_of(x: DTensor) -> torch.Tensor:
    """Return the tensor that a DTensor holds, not a view of it."""
    return x._local_tensor


def live_users_of(memories: Collection[int]) -> list[torch.Tensor]:
    """Return all live tensors whose memory is one of ``memories``, numbers from
    ``objects.memory_of``; a DTensor counts by its local tensor."""
    users = []
    with thawed():
        every = gc.get_objects()
    for x in every:
        kind = type(x)
        if issubclass(kind, DTensor) and not issubclass(kind, CopiedView):
            local = x._local_tensor
        elif kind in _PLAIN and torch._C._has_storage(x):
            local = x
        else:
            continue
        if type(local) in _PLAIN and memory_of(local) in memories:
            users.append(x)
    return users
