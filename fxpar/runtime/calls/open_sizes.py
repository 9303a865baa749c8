"""Compares sizes of calls between ranks, and leaves sizes of a Dynamo graph open.

``Sizes`` has those of one rank's call; where ranks differ all raise the error, since
every rank knows the sizes of all. With open sizes one program serves a range of sizes:

In: a graph whose inputs have sizes that Dynamo left open, and the arguments of a call.
Out: the graph with a symbol among its inputs for each open size, ``OpenProgram``, and
once that is compiled the sizes that it holds for, ``SizeRange``. A size in a call is a
fixed multiple (its *unit*) of its symbol, so that a size that the plan splits divides
evenly. Never: a run for sizes outside the range; another program is made for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar import _torch
from fxpar._torch.dynamo import example_of
from fxpar._torch.symbols import is_symbol, substituted
from fxpar.errors import InputMismatchError
from fxpar.graph import size_nodes
from fxpar.runtime.caches.program_identity import placeholders
from fxpar.runtime.ranks import meeting
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Input

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes and numbers that one rank calls a graph with."""

    # Shapes of the tensors at ``Fed.tensors``.
    shapes: Shapes
    # Values of the inputs at ``Fed.numbers``.
    numbers: tuple[Any, ...]

    def distance(self, other: Sizes) -> float:
        """Return the largest ratio, at least 1, between a size and the same size of
        ``other``. Infinite if numbers of dims differ."""
        pairs = zip(
            (self.numbers, *self.shapes), (other.numbers, *other.shapes), strict=True
        )
        most = 1.0
        for mine, theirs in pairs:
            if len(mine) != len(theirs):
                return math.inf
            for a, b in zip(mine, theirs, strict=True):
                if a != b:
                    small, large = sorted((abs(a), abs(b)))
                    most = max(most, large / small if small else math.inf)
        return most


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Fed:
    """Holds the inputs of a graph whose sizes may differ between calls.

    ``tensors``, ``numbers``: their positions; ``sources``: for a number that is the
    size of a tensor input, the position of that input and the dim.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Input],
        where: str | None,
    ) -> None:
        self.inputs, self.where = inputs, where
        values = [example_of(node) for node in placeholders(gm)]
        self.tensors, self.numbers = list[int](), list[int]()
        for i, (name, value) in enumerate(zip(inputs, values, strict=True)):
            if isinstance(value, _NUMBERS):
                self.numbers.append(i)
            elif isinstance(value, torch.Tensor) and (
                name.kind == "input"
                or any(isinstance(size, torch.SymInt) for size in value.shape)
            ):
                self.tensors.append(i)
        sizes = {
            str(size): (i, dim)
            for size, i, dim in reversed(_places(values))
            if isinstance(size, torch.SymInt) and dim is not None
        }
        self.sources = {
            i: sizes[str(values[i])] for i in self.numbers if str(values[i]) in sizes
        }

    def sizes(self, args: Sequence[Any]) -> Sizes:
        """Return the sizes and numbers among the arguments of a call of one rank."""
        return Sizes(
            tuple(tuple(args[i].shape) for i in self.tensors),
            tuple(args[i] for i in self.numbers),
        )

    def require_same(self, key: Sequence[Sizes]) -> None:
        """Raise InputMismatchError, on all ranks, if their sizes or numbers differ."""
        for n, i in enumerate(self.numbers):
            values = [sizes.numbers[n] for sizes in key]
            if i not in self.sources and len(set(values)) > 1:
                each = enumerate(values)
                text = ", ".join(f"{x} on {meeting.named([r])}" for r, x in each)
                fact = f"number {self.inputs[i].name} differs between ranks: {text}"
                raise self._differ(fact, "give it one value on every rank")
        for n, i in enumerate(self.tensors):
            shapes = [sizes.shapes[n] for sizes in key]
            if len(set(shapes)) > 1:
                both = 0, meeting.first_other(shapes) or 0
                text = ", ".join(
                    f"{[*shapes[r]]} on {meeting.named([r])}" for r in both
                )
                raise self._differ(
                    f"input {self.inputs[i].name} has other sizes on other ranks: "
                    f"{text}",
                    "give every rank tensors of one shape; where each rank feeds its "
                    "own part of the batch, set FXPAR_INPUTS=local",
                )

    def _differ(self, fact: str, fix: str) -> InputMismatchError:
        return meeting.as_reported(InputMismatchError(fact, where=self.where, fix=fix))


def _places(values: Sequence[Any]) -> list[tuple[Any, int, int | None]]:
    """Return each size and number of inputs with its (input, dim); those of tensors
    first."""
    places: list[tuple[Any, int, int | None]] = []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places += [(size, i, dim) for dim, size in enumerate(value.shape)]
    return [*places, *((value, i, None) for i, value in enumerate(values))]


class OpenSizesRefused(Exception):
    """Is raised where a program cannot be planned or compiled with open sizes."""


def refusal_of(error: Exception) -> str:
    """Return why sizes cannot be left open, given the error of an attempt."""
    if isinstance(error, OpenSizesRefused):
        return str(error)
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}"


class DivisorsAsked(Exception):
    """Is raised where a plan splits open sizes, which must be multiples of ``divisors``
    (by name of Dynamo's symbol); the plan holds for the program traced again so."""

    def __init__(self, divisors: Mapping[str, int], plan: Any) -> None:
        super().__init__(str(dict(divisors)))
        self.divisors, self.plan = divisors, plan


class PlanStands(Exception):
    """Is raised where no plan for the sizes of a call is predicted to be faster than
    the present one by the factor asked for."""


@dataclass(frozen=True)
class OpenSize:
    """Holds a size that Dynamo left open, and where the arguments of a call have it."""

    # Dynamo's symbol.
    name: str
    # Position among the inputs.
    place: int
    # Dim of that input; None: the input is a number, the size itself.
    dim: int | None
    # As messages name it: ``x.shape[0]``, or the name of a number.
    text: str

    def of(self, args: Sequence[Any]) -> int:
        """Return the size in the arguments of a call."""
        x = args[self.place]
        return int(x if self.dim is None else x.shape[self.dim])


def open_sizes(gm: fx.GraphModule, inputs: Sequence[Input] = ()) -> list[OpenSize]:
    """Return the sizes that Dynamo left open in the inputs of a graph, each at the
    first place where it is a bare symbol. ``inputs``: with names for messages."""
    nodes = placeholders(gm)
    names = [x.name for x in inputs] or [node.name for node in nodes]
    by_symbol: dict[str, OpenSize] = {}
    for size, i, dim in _places([example_of(node) for node in nodes]):
        if is_symbol(size):
            text = names[i] if dim is None else f"{names[i]}.shape[{dim}]"
            by_symbol.setdefault(str(size), OpenSize(str(size), i, dim, text))
    return list(by_symbol.values())


@dataclass(frozen=True)
class OpenProgram:
    """Is a graph that takes a symbol for each open size, before its tensors."""

    # Its first inputs are the symbols, the others tensors.
    graph: fx.GraphModule
    # The arguments of Dynamo's call: fakes whose sizes are symbols, and numbers.
    args: Sequence[Any]
    # Which of these have sizes that may differ between calls.
    fed: Fed
    # Names and kinds, in order of ``examples``.
    inputs: tuple[Input, ...]
    # Mode of the examples; its guards say which sizes the program holds for.
    fake_mode: Any
    # One for each symbol; it stands for all sizes equal to it.
    sizes: tuple[OpenSize, ...]
    # The symbols traced: each of ``sizes`` divided by its unit.
    symbols: tuple[torch.SymInt, ...]
    # Names of the symbols in guards; one that is fixed prints as its number.
    names: tuple[str, ...]
    # For each open size, the factor between the size and its symbol.
    units: tuple[int, ...]
    # Positions of the tensors among the arguments of Dynamo's call.
    tensors: tuple[int, ...]
    # The members of ``tensors`` that were traced as contiguous.
    dense: frozenset[int]
    # The members of ``dense`` that are not contiguous, and so are copied.
    copied: frozenset[int]

    @property
    def examples(self) -> list[Any]:
        """Return the inputs of the graph."""
        return [*self.symbols, *(self.args[i] for i in self.tensors)]

    def divisors_asked(self) -> dict[str, int]:
        """Return the divisors, by name, that the plan made requires of its sizes."""
        divisors = _torch.symbols.divisors_asked(self.names, self.fake_mode)
        each = zip(self.sizes, self.names, strict=True)
        return {size.name: divisors[name] for size, name in each if name in divisors}

    def fixed(self) -> list[OpenSize]:
        """Return the sizes that guards fixed to their traced values in compilation."""
        return [self.sizes[i] for i in _torch.symbols.fixed(self.symbols)]

    def caller(
        self, run: Callable[..., Any], written: Collection[int]
    ) -> Callable[..., Any]:
        """Return a callable that takes the arguments of Dynamo's call, and runs the
        compiled program. ``written``: positions of its inputs that it writes to, which
        may not be copied; others are made contiguous if traced so."""
        first = len(self.symbols)
        dense = self.dense.difference(self.tensors[i - first] for i in written)
        places = tuple(zip(self.sizes, self.units, strict=True))
        tensors = tuple((i, i in dense) for i in self.tensors)

        def call(*args: Any) -> Any:
            values: list[Any] = [size.of(args) // unit for size, unit in places]
            for i, is_dense in tensors:
                values.append(args[i].contiguous() if is_dense else args[i])
            return run(*values)

        return call


def open_program(
    gm: fx.GraphModule,
    args: Sequence[Any],
    inputs: Sequence[Input],
    fed: Fed,
    sizes: Sequence[OpenSize],
    units: Mapping[str, int],
) -> OpenProgram:
    """Return ``gm``, changed in place, with ``sizes`` open and others as in ``args``.

    ``units``: by name, the divisor of a size. Raises OpenSizesRefused.
    """
    mode = _torch.fake.new_fake_mode(symbols=True)
    values = [example_of(node) for node in placeholders(gm)]
    every = open_sizes(gm, inputs)
    size_values: dict[str, Any] = {size.name: size.of(args) for size in every}
    # Sizes that are equal now are taken to be equal in the whole range.
    equal_sizes: dict[Any, list[OpenSize]] = {}
    for size in sizes:
        equal_sizes.setdefault((size_values[size.name], size.dim), []).append(size)
    sizes, symbols = [same[0] for same in equal_sizes.values()], []
    for size, *equal in equal_sizes.values():
        unit = units.get(size.name, 1)
        hint = size_values[size.name] // unit
        symbols.append(_torch.symbols.new_symbol(mode, size.name, hint))
        for each in (size, *equal):
            size_values[each.name] = symbols[-1] * unit
    by_stride = any("as_strided" in str(node.target) for node in gm.graph.nodes)
    dense: set[int] = set()
    try:
        examples: list[Any] = []
        for i, (x, value) in enumerate(zip(args, values, strict=True)):
            example, is_dense = _example(x, value, size_values, mode)
            examples.append(example)
            dense |= {i} if is_dense else set()
            if is_dense and by_stride and (x.storage_offset() or not x.is_contiguous()):
                raise OpenSizesRefused(
                    "an input that is not contiguous is read by its strides"
                )
        for i, (source, dim) in fed.sources.items():
            examples[i] = examples[source].shape[dim]
    except KeyError as error:
        raise OpenSizesRefused(
            f"the size {error} is not the size of an input"
        ) from error
    tensors = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    _take_symbols(gm, sizes, symbols, examples, tensors)
    return OpenProgram(
        gm,
        examples,
        fed,
        (
            *(Input(size.text, "size") for size in sizes),
            *(inputs[i] for i in tensors),
        ),
        mode,
        tuple(sizes),
        tuple(symbols),
        tuple(map(str, symbols)),
        tuple(units.get(size.name, 1) for size in sizes),
        tuple(tensors),
        frozenset(dense),
        frozenset(i for i in dense if not args[i].is_contiguous()),
    )


def _example(
    x: Any, value: Any, size_values: Mapping[str, Any], mode: Any
) -> tuple[Any, bool]:
    """Return an input as a fake with symbols for its open sizes, and whether it is
    traced as contiguous with some open."""
    if not isinstance(x, torch.Tensor):
        number = isinstance(value, torch.SymInt)
        return substituted(value, size_values) if number else x, False
    if not _torch.symbols.is_open(value):
        with mode:
            return mode.from_tensor(x, static_shapes=True), False
    shape = [substituted(n, size_values) for n in value.shape]
    if not x.is_contiguous():
        with contextlib.suppress(KeyError):  # rows of a larger tensor
            stride = [substituted(n, size_values) for n in value.stride()]
            with mode, torch.no_grad():
                fake = torch.empty_strided(
                    shape, stride, dtype=x.dtype, device=x.device
                )
            return fake.requires_grad_(x.requires_grad), False
    return _torch.fake.fake_like(x, tuple(shape), mode), True


def _take_symbols(
    gm: fx.GraphModule,
    sizes: Sequence[OpenSize],
    symbols: Sequence[Any],
    examples: Sequence[Any],
    tensors: Collection[int],
) -> None:
    """Make a graph take the symbols as inputs, and compute its numbers from them."""
    nodes, graph = placeholders(gm), gm.graph
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        for size, symbol in zip(sizes, symbols, strict=True):
            node = graph.placeholder(f"size_{size.name}")
            node.meta["val"] = symbol
    for i, node in enumerate(nodes):
        if i in tensors:
            continue
        size_nodes.put_in_place(node, size_nodes.as_nodes(graph, examples[i]))
    graph.lint()
    gm.recompile()


@dataclass(frozen=True)
class SizeRange:
    """Holds the sizes that a compiled program can run with."""

    # Sizes that were to be left open, but were fixed by guards.
    fixed: tuple[OpenSize, ...]
    # (shapes, numbers) of ``Sizes`` -> whether a rank that feeds them may run it.
    contains: Callable[[Any, Any], bool] = field(repr=False)
    # The conditions on sizes, as the plan prints them.
    text: str
    # The plan that was made for some of them.
    plan: Plan | None = None


def size_range(program: OpenProgram, written: Collection[int] = ()) -> SizeRange:
    """Return the sizes that a program holds for, once it is traced and compiled.
    ``written``: positions of the inputs that it writes to. Raises OpenSizesRefused if
    the sizes cannot be expressed, or if a copied input is written to."""
    first = len(program.symbols)
    if program.copied.intersection(program.tensors[i - first] for i in written):
        raise OpenSizesRefused("a part of a larger tensor is written to")
    names = program.names
    guards = _torch.symbols.guards_of(program.symbols, names, program.fake_mode)
    lines = ["def contains(shapes, numbers):"]
    fed, sizes = program.fed, program.fed.sizes(program.args)
    for size, unit, name in zip(program.sizes, program.units, names, strict=True):
        if size.dim is None:
            place = f"numbers[{fed.numbers.index(size.place)}]"
        else:
            place = f"shapes[{fed.tensors.index(size.place)}][{size.dim}]"
        lines.append(f"    {name}, rest = divmod({place}, {unit})")
        lines.append("    if rest: return False")
    text_of = _torch.symbols.code_of
    try:
        shapes = ["".join(f"{text_of(n)}, " for n in each) for each in sizes.shapes]
        numbers = "".join(f"{text_of(n)}, " for n in sizes.numbers)
    except _torch.symbols.Inexpressible as error:
        raise OpenSizesRefused(f"an input has the size {error}") from error
    expected = "".join(f"({each}), " for each in shapes)
    lines.append(f"    return shapes == ({expected}) and numbers == ({numbers})")
    lines[-1] += f" and ({guards})"
    scope = _torch.symbols.guard_functions()
    exec("\n".join(lines), scope)
    text = guards
    for size, unit, name in zip(program.sizes, program.units, names, strict=True):
        text = text.replace(name, f"{size.text}/{unit}" if unit > 1 else size.text)
    return SizeRange(tuple(program.fixed()), scope["contains"], shortened(text))


# The number of conditions on sizes that a plan prints.
MOST_CONDITIONS = 6


def shortened(text: str) -> str:
    """Return conditions on sizes, with the longest of many replaced by their count."""
    conditions = text.split(" and ")
    shortest = sorted(conditions, key=len)[:MOST_CONDITIONS]
    left = len(conditions) - len(shortest)
    if not left:
        return text
    return " and ".join([*shortest, f"{left} more"])
