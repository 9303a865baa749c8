"""This module replaces gradients by their mean over the ranks, as DDP does.

In local mode every rank runs its own program on its own part of the batch. In:
backwards of watched parameters. Out: after each backward, ``.grad`` of each watched
parameter that got a gradient on any rank is the mean of the ``.grad`` of all ranks.
Never: the mean of gradients of different parameters, where ranks run different
backwards.

Gradients are reduced in buckets, one collective each, on whose order ranks agree; a
``.grad`` that was None is then a view of the bucket's memory, so that nothing is copied
back, and no memory is used again while a ``.grad`` is a view of it. A bucket is made
when a backward first touches its parameters, in the order in which rank 0 touched them.
In a backward a rank launches a bucket once it is complete and all buckets that are
expected before it are launched, so that all ranks launch the same buckets in the same
order. When the backward ends all ranks meet, by one word without a collective, which
says how many buckets a rank launched and which parameters it touched; then all launch
the other buckets. Where ``.grad`` is a view of a bucket already, as in the backwards
that accumulate after the first, a gradient is added to it and reduced in place.

A gradient comes in two ways: autograd accumulates it, or a compiled backward hands it
over as soon as it is computed (``passes.order.hand_over``), and autograd gets None.
Inside ``unreduced`` neither is noted; the next backward outside reduces the sums.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import GradientError, ShardError
from fxpar.graph.custom_ops import refuse_sparse
from fxpar.passes.order import hand_over as _hand_over  # noqa: F401  (defines the op)
from fxpar.runtime.ranks import check_inputs, meeting, worlds
from fxpar.runtime.ranks.presence import is_alone

# Bytes of the first bucket and of the others, as DDP's. A small first one starts early;
# on a CPU, whose cores reduce it too, that hides nothing.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True)
class MeanOver:
    """Names the ranks over which the mean of a gradient is taken."""

    group: str  # name of the process group
    count: int  # number of its ranks


@dataclass(eq=False)
class Watched:
    """Is a parameter whose gradient is reduced."""

    name: str  # as messages and agreements call it
    ref: weakref.ref[nn.Parameter]  # the parameter
    over: MeanOver  # the ranks that its gradient is reduced over
    early: bool = True  # whether its gradient may be reduced before the backward ends
    place: int | None = None  # its number on all ranks; None until they agree
    bucket: Bucket | None = None  # bucket of its gradient; None until some rank has one
    index: int = 0  # position in its bucket
    has_hook: bool = False  # whether a hook notes its gradients
    is_left: bool = False  # whether other code, as DDP, reduces its gradient by now

    def text(self) -> str:
        """Return the text that must be equal on all ranks."""
        p = self.ref()
        if p is None:
            return f"{self.name}: has ended"
        return f"{self.name}: {p.dtype} {list(p.shape)} {strides_of(p)}"

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's part of its gradient, None if there is none. Raises
        GradientError if it is sparse."""
        p = self.ref()
        if p is None or p.grad is None or self.is_left:
            return None
        if p.grad.layout != torch.strided:
            raise GradientError(
                f"the gradient of parameter {self.name} is sparse",
                fix="use sparse=False",
            )
        return p.grad


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: those of its parameter, if without gaps."""
    return tuple(torch.empty_like(parameter, device="meta").stride())


@dataclass(eq=False)
class BucketMemory:
    """Holds the memory of a bucket's gradients."""

    flat: torch.Tensor  # all gradients, one after the other; 1-D
    # One for each, in the memory of ``flat``, with its parameter's strides.
    slots: list[torch.Tensor]
    unused: int  # the ``memory_uses`` of ``flat`` while no ``.grad`` is a view of it

    def is_free(self, own: int = 0) -> bool:
        """Return whether nothing else but ``own`` tensors holds a view of it."""
        return _torch.objects.memory_uses(self.flat) == self.unused + own

    def has(self, gradient: torch.Tensor | None, member: Watched) -> bool:
        """Return whether the gradient of a member is its slot."""
        return gradient is not None and gradient.is_set_to(self.slots[member.index])


@dataclass(eq=False)
class Bucket:
    """Holds gradients of one dtype, device and group that one collective reduces."""

    members: list[Watched]  # the parameters, in their order in memory
    mask: int  # places of the members, as bits
    # Shape and strides of each gradient, as ranks agreed.
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    dtype: torch.dtype
    device: torch.device
    # Up to two, used in turns: ``.grad`` may be views of one.
    memories: list[BucketMemory] = field(default_factory=list)

    @property
    def over(self) -> MeanOver:
        """Return the ranks that reduce it."""
        return self.members[0].over

    def memory(self, is_waiting: Callable[[Watched], bool]) -> BucketMemory:
        """Return memory for the gradients of a backward: that of ``.grad`` of members,
        or one with any values. ``is_waiting``: of a member, whether its ``.grad`` is to
        stay as it is."""
        for memory in self.memories:
            if memory.is_free():
                return memory
            reduced = (m for m in self.members if not is_waiting(m))
            if memory.is_free(sum(memory.has(m.gradient(), m) for m in reduced)):
                return memory
        sizes = [torch.Size(shape).numel() for shape, _ in self.shapes]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        starts = accumulate(sizes, initial=0)
        # Unlike views, they count their writes each by itself.
        slots = [
            flat.new_empty(0).set_(flat.untyped_storage(), start, shape, strides)
            for (shape, strides), start in zip(self.shapes, starts, strict=False)
        ]
        memory = BucketMemory(flat, slots, _torch.objects.memory_uses(flat))
        self.memories = [*self.memories[-1:], memory]
        return memory

    def forget(self) -> None:
        """Free the memory once all parameters are gone on this rank."""
        if all(member.ref() is None for member in self.members):
            self.memories.clear()


def split_into_buckets(
    parameters: Sequence[Watched], *, first: bool
) -> Iterator[Bucket]:
    """Yield buckets of parameters, in the order in which they fill if gradients come in
    the order of ``parameters``. ``first``: whether this makes the first buckets."""
    filling: dict[Any, list[Watched]] = {}
    sizes: dict[Any, int] = {}
    for watched in parameters:
        p = watched.ref()
        assert p is not None, "ranks agreed on a parameter that ended on this one"
        key = p.dtype, p.device, watched.over
        filling.setdefault(key, []).append(watched)
        sizes[key] = sizes.get(key, 0) + p.nbytes
        is_small = first and p.device.type != "cpu"
        if sizes[key] >= (FIRST_BUCKET if is_small else BUCKET):
            del sizes[key]
            yield _bucket(filling.pop(key))
            first = False
    for members in filling.values():
        yield _bucket(members)


def _bucket(members: list[Watched]) -> Bucket:
    parameters = [p for m in members if (p := m.ref()) is not None]
    shapes = [(tuple(x.shape), strides_of(x)) for x in parameters]
    mask = sum(1 << m.place for m in members if m.place is not None)
    like = parameters[0]
    bucket = Bucket(members, mask, shapes, like.dtype, like.device)
    for i, member in enumerate(members):
        member.bucket, member.index = bucket, i
    return bucket


def launch_sum(flat: torch.Tensor, over: MeanOver) -> Callable[[], None]:
    """Launch an all-reduce, and return a function that waits until the sum has replaced
    the summand."""
    group = _torch.distributed.group_named(over.group)
    transport = check_inputs.transport(flat.device)
    message = flat if flat.device == transport else flat.to(transport)
    work: Any = dist.all_reduce(message, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        if message is not flat:
            flat.copy_(message)

    return wait


_FIX = (
    "call the compiled module with all its parameters on every rank first, or "
    "make them parameters of the module that is compiled"
)


def is_participating() -> bool:
    """Return whether gradients are reduced over ranks now: several ranks run, and this
    one is not in ``fxpar.alone``. Nothing else decides that."""
    group = _torch.distributed.default_group()
    if group is None or group.size() == 1 or is_alone():
        return False
    return dist.get_backend() != "fake"


@dataclass(eq=False)
class _Reducer:
    """Holds the watched parameters of one process group."""

    watched: dict[int, Watched] = field(default_factory=dict)  # by id
    # Parameters that ranks agreed on, by place; a place is never used again.
    placed: list[Watched] = field(default_factory=list)
    new: dict[str, Watched] = field(default_factory=dict)  # the others, by name
    buckets: list[Bucket] = field(default_factory=list)  # in order of launch
    # Places that any rank touched in each of the last two backwards, as bits.
    last: tuple[int, int] = (0, 0)
    # By the places of two backwards, those of the backward that last came after them.
    follows: dict[tuple[int, int], int] = field(default_factory=dict)
    # By the places that ranks touched, how often this rank had a gradient of each
    # place.
    usual: dict[int, dict[int, int]] = field(default_factory=dict)
    # Weak reference to the backward that runs, or to the last one.
    backward: Callable[[], _Backward | None] = lambda: None
    # Parameters without a hook, which required no gradient so far.
    frozen: set[Watched] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # ids of those other code reduces
    # Ids of parameters whose gradients are not reduced now.
    waiting: frozenset[int] = frozenset()
    # Parameters with gradients that were not reduced.
    unreduced: set[Watched] = field(default_factory=set)
    backwards: int = 0  # number of backwards that have ended

    def expected(self) -> int:
        """Return the places that some rank will probably touch in the next backward;
        all ranks return the same."""
        return self.follows.get(self.last, self.last[1])

    def note(self, touched: int) -> None:
        """Note that a backward touched these places."""
        if len(self.follows) > _HISTORY:
            self.follows.clear()
        self.follows[self.last] = touched
        self.last = self.last[1], touched
        self.backwards += 1

    def begun(self) -> _Backward:
        """Return the backward that runs, which autograd will call at its end."""
        backward = self.backward()
        if backward is None or backward.has_ended:
            backward = _Backward(self)
            self.backward = weakref.ref(backward)
            weakref.finalize(backward, _dropped, backward.state).atexit = False
        backward.queue()
        return backward

    def add(self, watched: Watched) -> None:
        """Watch a parameter that ranks have not agreed on yet."""
        p = watched.ref()
        assert p is not None
        self.watched[id(p)] = watched
        weakref.finalize(p, self._end, id(p), watched).atexit = False
        self.hook(watched)

    def hook(self, watched: Watched) -> None:
        """Note gradients of a parameter from now on, if it requires one."""
        p = watched.ref()
        if p is None or not p.requires_grad:
            self.frozen.add(watched)
            return
        self.frozen.discard(watched)
        if not watched.has_hook:
            watched.has_hook = True
            p.register_post_accumulate_grad_hook(_arrived)

    def is_waiting(self, watched: Watched) -> bool:
        """Return whether the gradient of a parameter is not reduced now."""
        return bool(self.waiting) and id(watched.ref()) in self.waiting

    def take_unreduced(self) -> list[Watched]:
        """Return the parameters whose gradients of earlier backwards are reduced now,
        and forget them."""
        ready = {w for w in self.unreduced if not self.is_waiting(w)}
        self.unreduced -= ready
        return [w for w in ready if w.gradient() is not None]

    def _end(self, key: int, watched: Watched) -> None:
        self.watched.pop(key, None)
        self.frozen.discard(watched)
        self.unreduced.discard(watched)
        if self.new.get(watched.name) is watched:
            del self.new[watched.name]
        if watched.bucket is not None:
            watched.bucket.forget()


_HISTORY = 1000  # backwards of other kinds that a reducer remembers
_REDUCERS: weakref.WeakKeyDictionary[Any, _Reducer] = weakref.WeakKeyDictionary()


def _existing() -> _Reducer | None:
    """Return the reducer of the current process group, None if it has none."""
    group = _torch.distributed.default_group()
    return None if group is None else _REDUCERS.get(group)


def _current() -> _Reducer | None:
    """Return the reducer, None if this process watches nothing or takes no part."""
    return _existing() if is_participating() else None


def _arrived(parameter: torch.Tensor) -> None:
    """Note that autograd accumulated a gradient, or None where it was handed over."""
    if parameter.grad is not None:
        _accumulated(parameter)


_torch.dynamo.compile_inlined_only(_arrived)


@_torch.dynamo.not_compiled
def _accumulated(parameter: torch.Tensor) -> None:
    reducer = _current()
    watched = reducer.watched.get(id(parameter)) if reducer is not None else None
    if reducer is None or watched is None or watched.is_left:
        return
    if id(parameter) in reducer.waiting:
        reducer.unreduced.add(watched)
        return
    # Other hooks may still change the gradient.
    is_final = len(_torch.objects.hooks_of(parameter)[1]) == 1
    with torch.no_grad():
        gradient = watched.gradient()
        assert gradient is not None
        reducer.begun().add(watched, gradient, is_final=is_final)


@dataclass(eq=False)
class _State:
    """Holds the part of a backward that is needed after it raised."""

    has_ended: bool = False
    # ``.grad`` of parameters whose bucket is launched; theirs is None meanwhile.
    detached_gradients: dict[Watched, torch.Tensor] = field(default_factory=dict)


def _dropped(state: _State) -> None:
    """Report to other ranks that a backward which autograd dropped raised an error, if
    it did not end."""
    if state.has_ended:
        return
    _give_back(state)
    _fail("its backward raised an error: look at its output")


def _give_back(state: _State) -> None:
    """Give parameters back the gradients that they had accumulated."""
    state.has_ended = True
    for watched, gradient in state.detached_gradients.items():
        p = watched.ref()
        if p is not None and p.grad is None:
            p.grad = gradient
    state.detached_gradients.clear()


@dataclass(eq=False)
class _Filling:
    """Is a bucket in a backward."""

    memory: BucketMemory
    missing: int  # how many members probably still get a gradient
    # Members whose gradient was handed over, with the last write to ``.grad`` then.
    handed: dict[Watched, Any] = field(default_factory=dict)
    # Those of them whose ``.grad`` it was added to.
    in_place: set[Watched] = field(default_factory=set)
    # Values of ``.grad`` in the memory of members that had no gradient.
    untouched: dict[Watched, torch.Tensor] = field(default_factory=dict)
    # Waits for its reduction; None before that is launched.
    wait: Callable[[], None] | None = None


def _write_of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Return a key of the last write to ``.grad``."""
    if gradient is None:
        return None
    return id(gradient), _torch.objects.version_of(gradient)


class _Backward:
    """Is a backward of this rank with its gradients so far; autograd calls it at its
    end."""

    def __init__(self, reducer: _Reducer) -> None:
        self.reducer, self.state = reducer, _State()
        self.expected = reducer.expected()
        self.usual = reducer.usual.get(self.expected, {})
        # Buckets that may be launched before the end, in order.
        self.order = [b for b in reducer.buckets if b.mask & self.expected]
        # How many of them are launched.
        self.launched = 0
        self.filling: dict[Bucket, _Filling] = {}
        # How many gradients of each place came, in the order of the first of each.
        self.counts: dict[int, int] = {}
        # Places whose gradient came after their bucket was launched.
        self.late: set[int] = set()
        # Places without a bucket, in the order of their gradients.
        self.without_bucket: dict[int, None] = {}
        # Names of parameters that ranks have not agreed on.
        self.new: dict[str, None] = {}
        # Numbers of passes of autograd, reentrant ones too, that will call this.
        self.passes: set[int] = set()

    @property
    def has_ended(self) -> bool:
        """Return whether it is over."""
        return self.state.has_ended

    def queue(self) -> None:
        """Let autograd call this when the running pass ends."""
        number = _torch.aot.current_backward()
        if number not in self.passes:
            self.passes.add(number)
            _torch.aot.at_end_of_backward(self)

    @_torch.dynamo.not_compiled
    def __call__(self) -> None:
        """End a pass; the end of the outermost one is the end of the backward."""
        if self.has_ended:
            return
        surrounding = _torch.aot.surrounding_backward()
        if surrounding is not None:

            def queue_again(*_: Any) -> None:
                handle.remove()
                if not self.has_ended:
                    self.queue()

            handle = surrounding.register_hook(queue_again)
            return
        try:
            with torch.no_grad(), worlds.inside(None):
                self._finish()
        finally:
            _give_back(self.state)

    def add(self, watched: Watched, gradient: torch.Tensor, *, is_final: bool) -> None:
        """Note that autograd accumulated, if anything, in ``gradient``. ``is_final``:
        whether nothing changes it until the end."""
        place, bucket = watched.place, watched.bucket
        if place is None:
            self.new[watched.name] = None
            return
        filling = self._filling(bucket) if bucket is not None else None
        if filling is not None and filling.handed.get(watched) == _write_of(gradient):
            return
        self.counts[place] = self.counts.get(place, 0) + 1
        if filling is None:
            return
        if filling.wait is not None:
            self.late.add(place)
        elif is_final and watched.early:
            self.advance(watched)

    def hand(self, watched: Watched, gradient: torch.Tensor) -> bool:
        """Take a gradient in place of autograd, and return whether that is possible."""
        place, bucket = watched.place, watched.bucket
        if place is None or bucket is None:
            # Autograd accumulates it then, and ``add`` counts it.
            self.without_bucket.update({} if place is None else {place: None})
            return False
        filling = self._filling(bucket)
        slot = filling.memory.slots[watched.index]
        if filling.wait is not None or gradient.shape != slot.shape:
            return False
        scale = 1 / watched.over.count
        if filling.memory.has(watched.gradient(), watched):
            slot.add_(gradient)
            filling.in_place.add(watched)
        elif watched in filling.handed:
            slot.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=slot)
        filling.handed[watched] = _write_of(watched.gradient())
        self.counts[place] = self.counts.get(place, 0) + 1
        return True

    def _filling(self, bucket: Bucket) -> _Filling:
        filling = self.filling.get(bucket)
        if filling is None:
            places = [member.place for member in bucket.members]
            missing = sum(place in self.usual for place in places)
            memory = bucket.memory(self.reducer.is_waiting)
            filling = self.filling[bucket] = _Filling(memory, missing)
        return filling

    def advance(self, watched: Watched) -> None:
        """Count one more gradient, and launch complete buckets, in order."""
        assert watched.place is not None
        assert watched.bucket is not None
        if self.counts[watched.place] == self.usual.get(watched.place):
            self.filling[watched.bucket].missing -= 1
        while self.launched < len(self.order):
            bucket = self.order[self.launched]
            filling = self._filling(bucket)
            if filling.missing:
                return
            self._launch(bucket, filling)
            for member in bucket.members:
                gradient, p = member.gradient(), member.ref()
                if gradient is None or p is None or self.reducer.is_waiting(member):
                    continue
                self.state.detached_gradients[member], p.grad = gradient, None
            self.launched += 1

    def _launch(self, bucket: Bucket, filling: _Filling) -> None:
        """Reduce the gradients of the members, of this backward and earlier ones."""
        scale = 1 / bucket.over.count
        for member, slot in zip(bucket.members, filling.memory.slots, strict=True):
            gradient = member.gradient()
            if filling.memory.has(gradient, member):
                if member.place not in self.counts:
                    filling.untouched[member] = slot.clone()
                slot.mul_(scale)
            elif member in filling.in_place:
                raise GradientError(
                    f"the gradient of parameter {member.name} was replaced while a "
                    "backward added to it",
                    fix="set .grad between backwards, not in a hook",
                )
            elif gradient is None:
                if member not in filling.handed:
                    slot.zero_()
            elif member in filling.handed:
                slot.add_(gradient, alpha=scale)
            else:
                torch.mul(gradient, scale, out=slot)
        filling.wait = launch_sum(filling.memory.flat, bucket.over)

    def _finish(self) -> None:
        """Agree with all ranks on the buckets that are not launched, and reduce
        them."""
        reducer = self.reducer
        unreduced = reducer.take_unreduced()
        earlier = {w.place for w in unreduced}
        self.new.update((w.name, None) for w in unreduced if w.place is None)
        touched = sum(1 << p for p in earlier | self.counts.keys() if p is not None)
        late = sum(1 << place for place in self.late)
        places = {**self.without_bucket, **self.counts}
        first = [p for p in places if reducer.placed[p].bucket is None]
        word = json.dumps(
            [self.launched, f"{touched:x}", f"{late:x}", first, [*self.new]]
        )
        words = [json.loads(word) for word in meeting.meet(END, word)]
        names = dict.fromkeys(name for each in words for name in each[4])
        launched = max(each[0] for each in words)
        touched = late = 0
        for each in words:
            touched, late = touched | int(each[1], 16), late | int(each[2], 16)
        if names:
            touched |= self._place(list(names))
        self._make_buckets(touched, words[0][3])
        for bucket in [
            *self.order[self.launched : launched],
            *(b for b in reducer.buckets if b.mask & touched),
        ]:
            filling = self._filling(bucket)
            if filling.wait is None:
                self._launch(bucket, filling)
        sums = self._sum_late(late)
        for bucket, filling in self.filling.items():
            if filling.wait is not None:
                filling.wait()
                self._write(bucket, filling, touched, sums)
        reducer.note(touched)
        if len(reducer.usual) > _HISTORY:
            reducer.usual.clear()
        reducer.usual[touched] = self.counts

    def _write(
        self,
        bucket: Bucket,
        filling: _Filling,
        touched: int,
        sums: Mapping[Watched, torch.Tensor],
    ) -> None:
        """Set ``.grad`` of members that some rank touched to the mean."""
        for member, mean in zip(bucket.members, filling.memory.slots, strict=True):
            assert member.place is not None
            if not touched >> member.place & 1:
                if member in filling.untouched:
                    mean.copy_(filling.untouched[member])
                continue
            if member in sums:
                mean.add_(sums[member])
            p, gradient = member.ref(), self.state.detached_gradients.pop(member, None)
            if p is None:
                continue
            gradient = p.grad if gradient is None else gradient
            if gradient is None:
                gradient = mean.detach()
            elif not gradient.is_set_to(mean):
                gradient.copy_(mean)
            if p.grad is not gradient:
                p.grad = gradient

    def _sum_late(self, late: int) -> dict[Watched, torch.Tensor]:
        """Return the means of gradients that came after their bucket was launched, on
        any rank."""
        sums: dict[Watched, torch.Tensor] = {}
        waits = []
        for watched in self.reducer.placed if late else ():
            assert watched.place is not None
            if not late >> watched.place & 1:
                continue
            bucket = watched.bucket
            assert bucket is not None
            slot = self.filling[bucket].memory.slots[watched.index]
            sums[watched] = mean = torch.zeros_like(slot)
            if watched.place in self.late:
                gradient = watched.gradient()
                assert gradient is not None
                torch.mul(gradient, 1 / watched.over.count, out=mean)
            waits.append(launch_sum(mean, watched.over))
        for wait in waits:
            wait()
        return sums

    def _place(self, names: Sequence[str]) -> int:
        """Agree on parameters of which some rank had a gradient for the first time, and
        return their places as bits."""
        new = [self.reducer.new.get(name) for name in names]
        agreed = [watched for watched in new if watched is not None]
        lines = [
            f"{name}: is not known" if watched is None else watched.text()
            for name, watched in zip(names, new, strict=True)
        ]
        first = len(self.reducer.placed)
        _agree_on(self.reducer, lines, END, agreed)
        for watched in agreed:
            del self.reducer.new[watched.name]
        return (1 << len(self.reducer.placed)) - (1 << first)

    def _make_buckets(self, touched: int, first: Sequence[int]) -> None:
        """Make buckets for touched places that have none. ``first``: places in the
        order in which rank 0 touched them."""
        places = dict.fromkeys(first)
        rest = touched
        for bucket in self.reducer.buckets:
            rest &= ~bucket.mask
        while rest:
            place = (rest & -rest).bit_length() - 1
            places[place] = None
            rest &= rest - 1
        homeless = [self.reducer.placed[place] for place in places]
        has_none = not self.reducer.buckets
        self.reducer.buckets += split_into_buckets(homeless, first=has_none)


END = "the end of a backward"


def _fail(message: str) -> None:
    with worlds.inside(None):
        meeting.fail(message)


def watch(name: str, modules: Mapping[str, nn.Module], over: MeanOver) -> None:
    """Let every backward from now on average the gradients of the parameters of
    ``modules``. Every rank must call this. Parameters and buffers that differ between
    ranks become those of rank 0, with a warning.

    ``name``: the user of the parameters, for messages. ``over``: the ranks over
    which gradients are reduced. Raises RankMismatchError if
    a rank is missing, or has other parameters.
    """
    reducer = _reducer()
    new = [
        each
        for prefix, module in modules.items()
        for key, p in module.named_parameters(prefix)
        if (each := _watched(reducer, key, p, over)) is not None
    ]
    for each in new:
        reducer.add(each)
    buffers = {
        f"{prefix}.{key}": x
        for prefix, module in modules.items()
        for key, x in module.named_buffers()
        if not isinstance(x, DTensor)
    }
    lines = [each.text() for each in new]
    lines += [f"buffer {key}: {x.dtype} {list(x.shape)}" for key, x in buffers.items()]
    with torch.no_grad(), worlds.inside(None):
        _agree_on(reducer, lines, f"the first call of {name}", new, buffers)


def note(
    name: str,
    parameters: Mapping[str, nn.Parameter],
    over: MeanOver,
    *,
    early: bool = True,
) -> None:
    """Watch parameters that this rank may see before other ranks do: they agree on
    them, by ``name`` and the parameters' names, when a backward first has a gradient of
    them.

    ``early``: whether, as far as is known, no other code (as DDP) reduces them.
    """
    reducer = _reducer()
    for key, p in parameters.items():
        each = _watched(reducer, f"{name}: {key}", p, over)
        if each is None:
            continue
        count = 2
        while each.name in reducer.new:
            each.name, count = f"{name}: {key} ({count})", count + 1
        each.early = early
        reducer.new[each.name] = each
        reducer.add(each)


def leaves_under(x: Any) -> list[nn.Parameter]:
    """Return the parameters from which a value was computed in code that is not
    compiled."""
    if not isinstance(x, torch.Tensor) or x.grad_fn is None:
        return []
    leaves = _torch.aot.leaves_under(x, _is_served)
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]


def is_watched(p: torch.Tensor) -> bool:
    """Return whether the gradients of a parameter are averaged, here or by other
    code."""
    reducer = _existing()
    return reducer is not None and (id(p) in reducer.watched or id(p) in reducer.left)


def hook_new() -> None:
    """Watch parameters that were frozen before and are not now."""
    reducer = _existing()
    if reducer is not None and reducer.frozen:
        for watched in list(reducer.frozen):
            reducer.hook(watched)


def backwards() -> int:
    """Return how many backwards of watched parameters have ended."""
    reducer = _existing()
    return 0 if reducer is None else reducer.backwards


@contextlib.contextmanager
def unreduced(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let gradients of ``parameters`` add up on each rank in backwards inside this
    block; the first backward outside it reduces the sums. Raises ShardError at its end
    if this module reduces none of them."""
    if not is_participating():
        yield
        return
    ids, reducer = frozenset(map(id, parameters)), _reducer()
    before, reducer.waiting = reducer.waiting, reducer.waiting | ids
    try:
        yield
    finally:
        reducer.waiting = before
    if not any(key in reducer.watched for key in ids):
        raise ShardError(
            "no_sync needs a compiled model that is called inside, with inputs=local "
            "or sharded parameters",
            fix="set FXPAR_INPUTS=local, or call fxpar.shard(model) before the "
            "optimizer is made",
        )


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """Leave the gradients of ``parameters`` from now on to other code, as DDP."""
    reducer = _reducer()
    for p in parameters:
        if id(p) in reducer.watched:
            reducer.watched[id(p)].is_left = True
        reducer.left.add(id(p))
        weakref.finalize(p, reducer.left.discard, id(p)).atexit = False


def _reducer() -> _Reducer:
    return _REDUCERS.setdefault(_torch.distributed.default_group(), _Reducer())


def _watched(
    reducer: _Reducer, name: str, p: nn.Parameter, over: MeanOver
) -> Watched | None:
    """Return a parameter to watch; None if it is watched, or needs no reduction."""
    is_known = id(p) in reducer.watched or id(p) in reducer.left
    # Gradients of ``fxpar.shard`` are reduced where the global value is read.
    if is_known or over.count == 1 or isinstance(p, DTensor):
        return None
    return Watched(name, weakref.ref(p), over)


def _agree_on(
    reducer: _Reducer,
    lines: Sequence[str],
    where: str,
    parameters: Sequence[Watched],
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Check that ``lines``, which describe parameters and buffers, are equal on all
    ranks, give all ranks the values of rank 0, and the parameters places. Raises
    RankMismatchError."""
    text = "\n".join(lines)
    what = f"the parameters that are trained, at {where}"
    meeting.agree(f"parameters at {where}", text, what=what, fix=_FIX)
    pairs = ((each.name, each.ref()) for each in parameters)
    fed: list[check_inputs.Fed]
    fed = [(name, "parameter", p) for name, p in pairs if p is not None]
    fed += [(key, "buffer", x) for key, x in (buffers or {}).items()]
    check_inputs.share(fed)
    for each in parameters:
        each.place = len(reducer.placed)
        reducer.placed.append(each)


@dataclass(eq=False)
class _Handing:
    """Is a backward of a compiled graph that runs."""

    reducer: _Reducer  # has the watched parameters
    nodes: Mapping[int, Any]  # of autograd, by position of each tensor among arguments
    # Positions of arguments whose gradient was taken.
    positions_handed: set[int] = field(default_factory=set)


# The ``memory_uses`` of memory that one tensor uses.
_ONE_USE = _torch.objects.memory_uses(torch.empty(0))


_NOW = threading.local()  # ``handing``: the ``_Handing`` that runs in a thread


@torch.library.impl("fxpar::hand_over", "CompositeExplicitAutograd")
@torch.no_grad()
def _take(gradients: list[torch.Tensor], inputs: list[int], holders: list[int]) -> None:
    """Take the gradients that autograd would only accumulate, and free their memory if
    no more than ``holders`` tensors share it."""
    handing: _Handing | None = getattr(_NOW, "handing", None)
    if handing is None:
        return
    reducer, backward, handed = handing.reducer, None, []
    for gradient, position, most in zip(gradients, inputs, holders, strict=True):
        leaf = _torch.aot.accumulating(handing.nodes.get(position))
        if leaf is None or tuple(map(len, _torch.objects.hooks_of(leaf))) != (0, 1):
            continue
        each = reducer.watched.get(id(leaf))
        if each is None or not each.early or not each.has_hook or each.is_left:
            continue
        if reducer.is_waiting(each):
            continue
        backward = backward or reducer.begun()
        if backward.hand(each, gradient):
            handing.positions_handed.add(position)
            handed.append(each)
            if _torch.objects.memory_uses(gradient) < most + _ONE_USE:
                gradient.untyped_storage().resize_(0)
    for each in handed:
        assert backward is not None
        backward.advance(each)


# Autograd functions of compiled graphs that hand gradients over.
_SERVED: weakref.WeakSet[Any] = weakref.WeakSet()


def serve_backward(args: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Let the backward of a call of a compiled graph hand gradients over. ``args``,
    ``outputs``: of the call."""
    positions = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    function = _torch.aot.wrap_backward(outputs, partial(_handing, positions))
    if function is not None:
        _SERVED.add(function)


def _is_served(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) in _SERVED


def _handing(
    positions: Sequence[int], node: Any, _: Any, run: Callable[[], Any]
) -> Any:
    reducer = _current()
    if reducer is None:
        return run()
    edges, nodes = node.next_functions, {}
    if len(edges) == len(positions):
        nodes = {i: edge[0] for i, edge in zip(positions, edges, strict=True)}
    before, _NOW.handing = getattr(_NOW, "handing", None), _Handing(reducer, nodes)
    try:
        results = run()
        positions_handed = _NOW.handing.positions_handed
    except Exception as error:
        backward = reducer.backward()
        is_reported = backward is not None and not backward.has_ended
        leaves = map(_torch.aot.accumulating, nodes.values())
        if not is_reported and any(leaf is not None for leaf in leaves):
            _fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        _NOW.handing = before
    if not positions_handed:
        return results
    return tuple(None if i in positions_handed else x for i, x in enumerate(results))


def meet(what: str) -> None:
    """Return once all ranks have come to the same place in eager code, before they
    communicate there. Raises RankMismatchError if they are at different places."""
    if is_participating():
        with worlds.inside(None):
            meeting.meet(
                f"{what} of a sharded model in code that no graph contains", ""
            )


def mean_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks of their gradients of a sharded parameter."""
    group = _torch.distributed.default_group()
    if not is_participating():
        return gradient
    refuse_sparse(gradient)
    meet(f"the gradient of a parameter {list(gradient.shape)}")
    mean = gradient.clone(memory_format=torch.contiguous_format)
    mean /= group.size()
    launch_sum(mean, MeanOver(group.group_name, group.size()))()
    return mean
