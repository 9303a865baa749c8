"""Gradients of code that no graph contains: their mean over the ranks.

In local mode what Dynamo does not compile is run by each rank on its own part of the
batch, so a gradient holds two kinds of summands: those of graphs, and of penalties on
the parameter alone, are equal on all ranks; those of other code are each rank's own.
The mean over all ranks leaves the first and makes of the second what DDP makes of them.
It is taken of the whole ``.grad`` when a backward ends, before anything clips it; taken
twice it changes nothing.

``watch`` says of which parameters. Ranks may have gone different ways through the code:
they agree in each backward, by one small all-reduce, on the parameters that any of them
has a gradient of. Buffers that changed become those of rank 0.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar._torch.objects import TensorVersion
from fxpar.errors import GradientError, RankMismatchError
from fxpar.passes.custom_ops import refuse_sparse
from fxpar.runtime.ranks import check_inputs, consensus
from fxpar.runtime.ranks.presence import is_alone

BUCKET = 25 << 20  # bytes that are reduced at once


def takes_part() -> bool:
    """Whether this rank's eager code is one of several ranks' now: the one place that
    decides whether gradients are reduced here."""
    group = _torch.distributed.default_group()
    if group is None or group.size() == 1 or is_alone():
        return False
    return dist.get_backend() != "fake"


@dataclass(eq=False)
class _Buffer:
    """A buffer of a module that ranks should have alike."""

    # That holds it.
    module: weakref.ref[nn.Module]
    # Its name in that module.
    name: str
    watch_number: int  # number of the ``watch`` it came with
    # What ranks had alike; None: nothing yet.
    agreed: TensorVersion | None = None

    def value(self) -> torch.Tensor | None:
        """The tensor it is now; code may put another in its place."""
        tensor = getattr(self.module(), self.name, None)
        return None if isinstance(tensor, DTensor) else tensor

    def is_of(self, module: nn.Module, name: str) -> bool:
        return self.module() is module and self.name == name

    def changed(self) -> bool:
        """Whether code may have written it; norms (2.13) write unseen by versions."""
        owner = self.module()
        norm = bool(getattr(owner, "track_running_stats", False))
        return not self._is_agreed() or (norm and getattr(owner, "training", True))

    def _is_agreed(self) -> bool:
        value = self._counting()
        if value is None or self.agreed is None:
            return value is None and self.agreed is None
        return self.agreed.stands(value)

    def agree(self) -> None:
        """Ranks have it alike now."""
        value = self._counting()
        self.agreed = None if value is None else TensorVersion.of(value)

    def _counting(self) -> torch.Tensor | None:
        """The tensor it is now, if that counts writes."""
        value = self.value()
        return None if value is None or value.is_inference() else value


@dataclass(eq=False)
class _Reducer:
    """What is watched in one life of the process group; places are never used again,
    so that a place means the same on all ranks."""

    # By place.
    parameters: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    # Of each, number of its ``watch``.
    watch_number: list[int] = field(default_factory=list)
    # In the order they came, alike on all ranks.
    buffers: list[_Buffer] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # of parameters, by id
    open: set[int] = field(default_factory=set)  # places of parameters without a hook
    # Places of parameters that this backward added a gradient to.
    touched: set[int] = field(default_factory=set)
    backward: int = -1  # the one that will call ``finish``

    @_torch.dynamo.not_compiled
    def finish(self) -> None:
        """The end of a backward: agree on what has changed, then make it alike.

        Buffers count where their model has gradients: what is garbage here may be
        collected on other ranks."""
        touched, self.touched = self.touched, set()
        count = len(self.parameters)
        used_watches = {self.watch_number[place] for place in touched}
        buffers = enumerate(self.buffers)
        changed = [
            i for i, b in buffers if b.watch_number in used_watches and b.changed()
        ]
        size, cpu = count + len(self.buffers), torch.device("cpu")
        mask = torch.zeros(size, dtype=torch.int32, device=cpu)
        mask[[*touched, *(count + i for i in changed)]] = 1
        mask = mask.to(check_inputs.transport(cpu))
        dist.all_reduce(mask, dist.ReduceOp.MAX)
        hit = mask.nonzero().flatten().tolist()
        written = [self.buffers[i - count] for i in hit if i >= count]
        with torch.no_grad():
            parameters = [self.parameters[i]() for i in hit if i < count]
            _average([_gradient(p) for p in parameters if not isinstance(p, DTensor)])
            _take([x for b in written if (x := b.value()) is not None])
        for buffer in written:
            buffer.agree()

    def hook(self) -> None:
        """Hook the parameters that want a gradient by now."""
        for place in list(self.open):
            parameter = self.parameters[place]()
            if parameter is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_arrived)
                self.open.discard(place)


_REDUCERS: weakref.WeakKeyDictionary[Any, _Reducer] = weakref.WeakKeyDictionary()


@_torch.dynamo.not_compiled
def _arrived(parameter: torch.Tensor) -> None:
    """A gradient was added to: note it until the backward ends."""
    reducer = _REDUCERS.get(_torch.distributed.default_group())
    place = reducer.places.get(id(parameter)) if reducer else None
    if reducer is None or place is None or not takes_part():
        return
    reducer.touched.add(place)
    backward = _torch.aot.current_backward()
    if reducer.backward != backward:
        reducer.backward = backward
        _torch.aot.at_end_of_backward(reducer.finish)


def watch(name: str, modules: Mapping[str, nn.Module]) -> None:
    """From now on, every backward leaves the mean over all ranks in the gradients of
    the parameters of ``modules`` that it added to. Each rank calls this.

    ``name``: of the code, for messages. Raises RankMismatchError if a rank does not
    come, or has other parameters.
    """
    reducer = _REDUCERS.setdefault(_torch.distributed.default_group(), _Reducer())
    parameters = {
        key: p
        for prefix, module in modules.items()
        for key, p in module.named_parameters(prefix)
        if id(p) not in reducer.places
    }
    buffers = {
        f"{path}.{key}": (owner, key, b)
        for prefix, module in modules.items()
        for path, owner in module.named_modules(prefix=prefix)
        for key, b in owner.named_buffers(recurse=False)
        if not any(buffer.is_of(owner, key) for buffer in reducer.buffers)
    }
    both = {**parameters, **{key: b for key, (*_, b) in buffers.items()}}
    text = "\n".join(f"{key}: {x.dtype} {list(x.shape)}" for key, x in both.items())
    consensus.agree(
        f"code of {name} outside all graphs",
        consensus.digest_of(text),
        text,
        what="parameters used outside all graphs",
    )
    number = 1 + max(reducer.watch_number, default=0)
    for p in parameters.values():
        place = len(reducer.parameters)
        reducer.watch_number.append(number)
        reducer.open.add(place)
        reducer.parameters.append(weakref.ref(p))
        reducer.places[id(p)] = place
        weakref.finalize(p, reducer.places.pop, id(p), None)
    for owner, key, _ in buffers.values():
        reducer.buffers.append(_Buffer(weakref.ref(owner), key, number))
    reducer.hook()


def hook_new() -> None:
    """Watch parameters that were frozen when ``watch`` was called and are not now."""
    reducer = _REDUCERS.get(_torch.distributed.default_group())
    if reducer is not None and reducer.open:
        reducer.hook()


def mean_loss(loss: Any) -> Any:
    """The mean over the ranks of what a closure of an optimizer returns on each."""
    if not isinstance(loss, (torch.Tensor, float)):
        return loss
    value = torch.tensor(loss, device="cpu") if isinstance(loss, float) else loss
    value = value.detach().clone()
    device, value = value.device, value.to(check_inputs.transport(value.device))
    dist.all_reduce(value)
    value = value.to(device) / dist.get_world_size()
    return value if isinstance(loss, torch.Tensor) else value.item()


def meet(what: str) -> None:
    """Return once all ranks have come to the same place of eager code, before they
    communicate there. Raises RankMismatchError if they are at different ones."""
    if not takes_part():
        return
    digest = hashlib.sha256(what.encode()).digest()[:8]
    digest_here = torch.tensor([int.from_bytes(digest, signed=True)], device="cpu")
    digest_here = digest_here.to(check_inputs.transport(digest_here.device))
    all_of_them = [torch.empty_like(digest_here) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, digest_here)
    digests = torch.cat(all_of_them).tolist()
    if len(set(digests)) > 1:
        unlike = [
            rank for rank, x in enumerate(digests) if x != digests[dist.get_rank()]
        ]
        raise RankMismatchError(
            f"rank {dist.get_rank()} uses {what} of a sharded model in code that no "
            f"graph contains, rank {unlike[0]} uses another parameter there",
            fix="take the same branches on every rank, or leave the parameters whole "
            "(no fxpar.shard)",
        )


def mean_of_gradient(x: torch.Tensor) -> torch.Tensor:
    """``x``, whose gradient becomes the mean over all ranks of what each has."""
    if x.requires_grad:
        x.register_hook(_mean)
    return x


def _mean(gradient: torch.Tensor) -> torch.Tensor:
    if not takes_part():
        return gradient
    refuse_sparse(gradient)
    meet(f"the gradient of a parameter {list(gradient.shape)}")
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    _average([gradient])
    return gradient


def require_equal(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise GradientError on every rank if gradients that nothing reduced differ
    between ranks. Each rank calls this. Raises RankMismatchError if one does not."""
    candidates = {n: p for n, p in _unwatched(parameters).items() if p.requires_grad}
    text = "\n".join(
        f"{name}: {p.dtype} {list(p.shape)}" for name, p in candidates.items()
    )
    consensus.agree(
        "gradients", consensus.digest_of(text), text, what="what is trained"
    )
    wrong = torch.zeros(len(candidates), dtype=torch.int32, device="cpu")
    for i, p in enumerate(candidates.values()):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
        mean = gradient.clone()
        if not p.numel():
            continue
        _average([mean])
        allowed = max(1e-5, 4 * torch.finfo(p.dtype).eps) * mean.abs().max()
        wrong[i] = int(((gradient - mean).abs().max() > allowed).item())
    wrong = wrong.to(check_inputs.transport(wrong.device))
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    names = [name for name, bad in zip(candidates, wrong.tolist(), strict=True) if bad]
    if names:
        raise GradientError(
            f"gradients of {check_inputs.listed(names)} differ between ranks: with "
            "FXPAR_INPUTS=local each rank has those of its own part of the batch, of "
            "code that is not compiled",
            fix=gradient_sketches.FIX,
        )


def unreduced(
    parameters: Mapping[str, torch.Tensor], among: Collection[int]
) -> dict[str, torch.Tensor]:
    """Gradients that nothing reduces. ``among``: ids of parameters to look at."""
    unwatched = _unwatched(parameters).items()
    return {n: p.grad for n, p in unwatched if id(p) in among and p.grad is not None}


def _unwatched(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    reducer = _REDUCERS.get(_torch.distributed.default_group())
    places = reducer.places if reducer is not None else {}
    return {name: p for name, p in parameters.items() if id(p) not in places}


def _gradient(parameter: nn.Parameter | None) -> torch.Tensor:
    """The gradient to reduce; zeros where other ranks alone have one."""
    assert parameter is not None, "a parameter ended on this rank only"
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.layout != torch.strided:
        raise GradientError(
            f"a sparse gradient of a parameter {list(parameter.shape)} comes from code "
            "that no graph contains",
            fix="use sparse=False",
        )
    return parameter.grad


def _take(buffers: Sequence[torch.Tensor]) -> None:
    """Fill tensors with those of rank 0."""
    for bucket in _buckets(buffers):
        flat = torch.cat([b.reshape(-1) for b in bucket])
        check_inputs.broadcast(flat)
        parts = flat.split([b.numel() for b in bucket])
        for buffer, part in zip(bucket, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


def _average(gradients: Sequence[torch.Tensor]) -> None:
    """Their means over all ranks, in place."""
    launched = []
    for bucket in _buckets(gradients):
        home = bucket[0].device
        flat = torch.cat([g.reshape(-1) for g in bucket]).to(
            check_inputs.transport(home)
        )
        flat /= dist.get_world_size()
        launched.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, flat, work in launched:
        work.wait()
        parts = flat.split([g.numel() for g in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device, of some 25 MB together."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for x in tensors:
        alike.setdefault((x.dtype, x.device), []).append(x)
    for group in alike.values():
        bucket: list[torch.Tensor] = []
        for x in group:
            bucket.append(x)
            if sum(y.nbytes for y in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
