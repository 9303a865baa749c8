"""PyTorch's own sample calls (OpInfos), planned for small meshes and run in lockstep.

``trial`` takes one OpInfo: some of its samples, forward and backward in one graph, with
operands split along one dim after another, along two, and fed as random summands. Each
is compared with one device in float64.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

import fxpar
from fxpar.errors import PlanError
from fxpar.planning import TracedPlan
from fxpar.sharding.spec import Spec

DTYPES = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)

# Values of these are undefined.
EMPTY = ("empty", "empty_like", "new_empty", "empty_permuted", "empty_strided")
EMPTY += ("new_empty_strided", "resize_", "resize_as_")

TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7}

# An eigenvector's sign, say, may turn on a rounding, and sums of summands are rounded.
UNSTABLE = ("linalg", "svd", "pca", "qr", "geqrf", "eig", "matrix_rank", "lu", "ldl")


@dataclass
class Trial:
    """What became of one OpInfo. ``tried``: whether a call of it was planned, and
    ``refused`` why one was not. ``unknown``: ops without a rule. ``wrong``: calls whose
    numbers differ. ``runs``: how many were compared, ``split`` in how many of them
    something was split."""

    name: str
    tried: bool = False
    refused: str = ""
    unknown: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    runs: int = 0
    split: int = 0


def name_of(info: Any) -> str:
    """As torch's own tests name it."""
    return ".".join(filter(None, (info.name, info.variant_test_name)))


def trial(info: Any, samples: int = 2) -> Trial:
    """Try an OpInfo. Never raises for what it finds."""
    found = Trial(name_of(info))
    for args, kwargs in list(samples_of(info, samples, found)):
        call = OpCall(info, args, kwargs)
        try:
            plan, _ = call.plan(_Asked("x=2", (None,) * len(call.tensors)))
        except Exception as error:  # not ours: a value read, a kernel that lacks
            found.refused = f"{type(error).__name__}: {str(error)[:80]}"
            continue
        found.tried, found.unknown = True, found.unknown | set(plan.unknown)
        _compare(call, found)
    return found


def samples_of(info: Any, count: int, found: Trial) -> Iterator[tuple[tuple, dict]]:
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None:
        found.refused = "no kernel on the CPU for these dtypes"
        return
    torch.manual_seed(0)
    random.seed(0)
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    try:
        listed = list(
            itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), 200)
        )
    except Exception as error:
        found.refused = f"no samples: {str(error)[:80]}"
        return
    # torch lists those of meshgrid in the order of a set of texts, which each process
    # has its own of.
    listed.sort(key=lambda s: s.kwargs.get("indexing", ""))
    made = [((s.input, *s.args), s.kwargs) for s in listed]
    tensors = [x for x in _pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors):
        found.refused = "sparse or nested"
        return
    made.sort(key=lambda call: -len(_places(call)))
    step = max(1, (len(made) - 1) // max(1, count - 1))
    for args, kwargs in made[::step][:count]:
        yield _pytree.tree_map_only(
            torch.Tensor,
            lambda x: _copy(x).requires_grad_(x.requires_grad),
            (args, kwargs),
        )


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in a copy of the memory as this one does."""
    x = x.detach()
    if x.is_conj() or x.is_neg():
        return x.clone()
    memory = x.untyped_storage().clone()
    return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())


def _places(call: Any) -> list[tuple[int, int, int]]:
    """(operand, dim, count) of dims that can be split in ``count`` parts."""
    tensors = [x for x in _pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]
    return [
        (i, d, next(k for k in (2, 3, 5) if n % k == 0))
        for i, x in enumerate(tensors)
        for d, n in enumerate(x.shape)
        if n > 1 and any(n % k == 0 for k in (2, 3, 5))
    ]


@dataclass(frozen=True)
class _Asked:
    """``mesh`` and the specs of the operands. ``summed``: an operand that is given as
    two summands, on two ranks of axis ``x``."""

    mesh: str
    specs: tuple[Spec | None, ...]
    summed: int | None = None

    def __str__(self) -> str:
        specs = ", ".join("?" if s is None else str(s) for s in self.specs)
        return f"{self.mesh}: {specs}; in summands: {self.summed}"


class OpCall:
    """One call of an OpInfo, to be planned for different specs of its operands."""

    def __init__(self, info: Any, args: tuple, kwargs: dict) -> None:
        self.op, self.args, self.kwargs = info.op, args, kwargs
        self.leaves, self.tree = _pytree.tree_flatten((args, kwargs))
        self.at = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)]
        self.tensors = [self.leaves[i] for i in self.at]
        self.grad = any(x.requires_grad for x in self.tensors)

    def run(self, summands: torch.Tensor | None, at: int, leaves: list) -> Any:
        leaves = list(leaves)
        if summands is not None:
            leaves[at] = summands.sum(0)
        args, kwargs = _pytree.tree_unflatten(leaves, self.tree)
        return self.op(*args, **kwargs)

    def plan(self, asked: _Asked) -> tuple[TracedPlan, tuple]:
        """(plan, arguments to run it on). Raises as ``fxpar.plan`` does."""
        specs, summands, at = list(asked.specs), None, 0
        if asked.summed is not None:
            at, x = self.at[asked.summed], self.tensors[asked.summed].detach()
            noise = torch.rand(x.shape, dtype=x.dtype)
            needs = self.tensors[asked.summed].requires_grad
            summands = torch.stack([x - noise, noise]).requires_grad_(needs)
            spec = specs[asked.summed] or Spec.whole(x.dim())
            specs.insert(0, Spec.of([["x"], *spec.dims]))
        call = (summands, at, self.leaves)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = fxpar.plan(
                self.run,
                *call,
                mesh=asked.mesh,
                in_specs=specs,
                mode="propagate",
                grad=self.grad,
            )
        return plan, call

    def asked(self, sums: bool) -> Iterator[_Asked]:
        """One dim split; dims of two operands or of one; a dim beside summands."""
        places = _places((self.args, self.kwargs))
        for place in places[:3]:
            yield self._asked({"x": place})
        for first, second in list(itertools.combinations(places, 2))[:1]:
            if first[2] * second[2] <= 10:
                yield self._asked({"x": first, "y": second})
        smooth = [
            i
            for i, x in enumerate(self.tensors)
            if x.is_floating_point() and x.untyped_storage().nbytes() == x.nbytes
        ]  # a sum has not the memory that a view looks at
        for i in smooth[:2] if sums else ():
            other = next((p for p in places if p[0] != i), None)
            yield self._asked({"y": other} if other else {}, i)

    def _asked(
        self, axes: dict[str, tuple[int, int, int]], summed: int | None = None
    ) -> _Asked:
        sizes = {axis: count for axis, (_, _, count) in axes.items()}
        sizes |= {} if summed is None else {"x": 2}
        specs: list[Spec | None] = [None] * len(self.tensors)
        for i, x in enumerate(self.tensors):
            split = {d: (axis,) for axis, (k, d, _) in axes.items() if k == i}
            if split:
                entries = [split.get(d, ()) for d in range(x.dim())]
                specs[i] = Spec.of(entries)
        mesh = ",".join(f"{axis}={n}" for axis, n in sorted(sizes.items()))
        return _Asked(mesh, tuple(specs), summed)


def _compare(call: OpCall, found: Trial) -> None:
    empty = found.name.split(".")[0] in EMPTY
    fixed = not empty and _is_fixed(call)
    for asked in call.asked(not any(word in found.name for word in UNSTABLE)):
        try:
            plan, values = call.plan(asked)
            torch.manual_seed(0)
            got = plan.outcome(*values)
            torch.manual_seed(0)
            want = plan.reference_outcome(*values)
            found.unknown |= set(plan.unknown)
            found.runs += 1
            found.split += any(axes for _, spec in plan.values for axes in spec.dims)
            if fixed:
                _close([got.result, got.gradients], [want.result, want.gradients])
        except PlanError as error:
            found.refused = str(error).splitlines()[0]
        except Exception as error:  # whatever it is, it is this call's
            text = " ".join(str(error).split())[:300]
            found.wrong.append(f"{asked}: {type(error).__name__}: {text}")


def _is_fixed(call: OpCall) -> bool:
    """Whether two calls give the same: the op draws no random numbers."""
    outs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        leaves = [_copy(x) if isinstance(x, torch.Tensor) else x for x in call.leaves]
        outs.append(_pytree.tree_leaves(call.run(None, 0, leaves)))
    return all(
        a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(*outs, strict=True)
        if isinstance(a, torch.Tensor)
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    return x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8)


def _close(got: Any, want: Any) -> None:
    pairs = zip(_pytree.tree_leaves(got), _pytree.tree_leaves(want), strict=True)
    for a, b in pairs:
        if not isinstance(b, torch.Tensor):
            continue
        tolerance = TOLERANCE.get(b.dtype, 3e-2 if b.dtype.itemsize < 4 else 1e-3)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def shares(trials: Sequence[Trial]) -> tuple[int, int]:
    """(OpInfos that could be planned, those of them every op of which has a rule)."""
    tried = [t for t in trials if t.tried]
    return len(tried), sum(not t.unknown for t in tried)
