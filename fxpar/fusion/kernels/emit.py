"""Writes a program without collectives as a Triton kernel.

In: the program, the space it runs over, and how its inputs are read and its outputs
written (``Source``, ``Sink``; pointers by default). Out: a ``Body``: parameters, and
lines before, in and after the loop over blocks. Each line of the program is one line of
the kernel, with its shape in a comment; views are index arithmetic
(``placement``), ops a table (``expressions``). All arithmetic is in float32:
values stored in fewer bits are widened when read and rounded when written, not in
between. Never decides which ops belong to a kernel, and never writes a collective: a
template does, by sources and sinks of its own.

``kernel_of`` puts a body into a ``Kernel``: readable source of one Triton function, its
reads and writes in the order of its parameters, its grid and its warps. Shapes are
numbers in the text. Templates of collectives put several bodies into one function by
``phase``, with code of their own in between. Never compiles anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpar.fusion.kernels.expressions import (
    DTYPES,
    SUMS,
    Text,
    constant,
    expression,
    is_comparison,
    kind_of,
    narrowed,
    promoted,
    rounded,
)
from fxpar.fusion.kernels.placement import (
    CHOICES,
    FILLED,
    IOTA,
    RANDOM,
    SEED,
    VIEWS,
    ZERO,
    Map,
    Needs,
    Place,
    Space,
    broadcast,
    formed,
    reduction_of_output,
    space_of,
    strided,
    view_map,
)
from fxpar.fusion.kernels.region_program import (
    CannotEmit,
    Number,
    Ref,
    RegionProgram,
    Statement,
    Tensor,
    contiguous,
    short,
)

IMPORTS = """import triton
import triton.language as tl

from fxpar.fusion.kernels import device_functions as lib
"""

# Blocks that run at a time where each writes a part of a sum: these parts are read
# again, and fewer would not keep a device busy.
_SUMMING = 512
_WARP = 32
_INT32 = 2**31


@dataclass(frozen=True, eq=False)
class Kernel:
    """Holds the source of one kernel, and what it is called with."""

    name: str  # name of the function that ``text`` defines
    # Its source. Parameters, in order: pointers of ``reads``, then of ``writes``, the
    # values of ``alone``, those of ``numbers``, and PROGRAMS, the size of the grid.
    text: str
    reads: tuple[Tensor, ...]  # inputs that it reads, in the program's order
    writes: tuple[Tensor, ...]  # all outputs of the program
    # Outputs of which each program writes a part, [PROGRAMS, elements] in float32, to
    # be added up.
    sums: frozenset[str]
    numbers: tuple[int, ...]  # indices among the program's integers
    programs: int  # size of the grid
    warps: int  # warps of a block
    # Values that are read or written only element by element, and in one loop -> the
    # index of that loop.
    loops: Mapping[str, int]
    alone: tuple[str, ...] = ()  # inputs of one element that are given as numbers


def kernel_of(
    program: RegionProgram, *, random: str = "cpp", alone: Collection[str] = ()
) -> Kernel:
    """Return the kernel of a program without collectives, from pointers to pointers.
    ``alone``: inputs of one float each that are given as numbers.

    Raises CannotEmit.
    """
    sources = {name: number_source(name) for name in alone}
    body = emit_body(program, sources=sources, random=random)
    return assembled(
        f"region_{program.hash}",
        program,
        [body],
        phase(body, wide=is_wide(program)),
        program.outputs,
        body.space,
        programs_of(body.space, bool(body.sums)),
    )


def assembled(
    name: str,
    program: RegionProgram,
    bodies: Sequence[Body],
    lines: Sequence[str],
    writes: tuple[Tensor, ...],
    space: Space,
    programs: int,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
) -> Kernel:
    """Return the kernel of a program, given its bodies and the lines of its function.
    ``first``, ``last``: parameters before the others and after them."""
    # Values that are read or written in one of several loops alone, element by element,
    # and the index of that loop.
    loops: dict[str, int] = {}
    for i, body in enumerate(bodies):
        for value, is_elementwise in body.touched.items():
            one_loop = loops.setdefault(value, i) == i
            loops[value] = i if is_elementwise and one_loop else -1
    used = {p for body in bodies for p in body.parameters}
    numbers = tuple(sorted({i for body in bodies for i in body.numbers}))
    reads = tuple(t for t in program.inputs if f"{t.name}_ptr" in used)
    alone = tuple(t.name for t in program.inputs if f"{t.name}_value" in used)
    parameters = [
        *first,
        *(f"{t.name}_ptr" for t in (*reads, *writes)),
        *(f"{name}_value" for name in alone),
        *(f"n{i}" for i in numbers),
        *last,
    ]
    return Kernel(
        name,
        function(name, parameters, lines, str(program)),
        reads,
        writes,
        frozenset(x for body in bodies for x in body.sums),
        numbers,
        programs,
        # Sixteen elements to a thread of a row, eight of a flat block.
        max(1, min(16, space.block // (_WARP * (16 if space.columns else 8)))),
        {value: i for value, i in loops.items() if i >= 0},
        alone,
    )


def programs_of(space: Space, sums: bool) -> int:
    """Return the size of the grid."""
    return min(space.turns, _SUMMING) if sums else space.turns


def is_wide(program: RegionProgram) -> bool:
    """Return whether offsets in memory need more than 32 bits."""
    tensors = (*program.inputs, *program.outputs)
    return any(
        sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True)) >= _INT32
        for t in tensors
    )


def function(
    name: str, parameters: Sequence[str], lines: Sequence[str], about: str
) -> str:
    """Return the source of a module with one jitted function. ``lines``: of its
    body."""
    numbers = [p for p in parameters if p[0] == "n" and p[1:].isdigit()]
    signature = ", ".join([*parameters, "PROGRAMS: tl.constexpr"])
    # A number that differs between ranks must not give them different kernels.
    how = f"(do_not_specialize={numbers})" if numbers else ""
    note = "\n".join(f"# {line}".rstrip() for line in about.splitlines())
    inside = "\n".join(f"    {line}".rstrip() for line in lines)
    head = f"{note}\n\n{IMPORTS}\n\n@triton.jit{how}\ndef {name}({signature}):\n"
    return f"{head}{inside}\n"


def phase(
    body: Body, *, blocks: str = "range(pid, {turns}, PROGRAMS)", wide: bool = False
) -> list[str]:
    """Return the lines of a function that run a body over its blocks: those before the
    loop, the loop over ``blocks``, an expression, and those after it."""
    space = body.space
    lines = ["pid = tl.program_id(0)"]
    turn, cast = "row" if space.columns else "block", []
    if wide:
        cast = [f"{turn} = tl.cast(turn, tl.int64)"]
        turn = "turn"
    if space.columns:
        lines.append(f"col = tl.arange(0, {space.block})")
        if not space.is_whole:
            lines.append(f"live = col < {space.columns}")
        inside = [f"at = row * {space.columns} + col"]
    else:
        inside = [f"at = block * {space.block} + tl.arange(0, {space.block})"]
        if not space.is_whole:
            inside.append(f"live = at < {space.count}")
    lines += body.before
    lines.append(f"for {turn} in {blocks.format(turns=space.turns)}:")
    lines += [f"    {line}" for line in (*cast, *inside, *body.loop)]
    return [*lines, *body.after]


@dataclass(frozen=True)
class Source:
    """Says how an input is read."""

    parameters: tuple[str, ...]  # names of the kernel's parameters that it takes
    # (offset, mask) -> lines, and the expression of the value at the offset in
    # elements, in the input's own dtype; the mask is "" or the name of the mask of
    # offsets that exist.
    read: Callable[[str, str], tuple[Sequence[str], str]]
    before: tuple[str, ...] = ()  # lines before the loop


@dataclass(frozen=True)
class Sink:
    """Says how an output is written."""

    parameters: tuple[str, ...]  # names of the kernel's parameters that it takes
    write: Callable[[str, str, str], Sequence[str]]  # (offset, value, mask) -> lines
    before: tuple[str, ...] = ()  # lines before the loop


def masked(mask: str, other: str = "") -> str:
    """Return the end of a call of ``tl.load`` or ``tl.store``."""
    return f", mask={mask}{other})" if mask else ")"


def pointer_source(name: str) -> Source:
    """Return a source that reads memory at ``<name>_ptr``."""

    def read(offset: str, mask: str) -> tuple[Sequence[str], str]:
        return (), f"tl.load({name}_ptr + {offset}{masked(mask, ', other=0')}"

    return Source((f"{name}_ptr",), read)


def number_source(name: str) -> Source:
    """Return a source for a single number, an argument of the kernel:
    ``<name>_value``."""

    def read(offset: str, mask: str) -> tuple[Sequence[str], str]:
        return (), f"tl.full((), {name}_value, tl.float32)"

    return Source((f"{name}_value",), read)


def pointer_sink(name: str) -> Sink:
    """Return a sink that writes memory at ``<name>_ptr``."""

    def write(offset: str, value: str, mask: str) -> Sequence[str]:
        return (f"tl.store({name}_ptr + {offset}, {value}{masked(mask)}",)

    return Sink((f"{name}_ptr",), write)


@dataclass(frozen=True)
class Body:
    """Holds the parts of a kernel's text."""

    space: Space  # the elements that the kernel runs over
    parameters: tuple[str, ...]  # pointers, then numbers ("n0")
    numbers: tuple[int, ...]  # indices of the program's numbers that it reads
    # Outputs summed over blocks: each program writes its part, ``columns`` elements or
    # one, at its number in its pointer.
    sums: tuple[str, ...]
    before: tuple[str, ...]  # lines ahead of the loop
    loop: tuple[str, ...]  # lines in the loop
    after: tuple[str, ...]  # lines after the loop
    # Inputs and outputs, and whether each is read or written only at the place of the
    # element that a lane is at.
    touched: Mapping[str, bool]


def emit_body(
    program: RegionProgram,
    space: Space | None = None,
    *,
    sources: Mapping[str, Source] | None = None,
    sinks: Mapping[str, Sink] | None = None,
    random: str = "cpp",
) -> Body:
    """Return the body of a program's kernel.

    sources, sinks: by names of inputs and outputs, where they are no pointers. random:
    the generator whose numbers are drawn: "cpp", "triton_1" or "triton_4"
    (``device_functions``).

    Raises CannotEmit.
    """
    writer = _Writer(Needs(program, space or space_of(program)), random)
    pointer_sources = {t.name: pointer_source(t.name) for t in program.inputs}
    pointer_sinks = {t.name: pointer_sink(t.name) for t in program.outputs}
    return writer.write(
        pointer_sources | dict(sources or {}), pointer_sinks | dict(sinks or {})
    )


class _Writer:
    """Writes the text of a body, forwards."""

    def __init__(self, needs: Needs, random: str) -> None:
        self.needs, self.random = needs, random
        self.program, self.space = needs.program, needs.space
        self.texts: dict[tuple[str, str], Text] = {}
        self.numbers: dict[int, None] = {}
        self.lines: list[str] = []
        self.defined: set[str] = set()
        self.counts: dict[str, int] = {}

    def write(self, sources: Mapping[str, Source], sinks: Mapping[str, Sink]) -> Body:
        program = self.program
        inputs = [t for t in program.inputs if t.name in self.needs.places_of]
        for t in inputs:
            for place in self.needs.places_of[t.name]:
                self._load(t, self.needs.places[place], sources[t.name])
        for line in program.lines:
            if line.op in SUMS:
                formed(line, self._check_sum, line)
            for place in self.needs.places_of.get(line.name, {}):
                self._line(line, self.needs.places[place])
        after: list[str] = []
        parameters = [p for t in inputs for p in sources[t.name].parameters]
        before = [b for t in inputs for b in sources[t.name].before]
        for t in program.outputs:
            sink = sinks[t.name]
            parameters += sink.parameters
            before += sink.before
            if t.name in self.needs.sums:
                start, end = self._sum(t, sink)
                before += start
                after += end
            else:
                self._store(t, sink)
        numbers = tuple(sorted(self.numbers))
        return Body(
            self.space,
            (*dict.fromkeys(parameters), *(f"n{i}" for i in numbers)),
            numbers,
            tuple(self.needs.sums),
            tuple(before),
            tuple(self.lines),
            tuple(after),
            self._touched(inputs),
        )

    def _touched(self, inputs: Sequence[Tensor]) -> dict[str, bool]:
        at = self.needs.at
        touched = {t.name: [*self.needs.places_of[t.name]] == [at.text] for t in inputs}
        for t in self.program.outputs:
            summed = t.name in self.needs.sums
            elementwise = not summed and self.needs.place_of(t) is at
            touched[t.name] = elementwise and touched.get(t.name, True)
        return touched

    def _reach(self, place: Place) -> str:
        """Write the lines that define a place, once; return its name."""
        if place.parent and place.text not in self.defined:
            self._reach(self.needs.places[place.parent])
            self.lines += [x for x in place.define if x not in self.defined]
            self.defined |= {place.text, *place.define}
        return place.text

    def _name(self, name: str) -> str:
        """Return a new name for one more value of ``name``."""
        count = self.counts[name] = self.counts.get(name, -1) + 1
        return f"{name}_again_{count}" if count else name

    def _load(self, t: Tensor, place: Place, source: Source) -> None:
        kind = kind_of(t.dtype)
        alone = t.dtype == "float64" and t.count == 1
        if kind is None and not alone:
            raise CannotEmit(t.name, f"is of dtype {t.dtype}")
        self._reach(place)
        to = strided(t.shape, t.stride)
        where = self.needs.derive(place, to)
        lines, text = source.read(self._offset(to, place), where.mask)
        name = self._name(t.name)
        kind = kind or "float"
        narrow = {"float": "float32", "int": "int64", "bool": "bool"}[kind]
        if t.dtype != narrow:
            text += f".to({DTYPES[narrow]})"
        self.lines += [*lines, f"{name} = {text}  # {short(t)}"]
        self.texts[t.name, place.text] = Text(name, kind, where.block)

    def _offset(self, to: Map, place: Place) -> str:
        """Return the offset in memory of a place among elements."""
        return (
            self._reach(self.needs.derive(place, to))
            if place is not ZERO
            else str(to.offset)
        )

    def _line(self, line: Statement, place: Place) -> None:
        key = line.name, place.text
        if line.op in VIEWS:
            self.texts[key] = self._view(line, place)
            return
        if line.op in FILLED:
            value = line.args["full" in line.op]
            self.texts[key] = formed(line, self._filled_with, value, line.dtype)
            return
        if line.op in SUMS:
            formed(line, self._reduce, line, place)
            return
        self._reach(place)
        kind = kind_of(line.dtype) or ""
        text, block = formed(line, self._compute, line, place, kind)
        name = self._name(line.name)
        self.lines.append(f"{name} = {text}  # {short(line)}")
        self.texts[key] = Text(name, kind, block)

    def _view(self, line: Statement, place: Place) -> Text:
        source = self.program.values[line.refs[0]]
        if source.dtype == "tuple":
            return self.texts[f"{source.name}.{line.args[1]}", place.text]
        to = self.needs.derive(place, view_map(line, source.shape))
        return self.texts[source.name, to.text]

    def _compute(self, line: Statement, place: Place, kind: str) -> tuple[str, bool]:
        """Return the text of a line, and whether it differs between lanes."""
        if line.op == IOTA:
            options = dict(line.kwargs)
            # In 64 bits, as all integers are: places have 32.
            at = f"tl.cast({place.text}, tl.int64)"
            return f"{at} * {options['step']} + {options['start']}", place.block
        if line.op == SEED:
            # The seeds are stored one after the other; the index is an argument.
            return self._seed(line), False
        if line.op == RANDOM:
            return self._draw(line, place), place.block
        if line.op in CHOICES:
            return self._chosen(line, place, kind), place.block
        args: list[Any] = []
        for x in line.args:
            args.append(self._operand(line, x, place) if isinstance(x, Ref) else x)
        texts = [x for x in args if isinstance(x, Text)]
        if all(x.is_literal for x in texts):
            args = [_as_value(x) if isinstance(x, Text) else x for x in args]
        common = promoted(line, self.program.values) if is_comparison(line) else ""
        for i, x in enumerate(line.args):
            if common and isinstance(x, Ref) and self._dtype(x) != common:
                args[i] = narrowed(args[i], common)
        return expression(line, args, kind, common), any(x.block for x in texts)

    def _dtype(self, x: Ref) -> str:
        return self.program.values[x.name].dtype

    def _operand(self, line: Statement, x: Ref, place: Place) -> Text:
        shape = self.program.values[x.name].shape
        return self.texts[
            x.name, self.needs.derive(place, broadcast(shape, line.shape)).text
        ]

    @staticmethod
    def _filled_with(value: bool | int | float, dtype: str) -> Text:
        kind = kind_of(dtype) or ""
        value = rounded(value, dtype)
        return Text(constant(value, kind), kind, value=value)

    def _number(self, x: Any) -> str:
        if isinstance(x, Number):
            self.numbers[x.index] = None
            return f"n{x.index}"
        return str(x)

    def _seed(self, line: Statement) -> str:
        source = line.refs[0]
        if not isinstance(self.program.values[source], Tensor):
            raise LookupError("a seed of seeds made in the kernel")
        return f"tl.load({source}_ptr + {self._number(line.args[1])})"

    def _draw(self, line: Statement, place: Place) -> str:
        size, seed, mode, whole, offsets = line.args
        if mode != "rand":
            raise LookupError(f"random numbers of mode {mode}")
        strides = contiguous(whole)
        local = strided(size, strides).text(place.text)
        terms = [
            f"{self._number(x)} * {s}"
            for x, s in zip(offsets, strides, strict=True)
            if isinstance(x, Number) or x
        ]
        index = " + ".join([local, *terms])
        seed = self.texts[seed.name, ZERO.text].text
        return f"lib.rand_{self.random}({seed}, {index})"

    def _chosen(self, line: Statement, place: Place, kind: str) -> str:
        text = ""
        for condition, source, where in reversed(
            self.needs.chosen[line.name, place.text]
        ):
            if where is None:
                value = constant(rounded(source, line.dtype), kind)
                if condition:
                    self._reach(self.needs.places[condition])
            else:
                value = self.texts[source.name, where.text].to(kind)
            text = f"tl.where({condition}, {value}, {text})" if text else value
        return text

    def _check_sum(self, line: Statement) -> None:
        """Raise LookupError where a summand is rounded before the sum."""
        source = self.program.values[line.refs[0]].dtype
        if line.dtype in ("bfloat16", "float16") and source != line.dtype:
            raise LookupError(f"{line.op} of {source} in {line.dtype}")

    def _reduce(self, line: Statement, place: Place) -> None:
        """Write the lines of a reduction of a row."""
        source = self.texts[line.refs[0], "at"]
        columns, name = self.space.columns, self._name(line.name)
        kind = "float" if line.dtype == "tuple" else kind_of(line.dtype) or ""
        word = line.op.split(".")[1]
        if kind != "float":
            raise LookupError(f"{line.op} of {line.dtype}")
        x = source.to(kind)
        if not source.block:
            x = f"tl.zeros(({self.space.block},), tl.float32) + {x}"
        whole = self._filled(x, SUMS[line.op])
        note = f"  # {short(line)}"
        if word in ("sum", "mean"):
            share = f" / {columns}" if word == "mean" else ""
            self.lines.append(f"{name} = tl.sum({whole}, 0){share}{note}")
        elif word in ("amax", "amin"):
            self.lines.append(f"{name} = lib.{word}({whole}){note}")
        else:
            correction = dict(line.kwargs).get("correction")
            mean, centered = f"{name}_mean", f"{name}_apart"
            over = columns - (1 if correction is None else correction)
            self.lines += [
                f"{mean} = tl.sum({whole}, 0) / {columns}",
                f"{centered} = {self._filled(f'{x} - {mean}', 0.0)}",
                f"{name} = tl.sum({centered} * {centered}, 0) / {max(over, 0.0)}{note}",
            ]
            self.texts[f"{line.name}.0", place.text] = Text(name, "float")
            self.texts[f"{line.name}.1", place.text] = Text(mean, "float")
        self.texts[line.name, place.text] = Text(name, kind)

    def _filled(self, x: str, fill: float) -> str:
        """Return a block with ``fill`` in the lanes that do not count."""
        mask = self.needs.at.mask
        return f"tl.where({mask}, {x}, {constant(fill, 'float')})" if mask else x

    def _store(self, t: Tensor, sink: Sink) -> None:
        place = self.needs.place_of(t)
        value = self.texts[t.name, place.text]
        offset = self._offset(strided(t.shape, t.stride), place)
        text = value.text
        if value.is_literal:
            text = _as_value(value).text
        if t.dtype in ("bfloat16", "float16"):
            text += f".to({DTYPES[t.dtype]})"
        self.lines += sink.write(offset, text, place.mask)

    def _sum(self, t: Tensor, sink: Sink) -> tuple[list[str], list[str]]:
        """Return lines before and after the loop for an output that is summed over
        blocks."""
        line = reduction_of_output(self.program, t.name)
        assert line is not None
        value = self.texts[line.refs[0], "at"]
        name, block = f"sum_{t.name}", self.space.block
        x = self._filled(value.to("float"), 0.0)
        self.lines.append(f"{name} += {x}  # {short(line)}")
        start = [f"{name} = tl.zeros(({block},), tl.float32)"]
        if self.needs.sums[t.name].kind == "all":
            return start, [*sink.write("pid", f"tl.sum({name}, 0)", "")]
        offset, mask = f"pid * {self.space.columns} + col", self.needs.at.mask
        return start, [*sink.write(offset, name, mask)]


def _as_value(x: Text) -> Text:
    """Return a constant as a value of the kernel."""
    dtype = {"float": "tl.float32", "int": "tl.int64", "bool": "tl.int1"}[x.kind]
    return Text(f"tl.full((), {x.text}, {dtype})", x.kind)
