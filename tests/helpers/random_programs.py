"""Random programs with a mesh, specs and hints: what ``test_fuzz`` plans and runs.

``Case(seed)`` grows a program statement by statement from a seed, evaluating each as it
goes, so that every program runs and its values stay of moderate size. Programs that
amplify a change of their inputs too much are grown anew. Floats are float64.
``str(case)`` is the whole reproduction as text.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpar
from fxpar.sharding.mesh import Mesh
from tests.helpers import device

SIZES = (1, 2, 2, 3, 4, 4, 4, 4, 5, 6, 8, 8, 12)
EVEN = (2, 4, 4, 8, 8)  # of the cases where all axes divide almost all dims
ODD = (1, 3, 3, 5, 5, 6, 7)  # of those where they divide almost none
AXES = ("dp", "tp", "sp", "x", "y", "data")
ELEMENTS = 2048  # at most, of a value
RANKS = 16  # at most, of a mesh

_SCOPE = {"torch": torch, "F": F, "fxpar": fxpar, "math": math}


def module_of(
    source: str,
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
) -> nn.Module:
    """A module with this ``forward``, these parameters and buffers."""
    scope = dict(_SCOPE)
    exec(compile(source, "<program>", "exec"), scope)
    module = type("Generated", (nn.Module,), {"forward": scope["forward"]})()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value.clone()))
    for name, value in buffers.items():
        module.register_buffer(name, value.clone())
    return module


class Case:
    """One program, its arguments, and how it is planned."""

    # Kinds of statements that it is made of; none: ``OPS``.
    statements: Sequence[Callable[[Case], str | None]] = ()

    def __init__(self, seed: int) -> None:
        self.seed = seed
        for attempt in range(100):
            self.rng = random.Random(seed * 1000 + attempt)
            self.generator = torch.Generator(device.NAME)
            self.generator.manual_seed(seed * 1000 + attempt)
            self._build()
            if self._steady():
                break

    def _build(self) -> None:
        rng = self.rng
        self.arguments: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}  # floats and integers, by name
        self.lines: list[str] = []
        self.sizes = rng.choice((SIZES, EVEN, ODD))
        self.mesh = self._mesh()
        self.grad = rng.random() < 0.6
        self.draws = False
        self.may_draw = rng.random() < 0.3
        self._float([self.size() for _ in range(rng.randint(2, 3))], 0.0)
        for _ in range(rng.randint(3, 12)):
            self._statement()
        self.results = self._results()
        self.in_specs = self._in_specs()
        self.out_specs = self._out_specs()
        self.hints = self._hints()
        self.mode = rng.choice(["propagate"] * 9 + ["replicate"])

    # What the test uses

    def plan(self) -> Any:
        """``fxpar.plan`` of this case."""
        return fxpar.plan(
            self.program(),
            *self.tensors(),
            mesh=self.mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            hints=self.hints,
            mode=self.mode,
            grad=self.grad,
        )

    def program(self) -> nn.Module:
        return module_of(self.source(), self.parameters, self.buffers)

    def tensors(self) -> list[torch.Tensor]:
        """The arguments; floats require grad where the case differentiates."""
        return [
            x.clone().requires_grad_(self.grad and x.is_floating_point())
            for x in self.arguments.values()
        ]

    def eager(self) -> tuple[Any, dict, dict]:
        """What the plan must compute: results, gradients of their sum by name, buffers
        by name."""
        return self._run(self.program(), self.tensors())

    def source(self) -> str:
        """The program as a function of ``self`` and the arguments."""
        lines = [*self.lines, f"return {', '.join(self.results)},"]
        head = f"def forward(self, {', '.join(self.arguments)}):"
        return "\n".join([head, *(f"    {line}" for line in lines)])

    def __str__(self) -> str:
        owned = {**self.parameters, **self.buffers}
        shapes = [f"# self.{n}: {list(x.shape)}" for n, x in owned.items()]
        shapes += [
            f"# {n}: {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            for n, x in self.arguments.items()
        ]
        how = {
            name: getattr(self, name)
            for name in ("mesh", "in_specs", "out_specs", "hints", "mode", "grad")
        }
        asked = [f"# {name} = {str(value)!s}" for name, value in how.items()]
        return "\n".join([f"# seed {self.seed}", *shapes, *asked, self.source()])

    def _run(
        self, program: nn.Module, tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, dict, dict]:
        with torch.set_grad_enabled(self.grad):
            results = program(*tensors)
        buffers = dict(program.named_buffers())
        if not self.grad:
            return results, {}, buffers
        owned = dict(program.named_parameters())
        owned |= {
            n: x
            for n, x in zip(self.arguments, tensors, strict=True)
            if x.requires_grad
        }
        total = sum(r.sum() for r in results if r.requires_grad)
        found = torch.autograd.grad(total, list(owned.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(owned, found, strict=True) if g is not None}
        return tuple(r.detach() for r in results), gradients, buffers

    def _steady(self) -> bool:
        """Whether rounding errors stay rounding errors: the program differentiates, its
        values are moderate and move little with its inputs."""
        if self.grad and not any(
            self.values[name].requires_grad for name in self.results
        ):
            return False
        if self.draws:
            return True
        plain = list(_tensors(self.eager()))
        if not all(bool((x.double().abs() < 1e4).all()) for x in plain):
            return False

        def moved(x: torch.Tensor) -> torch.Tensor:
            if not x.is_floating_point():
                return x
            noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
            return x.detach() * (1 + 1e-9 * noise)

        state = {n: moved(p) for n, p in self.parameters.items()}
        other = module_of(self.source(), state, self.buffers)
        tensors = [moved(x).requires_grad_(x.requires_grad) for x in self.tensors()]
        return all(
            bool(((a.double() - b.double()).abs() < 1e-5).all())
            for a, b in zip(plain, _tensors(self._run(other, tensors)), strict=True)
        )

    # Mesh, specs, hints

    def _mesh(self) -> str:
        rng = self.rng
        while True:
            count = rng.choice((1, 1, 2, 2, 2, 3))
            names = rng.sample(AXES, count)
            sizes = [rng.choice((1, 2, 2, 2, 3, 4)) for _ in names]
            if math.prod(sizes) <= RANKS:
                return ",".join(f"{n}={k}" for n, k in zip(names, sizes, strict=True))

    def _entries(self, shape: Sequence[int]) -> list[tuple[str, ...]]:
        """Axes per dim, at random; mostly such as have a row for each rank."""
        mesh = Mesh.parse(self.mesh)
        dims: list[tuple[str, ...]] = [() for _ in shape]
        for axis in self.rng.sample(mesh.names, len(mesh.names)):
            least = 1 if self.rng.random() < 0.1 else mesh.sizes[axis]
            fits = [d for d, n in enumerate(shape) if n >= mesh.count(dims[d]) * least]
            if fits and self.rng.random() < 0.6:
                d = self.rng.choice(fits)
                dims[d] = (*dims[d], axis)
        return dims

    def _in_specs(self) -> list | None:
        if self.rng.random() < 0.5:
            return None
        return [
            tuple(self._entries(x.shape)) if self.rng.random() < 0.7 else None
            for x in self.arguments.values()
        ]

    def _out_specs(self) -> list | None:
        if self.rng.random() < 0.6:
            return None
        return [
            tuple(self._entries(self.values[name].shape))
            if self.rng.random() < 0.7
            else None
            for name in self.results
        ]

    def _hints(self) -> dict[str, Any]:
        """For parameters, and for arguments that rest nowhere in particular."""
        owners = dict(self.parameters)
        for i, (name, x) in enumerate(self.arguments.items()):
            if self.in_specs is None or self.in_specs[i] is None:
                owners[name] = x
        return {
            name: [self._hint(axes) for axes in self._entries(x.shape)]
            for name, x in owners.items()
            if self.rng.random() < 0.3
        }

    def _hint(self, axes: tuple[str, ...]) -> Any:
        if not axes:
            return self.rng.choice(("?", "_", None))
        if len(axes) > 1:
            return axes
        return self.rng.choice((axes, axes[0], f"{axes[0]}?"))

    # Growing

    def _results(self) -> list[str]:
        """The last value and up to two others, mostly ones that nothing reads."""
        made = [name for name in self.values if name.startswith("v")]
        body = "\n".join(line.partition(" = ")[2] for line in self.lines)
        unread = [name for name in made if not re.search(rf"\b{name}\b", body)]
        pool = unread if self.chance(0.7) else list(self.values)
        found = self.rng.sample(pool, min(len(pool), self.rng.choice((1, 1, 2))))
        found = list(dict.fromkeys([made[-1], *found]))
        return [*found, found[0]] if self.chance(0.05) else found

    def _statement(self) -> None:
        """Append one statement; some draws of an op do not fit, others are drawn."""
        for _ in range(50):
            op = self.rng.choice(self.statements or OPS)
            if op in DRAWING and not self.may_draw:
                continue
            try:
                expression = op(self)
            except (ValueError, IndexError):  # nothing to choose from: a dim is empty
                continue
            if expression is not None and self._emit(expression):
                self.draws |= op in DRAWING
                return

    def _emit(self, expression: str) -> bool:
        """Append ``v = expression`` if it evaluates to something moderate. What follows
        ``;`` is done to the value, called ``$``."""
        scope = {**_SCOPE, **self.values}
        owned = {n: x for n, x in self.values.items() if n.startswith("self.")}
        owned |= {f"self.{n}": x.clone() for n, x in self.buffers.items()}
        scope["self"] = SimpleNamespace(
            **{n.removeprefix("self."): x for n, x in owned.items()}
        )
        expression, _, more = expression.partition(";")
        name = f"v{len(self.lines)}"
        lines = [f"{name} = {expression}"]
        if more:
            lines += [part.strip() for part in more.replace("$", name).split(";")]
        try:
            exec("\n".join(lines), scope)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        value = scope[name]
        if not isinstance(value, torch.Tensor) or value.numel() > ELEMENTS:
            return False
        if not value.numel() and not self.chance(0.1):
            return False
        if value.is_floating_point() and not bool((value.abs() < 1e3).all()):
            return False
        self.lines += lines
        self.values[name] = value
        return True

    # Material

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(
        self, low: int = 0, high: int = 5, fits: Callable[..., bool] | None = None
    ) -> str | None:
        """A float of ``low`` to ``high`` dims, mostly a late one."""
        found = [
            name
            for name, x in self.values.items()
            if x.is_floating_point()
            and low <= x.dim() <= high
            and (fits is None or fits(x))
        ]
        if not found:
            return None
        return found[-1] if self.chance(0.6) else self.rng.choice(found)

    def pick_whole(self) -> str | None:
        """Integers or booleans of at least one dim."""
        found = [
            name
            for name, x in self.values.items()
            if not x.is_floating_point() and x.dim()
        ]
        return self.rng.choice(found) if found else None

    def shape(self, name: str) -> list[int]:
        return list(self.values[name].shape)

    def dim(self, name: str, least: int = 1) -> int:
        """A dim with at least that many elements, counted from either end."""
        shape = self.shape(name)
        d = self.rng.choice([d for d, n in enumerate(shape) if n >= least] or [0])
        return d if self.chance(0.5) else d - len(shape)

    def size(self) -> int:
        return self.rng.choice(self.sizes)

    def _float(self, shape: Sequence[int], owned: float = 0.5) -> str:
        value = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        if self.chance(owned):
            name = f"p{len(self.parameters)}"
            self.parameters[name] = value
            self.values[f"self.{name}"] = value.clone().requires_grad_(self.grad)
            return f"self.{name}"
        return self._argument(value.requires_grad_(self.grad))

    def _argument(self, value: torch.Tensor) -> str:
        name = f"a{len(self.arguments)}"
        self.arguments[name], self.values[name] = value.detach(), value
        return name

    def float(self, *shape: int) -> str:
        """A new float, an argument or a parameter; or an old one of that shape."""
        found = self.pick(len(shape), len(shape), lambda x: x.shape == shape)
        return found if found and self.chance(0.4) else self._float(shape)

    def buffer(self, value: torch.Tensor) -> str:
        """A new buffer. Statements may write to it, so nothing else reads it."""
        name = f"b{len(self.buffers)}"
        self.buffers[name] = value
        return f"self.{name}"

    def ints(self, high: int, *shape: int) -> str:
        """Indices below ``high``, a new argument."""
        return self._argument(torch.randint(high, shape, generator=self.generator))

    def distinct(self, high: int, count: int) -> str:
        """``count`` different indices below ``high``."""
        order = torch.randperm(high, generator=self.generator)
        return self._argument(order[:count].clone())

    def partner(self, name: str) -> str:
        """Something that broadcasts with a value."""
        shape = self.shape(name)
        if self.chance(0.4):
            other = self.pick(fits=lambda x: _broadcasts(shape, x.shape))
            if other is not None:
                return other
        skip = self.rng.randint(0, len(shape))
        sizes = [1 if self.chance(0.3) else n for n in shape[skip:]]
        return self.float(*sizes)


class PartsCase(Case):
    """A case on an axis of several parts, which its specs and hints name."""

    def _mesh(self) -> str:
        mesh = self.rng.choice(("tp=4", "tp=8", "dp=2,tp=4", "tp=6", "x=4,tp=2"))
        axis, size = max(Mesh.parse(mesh).axes, key=lambda axis: axis[1])
        self.axis, self.cut = axis, self.rng.choice([2, size // 2])
        return mesh

    def _entries(self, shape: Sequence[int]) -> list[tuple[str, ...]]:
        size, cut = Mesh.parse(self.mesh).sizes[self.axis], self.cut
        major, minor = f"{self.axis}:{cut}", f"{self.axis}:({cut}){size // cut}"
        ways = ((self.axis,), (major,), (major,), (minor,), (minor, major))
        return [
            tuple(
                name
                for axis in axes
                for name in (self.rng.choice(ways) if axis == self.axis else (axis,))
            )
            for axes in super()._entries(shape)
        ]


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(tuple(a), tuple(b))) <= ELEMENTS
    except RuntimeError:
        return False


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for x in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(x, torch.Tensor):
            yield x
        else:
            yield from _tensors(x)


# Kinds of statements: each returns an expression, or None if nothing suits

OPS: list[Callable[[Case], str | None]] = []
DRAWING: set[Callable[[Case], str | None]] = set()


def op(weight: int) -> Callable[[Callable], Callable]:
    def register(made: Callable) -> Callable:
        OPS.extend([made] * weight)
        return made

    return register


# Contractions


@op(6)
def matmul(c: Case) -> str | None:
    x = c.pick(2, 4)
    if x is None:
        return None
    *batch, _, k = c.shape(x)
    other = [1 if c.chance(0.2) else n for n in batch][c.rng.randint(0, len(batch)) :]
    y = c.float(*other, k, c.size())
    return c.rng.choice((f"{x} @ {y}", f"torch.matmul({x}, {y}) * 0.5"))


@op(2)
def matmul_of_two(c: Case) -> str | None:
    x, y = c.pick(2, 4), c.pick(2, 4)
    if x is None or y is None:
        return None
    forms = f"{x} @ {y}", f"{x} @ {y}.mT", f"{x}.mT @ {y}"
    return "(" + c.rng.choice(forms) + ") * 0.3"


@op(1)
def vector(c: Case) -> str | None:
    x = c.pick(1, 3)
    return None if x is None else f"{x} @ {c.float(c.shape(x)[-1])}"


@op(6)
def linear(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    n = c.size()
    weight = c.float(n, c.shape(x)[-1])
    bias = f", {c.float(n)}" if c.chance(0.5) else ""
    return f"F.linear({x}, {weight}{bias})"


@op(2)
def einsum(c: Case) -> str | None:
    x = c.pick(3, 3)
    if x is None:
        return None
    a, b, d = c.shape(x)
    e = c.size()
    equation, shape = c.rng.choice(
        [
            ("abd,ade->abe", (a, d, e)),
            ("abd,bde->abe", (b, d, e)),
            ("abd,de->eab", (d, e)),
            ("abd,abe->de", (a, b, e)),
            ("abd,bd->a", (b, d)),
            ("abd,aed->abe", (a, e, d)),
            ("abd,e->abde", (e,)),
        ]
    )
    return f'torch.einsum("{equation}", {x}, {c.float(*shape)}) * 0.5'


@op(1)
def added_product(c: Case) -> str | None:
    x = c.pick(2, 3)
    if x is None:
        return None
    *batch, m, k = c.shape(x)
    n = c.size()
    name = "torch.baddbmm" if batch else "torch.addmm"
    bias = c.float(*c.rng.choice(((n,), (1, n), (m, n), (*batch, m, n))))
    scale = ", alpha=0.5, beta=2.0" if c.chance(0.3) else ""
    return f"{name}({bias}, {x}, {c.float(*batch, k, n)}{scale})"


@op(2)
def attention(c: Case) -> str | None:
    b, h, s, d = (c.rng.choice((1, 2, 4, 8)) for _ in range(4))
    q = c.pick(4, 4) if c.chance(0.5) else c.float(b, h, s, d)
    if q is None:
        return None
    b, h, s, d = c.shape(q)
    groups = c.rng.choice([g for g in (1, 2, 4) if h % g == 0])
    t = s if c.chance(0.5) else c.size()
    k, v = (c.float(b, h // groups, t, d) for _ in range(2))
    how = f", enable_gqa={groups > 1}"
    if c.chance(0.3):
        how += ", is_causal=True"
    elif c.chance(0.3):
        how += f", attn_mask={c.float(*c.rng.choice(((s, t), (b, 1, s, t))))}"
    return f"F.scaled_dot_product_attention({q}, {k}, {v}{how})"


# Views and data movement


@op(4)
def reshape(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    shape = c.shape(x)
    for _ in range(c.rng.randint(1, 3)):
        d = c.rng.randrange(len(shape))
        if c.chance(0.5) and d + 1 < len(shape):
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        elif len(shape) < 5:
            divisor = c.rng.choice([k for k in (1, 2, 3, 4) if shape[d] % k == 0])
            pair = [divisor, shape[d] // divisor]
            shape[d : d + 1] = pair if c.chance(0.5) else pair[::-1]
    if c.chance(0.3):
        shape[c.rng.randrange(len(shape))] = -1
    name = c.rng.choice(("reshape", "reshape", "view"))
    return f"{x}.{name}({shape})"


@op(3)
def permute(c: Case) -> str | None:
    x = c.pick(2, 4)
    if x is None:
        return None
    dims = c.rng.sample(range(len(c.shape(x))), len(c.shape(x)))
    forms = f"{x}.permute({dims})", f"{x}.transpose({dims[0]}, {dims[1]})"
    return c.rng.choice(forms) + c.rng.choice(("", "", ".contiguous()"))


@op(3)
def ones(c: Case) -> str | None:
    x = c.pick(0, 3)
    if x is None:
        return None
    n = len(c.shape(x))
    return c.rng.choice(
        (f"{x}.unsqueeze({c.rng.randint(-n - 1, n)})", f"{x}.squeeze()")
        + ((f"{x}.squeeze({c.dim(x)})", f"{x}.flatten()") if n else ())
    )


@op(2)
def expand(c: Case) -> str | None:
    x = c.pick(1, 3)
    if x is None:
        return None
    shape = [n if n > 1 else c.size() for n in c.shape(x)]
    front = [c.size()] if c.chance(0.4) else []
    return f"{x}.expand({front + shape})"


@op(3)
def part(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    d = c.dim(x, 2)
    n = c.shape(x)[d]
    k = c.rng.choice([k for k in (1, 2, 3, 4) if k <= n])
    start = c.rng.randrange(n)
    stop = c.rng.randint(start, n)
    if c.chance(0.2):
        return f"{x}[..., {start}:{stop}:{c.rng.choice((1, 2))}]"
    return c.rng.choice(
        (
            f"{x}.narrow({d}, {start}, {stop - start})",
            f"{x}.select({d}, {start})",
            f"{x}.chunk({k}, {d})[-1]",
            f"{x}.split({k}, {d})[0]",
            f"torch.cat({x}.chunk({k}, {d})[::-1], {d})",
            f"torch.stack({x}.unbind({d})[::2], {d})",
            f"torch.cat([t * {c.rng.choice((0.5, 2.0))} for t in {x}.split({k}, {d})])",
            f"{x}.unflatten({d}, ({k}, -1)).select({d if d >= 0 else d - 1}, 0)",
        )
    )


@op(3)
def join(c: Case) -> str | None:
    x = c.pick(1, 3)
    if x is None:
        return None
    shape, d = c.shape(x), c.dim(x)
    if c.chance(0.4):
        return f"torch.stack([{x}, {c.float(*shape)}], {d})"
    if c.chance(0.5):
        shape[d] = c.size()
    order = [x, c.float(*shape)]
    c.rng.shuffle(order)
    return f"torch.cat([{', '.join(order)}], {d})"


@op(2)
def pad(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    amounts = [c.rng.randint(-1, 2) for _ in range(2 * c.rng.randint(1, 2))]
    value = c.rng.choice(("", "", ", value=1.5"))
    return f"F.pad({x}, {amounts}{value})"


@op(3)
def rearrange(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    d, n = c.dim(x), len(c.shape(x))
    forms = [
        f"{x}.flip({d})",
        f"{x}.roll({c.rng.randint(-2, 3)}, {d})",
        f"{x}.repeat({[c.rng.choice((1, 1, 2)) for _ in range(n)]})",
        f"{x}.repeat_interleave(2, {d})",
        f"{x}.unfold({d}, {min(2, c.shape(x)[d])}, 1)",
        f"{x}.clone()",
    ]
    if n > 1:
        forms += [f"{x}.tril()", f"{x}.triu(1)", f"{x}.diagonal(0, -2, -1)"]
        forms += [f"{x}.movedim(0, -1)", f"torch.rot90({x}, 1, [0, 1])"]
    return c.rng.choice(forms)


@op(5)
def constrain(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    entries = [axes or c.rng.choice((None, "?")) for axes in c._entries(c.shape(x))]
    return f"fxpar.constrain({x}, {', '.join(map(repr, entries))})"


# Reductions


@op(6)
def reduce(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    n = len(c.shape(x))
    dims: Any = c.rng.sample(range(-n, 0), c.rng.randint(1, n))
    name = c.rng.choice(("sum", "sum", "mean", "mean", "amax", "amin", "logsumexp"))
    if c.chance(0.2):
        name = c.rng.choice(("sum", "mean", "max", "min"))
        return f"{x}.{name}()"
    return f"{x}.{name}({dims}, keepdim={c.chance(0.5)})"


@op(3)
def spread(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    d, keep = c.dim(x), c.chance(0.5)
    return c.rng.choice(
        (
            f"{x}.var({d}, correction=0, keepdim={keep})",
            f"({x}.var({d}, keepdim={keep}) + 0.1)",
            f"({x}.var(correction=0) + 0.1).sqrt()",
            f"torch.linalg.vector_norm({x} + 3, 2, {d}, {keep})",
            f"({x}.abs() + 0.1).norm(1, {d}, keepdim={keep})",
            f"{x}.max({d}, keepdim={keep}).values",
            f"{x}.median({d}).values",
            f"(0.3 * {x}.sigmoid() + 0.7).prod({d}, keepdim={keep})",
        )
    )


@op(4)
def along(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    d = c.dim(x)
    return c.rng.choice(
        (
            f"torch.softmax({x}, {d})",
            f"torch.softmax({x}, {d})",
            f"torch.log_softmax({x}, {d})",
            f"{x}.cumsum({d})",
            f"{x}.tanh().cumprod({d})",
            f"{x}.sort({d}).values",
            f"{x}.topk({min(2, c.shape(x)[d])}, {d}).values",
            f"torch.logcumsumexp({x}, {d})",
            f"F.normalize({x} + 3, dim={d})",
        )
    )


# Pointwise


@op(5)
def unary(c: Case) -> str | None:
    x = c.pick()
    if x is None:
        return None
    names = ["tanh", "sigmoid", "relu", "abs", "square", "neg", "sin", "exp"]
    forms = [f"{x}.{name}()" for name in names]
    forms += [f"F.{name}({x})" for name in ("gelu", "silu", "softplus", "leaky_relu")]
    forms += [f"({x} * 2 - 1)", f"{x}.clamp(-1, 0.5)", f"1 / ({x}.square() + 1)"]
    forms += [f"({x}.abs() + 0.1).sqrt()", f"({x}.square() + 0.5).rsqrt()"]
    forms += [f"{x} / {c.rng.choice((2, 4.0, 3))}", f"{x}.to(torch.float64)"]
    return c.rng.choice(forms)


@op(7)
def binary(c: Case) -> str | None:
    x = c.pick()
    if x is None:
        return None
    y = c.partner(x)
    if c.chance(0.3):
        x, y = y, x
    return c.rng.choice(
        (
            f"{x} + {y}",
            f"{x} + {y}",
            f"{x} - {y}",
            f"{x} * {y}",
            f"{x} * {y}",
            f"{x} / ({y}.square() + 1)",
            f"torch.maximum({x}, {y})",
            f"torch.where({x} > {y}, {x}, {y})",
            f"torch.add({x}, {y}, alpha=0.5)",
            f"torch.lerp({x}, {y}, 0.3)",
            f"torch.addcmul({x}, {y}, {y}, value=0.5)",
            f"({x} - {y}).square()",
        )
    )


@op(2)
def masked(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    shape = c.shape(x)
    mask = f"{c.ints(2, *shape[c.rng.randint(0, len(shape)) :])}.bool()"
    return c.rng.choice(
        (
            f"{x}.masked_fill({mask}, 0)",
            f"{x}.masked_fill({mask}, -2.0)",
            f"torch.where({mask}, {x}, 0.0)",
            f"torch.where({mask}, {x}, {c.partner(x)})",
            f"{x} * {mask}",
        )
    )


# Integers and booleans


@op(2)
def compare(c: Case) -> str | None:
    x = c.pick(1, 3)
    if x is None:
        return None
    d = c.dim(x)
    return c.rng.choice(
        (
            f"({x} > 0).sum({d})",
            f"({x} > {c.partner(x)}).any({d})",
            f"({x}.abs() < 2).all()",
            f"({x} > 0).cumsum({d})",
            f"{x} > 0.1",
            f"({x} > 0).long().amax({d}, keepdim=True)",
            f"({x} < 1).sum()",
            f"{x}.argmin({d}, keepdim=True)",
            f"torch.bucketize({x}, torch.tensor([-1.0, 0.1, 1.0]).double())",
            f"{x}.isnan()",
            f"torch.count_nonzero({x} > 0, {d})",
        )
    )


@op(2)
def whole_numbers(c: Case) -> str | None:
    i = c.pick_whole()
    if i is None:
        return None
    d = c.dim(i)
    return c.rng.choice(
        (
            f"{i}.to(torch.float64)",
            f"{i}.to(torch.float64) * {c.float(c.shape(i)[-1])}",
            f"{i}.long() * 2 - 1",
            f"{i}.sum({d}, keepdim=True)",
            f"{i}.long() % 3",
            f"{i}.bool()",
            f"~{i}.bool() & {i}.flip({d}).bool()",
            f"F.one_hot({i}.long() % 2, 2).to(torch.float64)",
            f"{i}.long().cumsum({d})",
            f"{i}.long().prod({d})",
            f"torch.where({i}.bool(), {c.float(*c.shape(i))}, 0.0)",
            f"{i}.long().max({d}).values",
            f"{i}.reshape(-1)",
            f"{i}.movedim(0, -1)",
        )
    )


# Indexing


@op(3)
def lookup(c: Case) -> str | None:
    table = c.pick(2, 2) if c.chance(0.5) else c.float(c.size(), c.size())
    if table is None:
        return None
    index = c.ints(c.shape(table)[0], *[c.size() for _ in range(c.rng.randint(1, 2))])
    padding = ", padding_idx=0" if c.chance(0.2) else ""
    return f"F.embedding({index}, {table}{padding})"


@op(4)
def index(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None or 0 in c.shape(x):
        return None  # there is no index
    d, shape = c.dim(x), c.shape(x)
    n, k = shape[d], c.size()
    forms = [
        lambda: f"{x}.index_select({d}, {c.ints(n, k)})",
        lambda: f"{x}.gather({d}, {c.ints(n, *_with(shape, d, k))})",
        lambda: f"{x}[{c.ints(shape[0], k)}]",
        lambda: f"{x}[{c.ints(shape[0], 2, k)}]",
        lambda: f"{x}[..., {c.ints(shape[-1], k)}]",
    ]
    if len(shape) > 1:
        forms += [
            lambda: f"{x}[{c.ints(shape[0], k)}, {c.ints(shape[1], k)}]",
            lambda: f"{x}[:, {c.ints(shape[1], k)}]",
            lambda: f"{x}[torch.arange({shape[0]}), {c.ints(shape[1], shape[0])}]",
        ]
    return c.rng.choice(forms)()


@op(3)
def update(c: Case) -> str | None:
    x = c.pick(1, 3)
    if x is None or 0 in c.shape(x):
        return None
    d, shape = c.dim(x), c.shape(x)
    n, k = shape[d], c.rng.randint(1, shape[d])
    some = _with(shape, d, k)
    forms = [
        lambda: f"{x}.index_add({d}, {c.ints(n, k)}, {c.float(*some)})",
        lambda: f"{x}.index_copy({d}, {c.distinct(n, k)}, {c.float(*some)})",
        lambda: f"{x}.index_fill({d}, {c.ints(n, k)}, 0.5)",
        lambda: f"{x}.scatter_add({d}, {c.ints(n, *some)}, {c.float(*some)})",
        lambda: f"{x}.scatter({d}, {c.ints(n, *_with(shape, d, 1))}, 0.5)",
        lambda: (
            f"{x}.index_put(({c.ints(shape[0], k)},), "
            f"{c.float(k, *shape[1:])}, accumulate=True)"
        ),
        lambda: f"F.one_hot({c.ints(n, k)}, {n}).to(torch.float64)",
        lambda: f"torch.slice_scatter({x}, {c.float(*some)}, {d}, {n - k}, {n})",
        lambda: f"F.one_hot({x}.argmax({d}), {n}).to(torch.float64)",
        lambda: f"{x}.argmax({d}).to(torch.float64)",
    ]
    return c.rng.choice(forms)()


def _with(shape: Sequence[int], d: int, n: int) -> list[int]:
    out = list(shape)
    out[d] = n
    return out


@op(3)
def in_place(c: Case) -> str | None:
    """Changes of a copy, which functionalization turns into new values."""
    x = c.pick(1, 3)
    if x is None:
        return None
    d, shape = c.dim(x), c.shape(x)
    i = c.rng.randrange(shape[0])
    k = c.rng.randint(1, shape[d])
    forms = [
        lambda: f"{x}.clone(); $[{i}] = 0.5",
        lambda: f"{x}.clone(); $[{i}:] *= 2",
        lambda: f"{x}.clone(); $[..., ::2] = {c.float(*shape)}[..., ::2]",
        lambda: f"{x}.clone(); $.narrow({d}, 0, {k}).add_(1)",
        lambda: f"{x}.clone(); $.select({d}, -1).mul_(0.5)",
        lambda: f"{x} * 1; $ += {c.float(*shape)}",
        lambda: f"{x}.clone(); $[{c.ints(shape[0], 2)}] = 0.5",
        lambda: (
            f"{x}.clone(); $.index_add_({d}, {c.ints(shape[d], k)}, "
            f"{c.float(*_with(shape, d, k))})"
        ),
        lambda: (
            f"{x}.clone(); $.transpose(0, -1).copy_({c.float(*shape)}.movedim(0, -1))"
            if len(shape) < 3
            else None
        ),
        lambda: f"{x}.clone(); $.view(-1)[:{k}] = 0.0",
    ]
    return c.rng.choice(forms)()


@op(1)
def buffered(c: Case) -> str | None:
    x = c.pick(2, 4, lambda x: x.shape[0] > 1)
    if x is None:
        return None
    n = c.shape(x)[1]
    mean = c.buffer(torch.zeros(n, dtype=torch.float64))
    var = c.buffer(torch.ones(n, dtype=torch.float64))
    training = c.chance(0.7)
    return f"F.batch_norm({x}, {mean}, {var}, training={training}, eps=0.1)"


@op(1)
def remembered(c: Case) -> str | None:
    """A buffer that keeps a running average."""
    x = c.pick(1, 3)
    if x is None:
        return None
    shape, keep = c.shape(x), c.rng.choice((0.9, 0.5))
    state = c.buffer(torch.zeros(shape[-1], dtype=torch.float64))
    dims = tuple(range(len(shape) - 1))
    mean = f"{x}.detach().mean({dims})" if dims else f"{x}.detach()"
    return f"{x} * 1; {state}.mul_({keep}).add_({mean}); $ = $ + {state}"


# Norms, convolutions, losses


@op(5)
def norm(c: Case) -> str | None:
    x = c.pick(2, 4)
    if x is None:
        return None
    *lead, n = c.shape(x)
    weight, bias = c.float(n), c.float(n)
    ch = c.shape(x)[1]
    forms = [
        f"F.layer_norm({x}, ({n},), {weight}, {bias})",
        f"F.layer_norm({x}, ({n},), eps=0.1)",
        f"{x} * ({x}.square().mean(-1, keepdim=True) + 0.1).rsqrt() * {weight}",
        f"F.rms_norm({x}, ({n},), {weight}, eps=0.1)",
        f"F.batch_norm({x}, None, None, training=True, eps=0.1)",
    ]
    if len(lead) > 1:
        groups = c.rng.choice([g for g in (1, 2, 4) if ch % g == 0])
        scale = f", {c.float(ch)}, {c.float(ch)}" if c.chance(0.5) else ""
        forms += [f"F.group_norm({x}, {groups}{scale}, eps=0.1)"] * 2
        forms += [f"F.instance_norm({x}, eps=0.1)"]
        forms += [f"F.layer_norm({x}, {tuple(c.shape(x)[-2:])}, eps=0.1)"]
    return c.rng.choice(forms)


@op(2)
def convolve(c: Case) -> str | None:
    x = c.pick(3, 4)
    if x is None:
        return None
    _, ch, *space = c.shape(x)
    k = len(space)
    groups = c.rng.choice([g for g in (1, 1, 2, 4) if ch % g == 0])
    out = groups * c.rng.choice((1, 2, 4))
    window = [min(c.rng.choice((1, 2, 3)), n) for n in space]
    bias = c.float(out) if c.chance(0.5) else "None"
    forms = [
        lambda: (
            f"F.conv{k}d({x}, {c.float(out, ch // groups, *window)}, {bias}, "
            f"stride={c.rng.choice((1, 2))}, padding=1, groups={groups})"
        ),
        lambda: (
            f"F.conv_transpose{k}d({x}, {c.float(ch, out // groups, *window)}, {bias}, "
            f"groups={groups})"
        ),
        lambda: f"F.avg_pool{k}d({x}, {window})",
        lambda: f"F.max_pool{k}d({x}, {window})",
        lambda: f'F.interpolate({x}, scale_factor=2, mode="nearest")',
    ]
    return c.rng.choice([*forms[:2], *forms])()


@op(2)
def loss(c: Case) -> str | None:
    x = c.pick(2, 2)
    if x is None:
        return None
    n, classes = c.shape(x)
    how = c.rng.choice(("mean", "sum", "none"))
    other = c.float(n, classes)
    target = c.ints(classes, n)
    return c.rng.choice(
        (
            f'F.cross_entropy({x}, {target}, reduction="{how}")',
            f"F.cross_entropy({x}, {target}, label_smoothing=0.1)",
            f'F.mse_loss({x}, {other}, reduction="{how}")',
            f'F.smooth_l1_loss({x}, {other}, reduction="{how}")',
            f"F.binary_cross_entropy_with_logits({x}, {other}.sigmoid())",
        )
    )


# Random numbers and constants


@op(4)
def dropout(c: Case) -> str | None:
    x = c.pick(1, 4)
    return None if x is None else f"F.dropout({x}, {c.rng.choice((0.1, 0.5))})"


@op(2)
def noise(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    return c.rng.choice(
        (
            f"{x} + torch.rand_like({x})",
            f"{x} * torch.randn({c.shape(x)}, dtype=torch.float64)",
            f"{x} * (torch.rand({c.shape(x)[-1]}) < 0.5)",
            f"{x} + torch.randint(0, 5, {c.shape(x)})",
        )
    )


DRAWING |= {dropout, noise}


@op(2)
def constant(c: Case) -> str | None:
    x = c.pick(1, 4)
    if x is None:
        return None
    n = c.shape(x)[-1]
    return c.rng.choice(
        (
            f"{x} + torch.arange({n})",
            f"{x} * torch.linspace(0, 1, {n}, dtype=torch.float64)",
            f"{x} + torch.ones({c.shape(x)}, dtype=torch.float64)",
            f"torch.zeros_like({x}) + 0.5",
            f"torch.full({c.shape(x)}, 0.5, dtype=torch.float64) * {x}",
            f"{x} * torch.eye({n}, dtype=torch.float64)[0]",
            f"{x}.new_zeros({c.shape(x)}) + {x}",
        )
    )
