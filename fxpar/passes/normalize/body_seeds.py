"""Draws a seed outside of bodies that draw random numbers, and passes it in.

In: a call of ``cond``, ``map``, ``scan`` or ``while_loop``, while the program is
traced and before it is differentiated. Out: if its bodies draw, the call with one more
operand, a seed; each body draws its numbers as functions of that seed and of the global
index. So rank 0 draws for all, numbers do not depend on the mesh, and a backward that
recomputes a body gets the numbers of the forward: the seed is an input of both. Each
step of a loop has a seed of its own: a row of a tensor of seeds where the number of
steps is known; a ``while_loop`` carries its seed from step to step.

Never: a body draws from the generator; ``refuse_draws`` raises for draws that are left
in a traced graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar.errors import PlanError
from fxpar.graph.graph_bodies import bodies_of
from fxpar.passes.normalize import random  # noqa: F401  (the ops)
from fxpar.sharding.body_rules import FORMS, CallForm
from fxpar.sharding.program import user_line

aten, ours = torch.ops.aten, torch.ops.fxpar

# Added to the seed of a step to get the next one: 2**32 over the golden ratio, whose
# multiples are far from each other, since on the CPU only 32 bits of a seed count.
STEP = 0x9E3779B9

_SEEDS = "seeds"
_FIX = "draw the numbers outside and pass them in"


# Op -> the positions of its arguments.
_CALLS = {name.partition("::")[2]: form for name, form in FORMS.items()}


def _seeded(call: CallForm) -> int:
    """Return the position of the list of inputs to which the seed is appended: one of
    which a body takes a row at each step, or that a loop carries."""
    places = call.rows, call.carried, call.inputs[0]
    return next(place for place in places if place is not None)


def _seeds_of(call: CallForm, args: tuple[Any, ...]) -> list[int]:
    """Return the size of the tensor of seeds: one for each step, or a scalar."""
    return [] if call.rows is None else [args[call.rows][0].shape[0]]


@dataclass
class _Draws:
    """Records what a body draws while it runs, and draws it by seeds."""

    # The seed of the first draw; further ones count on from it.
    seed: torch.Tensor
    # Seeds count down, for a test whose body counts up from the same seed.
    down: bool = False
    # The draws, in order.
    requests: list[tuple[Any, ...]] = field(default_factory=list)

    def next(self, device: Any, *request: Any) -> torch.Tensor:
        """Return a seed that no other draw of this body has, and record ``request``,
        which describes the draw."""
        count = len(self.requests)
        self.requests.append(request)
        place = -1 - count if self.down else count
        seed = self.seed if place == 0 else self.seed + place
        device = torch.device(device or torch.get_default_device())
        return seed if seed.device == device else seed.to(device)

    def numbers(self, mode: str, size: Sequence[int], like: dict[str, Any]) -> Any:
        """Return random numbers as ``torch.rand`` or ``torch.randn`` (``mode``) does;
        ``like`` has dtype and device."""
        seed = self.next(like.get("device"), mode, *size)
        out = ours.random(list(size), seed, mode, list(size), [0] * len(size))
        return out.to(like.get("dtype") or torch.get_default_dtype())

    def integers(
        self, low: int, high: int, size: Sequence[int], like: dict[str, Any]
    ) -> Any:
        seed = self.next(like.get("device"), low, high, *size)
        out = ours.randint(low, high, list(size), seed, list(size), [0] * len(size))
        return out.to(like.get("dtype") or torch.int64)

    def replace(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an op, drawn by seeds; NotImplemented if it draws
        nothing or has a generator of its own."""
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return NotImplemented
        if kwargs.get("generator") is not None:
            return NotImplemented
        if op in _SOURCES:
            return _SOURCES[op](self, *args, kwargs)
        if op in _FORMULAS:
            return _FORMULAS[op](*args, **kwargs)
        if op.overloadpacket in _DECOMPOSED:
            return _torch.inductor.decompositions()[op](*args, **kwargs)
        return op.decompose(*args, **kwargs)  # into ops that come here again

    def called(self, name: str, args: tuple[Any, ...]) -> None:
        """Record the seeds that a higher-order call would draw for its bodies."""
        if name in _CALLS and _has_draws(_CALLS[name], args):
            self.requests.append((_SEEDS, *_seeds_of(_CALLS[name], args)))


# Op that draws by itself -> (draws, its arguments, kwargs such as dtype and device).
_SOURCES: dict[Any, Callable[..., Any]] = {
    aten.rand.default: lambda own, size, like: own.numbers("rand", size, like),
    aten.randn.default: lambda own, size, like: own.numbers("randn", size, like),
    aten.randint.default: lambda own, high, size, like: own.integers(
        0, high, size, like
    ),
    aten.randint.low: _Draws.integers,
    aten.normal.float_float: lambda own, mean, std, size, like: (
        own.numbers("randn", size, like) * std + mean
    ),
}


def _uniform(x: torch.Tensor, low: float = 0, high: float = 1, **_: Any) -> Any:
    return torch.rand_like(x) * (high - low) + low


def _normal(x: torch.Tensor, mean: float = 0, std: float = 1, **_: Any) -> Any:
    return torch.randn_like(x) * std + mean


def _bernoulli(x: torch.Tensor, p: Any = 0.5, **_: Any) -> Any:
    return (torch.rand_like(x, dtype=torch.float32) < p).to(x.dtype)


def _normals(mean: Any, std: Any = 1, **_: Any) -> Any:
    like = mean + std if isinstance(std, torch.Tensor) else mean
    return torch.randn_like(like) * std + mean


def _in_place(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x.copy_(formula(x, *args, **kwargs))


# Op -> its formula in numbers that ``rand_like`` and ``randn_like`` draw.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.default: lambda x, **_: _bernoulli(x, x),
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _in_place(_bernoulli),
    aten.bernoulli_.Tensor: _in_place(_bernoulli),
    aten.uniform.default: _uniform,
    aten.uniform_.default: _in_place(_uniform),
    aten.normal_functional.default: _normal,
    aten.normal_.default: _in_place(_normal),
    aten.normal.Tensor_float: _normals,
    aten.normal.Tensor_Tensor: _normals,
    aten.normal.float_Tensor: lambda mean, std, **_: _normals(std * 0 + mean, std),
}

# Ops that Inductor's decompositions reduce to others.
_DECOMPOSED = {
    aten.native_dropout,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.exponential,
    aten.exponential_,
    aten.geometric,
    aten.geometric_,
    aten.cauchy,
    aten.cauchy_,
    aten.log_normal,
    aten.log_normal_,
}

_ACTIVE: list[_Draws] = []  # for each body that runs, the innermost last


def _run(body: Callable[..., Any], draws: _Draws, inputs: Sequence[Any]) -> Any:
    """Run a body whose draws are replaced by draws by seeds."""
    _ACTIVE.append(draws)
    try:
        with _torch.loops.ops_replaced(draws.replace, draws.called):
            return _torch.loops.run_body(body, inputs)
    finally:
        _ACTIVE.pop()


def _has_draws(call: CallForm, args: tuple[Any, ...]) -> bool:
    """Return whether a body or the test of a call draws numbers that seeds can give."""
    inputs = [x for group in call.inputs for x in args[group]]
    start = sum(len(args[g]) for g in call.inputs if call.rows and g < call.rows)
    rows = range(start, start + len(args[call.rows])) if call.rows else ()

    def draws(body: Callable[..., Any], *values: Any) -> bool:
        step = [x[0] if i in rows else x for i, x in enumerate(values)]
        draws = _Draws(torch.zeros((), dtype=torch.int64))
        _run(body, draws, step)
        return bool(draws.requests)

    tests = () if call.test is None else (call.test,)
    return any(
        _torch.loops.evaluate_body(functools.partial(draws, args[i]), inputs)
        for i in (*tests, *call.bodies)
    )


def _device(args: Any) -> torch.device:
    """Return the device of the first operand that is not on the CPU, else the CPU."""
    tensors = [x for x in _torch.fake.tree_leaves(args) if isinstance(x, torch.Tensor)]
    devices = [x.device for x in tensors if x.device.type != "cpu"]
    return devices[0] if devices else torch.device("cpu")


def _new_seeds(size: list[int], device: torch.device) -> torch.Tensor:
    """Return seeds for a call; inside a body they are drawn by the body's own seed."""
    if _ACTIVE:
        seed = _ACTIVE[-1].next(device, _SEEDS, *size)
        return ours.randint(0, 1 << 62, size, seed, size, [0] * len(size))
    seeds = ours.seeds(*(size or [1]), device)
    return seeds if size else seeds[0]


def pass_seeds(name: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of a call, whose bodies take a seed if they draw, and the
    number of its last results that are not the user's."""
    call = _CALLS[name]
    if not _has_draws(call, args):
        return args, 0
    seeds = _new_seeds(_seeds_of(call, args), _device(args))
    seeded_args, at, is_loop = list(args), _seeded(call), call.test is not None
    seeded_args[at] = (*args[at], seeds)
    place = sum(len(args[g]) for g in call.inputs if g <= at)
    for i in call.bodies:
        seeded_args[i] = with_seed(args[i], place, hands_on=is_loop)
    if call.test is not None:
        seeded_args[call.test] = with_seed(args[call.test], place, down=True)
    return tuple(seeded_args), int(is_loop)


def with_seed(
    body: Callable[..., Any], place: int, *, down: bool = False, hands_on: bool = False
) -> Callable[..., Any]:
    """Return a body that takes its seed as its ``place``-th input; ``hands_on``: and
    returns the seed of the next step.

    It raises PlanError if it draws something else when it is traced for a backward."""
    draws_of_runs: list[list[tuple[Any, ...]]] = []

    def seeded(*inputs: Any) -> Any:
        seed = inputs[place]
        operands = (*inputs[:place], *inputs[place + 1 :])
        draws = _Draws(seed, down=down)
        results = _run(body, draws, operands)
        draws_of_runs.append(draws.requests)
        if draws_of_runs[0] != draws.requests:
            what = "random numbers inside a branch or loop are drawn in another order"
            raise PlanError(f"{what} in its backward", fix=_FIX)
        return (*results, seed + STEP) if hands_on else results

    return seeded


_torch.loops.rewrite_calls(tuple(_CALLS), pass_seeds)


def refuse_draws(graph: fx.Graph) -> None:
    """Raise PlanError if a body of a traced graph, whose nodes hold their bodies
    (``graph_bodies.show_bodies``), draws from the generator."""
    for node in graph.nodes:
        for body in bodies_of(node):
            refuse_draws(body.graph)
            for inner in body.graph.nodes:
                tags = getattr(inner.target, "tags", ())
                if torch.Tag.nondeterministic_seeded in tags:
                    raise PlanError(
                        f"{node.target} draws random numbers ({inner.target}) in "
                        "a branch or loop, where ranks would not draw the same "
                        "random numbers",
                        where=user_line(inner) or user_line(node),
                        fix=_FIX,
                    )
