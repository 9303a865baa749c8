"""Predicts one step of a local graph on one rank: times, streams, memory.

In: a local graph, a mesh, the hardware. Out: a ``Timeline``, frozen data. Never runs
and never changes the graph; linear in nodes.

``launches`` decides what is launched, and which ops are one kernel; ``Simulation`` when
it runs, with the streams of PyTorch and NCCL. A kernel
takes its launch and the larger of arithmetic and memory (``Hardware.kernel``), a
collective the time of ``sharding.cost.collectives``: the share ``Hardware.beside`` of
it delays the kernels, where it is called, and the rest overlaps with them. The host is
always ahead of the device.

``residency`` gives the lifetime of each buffer, and the total bytes after each launch,
as a caching allocator has them: it follows the order of launches, not time. ``by_kind``
gives the bytes at the peak by kind, with the optimizer's state, which no graph of
forward and backward has.

``predict_step`` gives the timeline of the slowest rank of a graph that is not ordered
yet, joint or not. Forward and backward are partitioned and ordered as when compiled;
the stages of a pipeline are simulated together, and ranks whose shards or speeds differ
one by one. Recomputation follows a simpler rule than AOTAutograd's, fusion simpler ones
than Inductor's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from fxpar._torch import fake
from fxpar._torch.objects import tensors_in
from fxpar.graph.pipeline_ops import OF_STAGES
from fxpar.passes.order.forward_backward import as_run
from fxpar.passes.order.order_collectives import DEFAULT, Settings
from fxpar.passes.rank_sizes import sized
from fxpar.passes.simulate.launches import launches_of
from fxpar.sharding.cost import collectives
from fxpar.sharding.cost.fused_kernels import Buffer, Launch, Launches
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import bytes_of
from fxpar.sharding.mesh import Mesh, axis_of
from fxpar.sharding.op_facts import op_facts_of
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.program import Signature, user_line
from fxpar.sharding.reshard.steps import KINDS
from fxpar.sharding.search.memory_constraints import MOMENTS
from fxpar.sharding.search.unequal_shards import distinct_ranks

# Kinds of memory, in the order in which they are listed.
MEMORY_KINDS = (
    "parameters",
    "gathered parameters",
    "optimizer state",
    "gradients",
    "inputs and buffers",
    "saved for the backward",
    "passing",
    "buffers of collectives",
)


@dataclass(frozen=True)
class Residency:
    """Holds when buffers are in memory, by launches from 0; -1 is before all."""

    # The launch that makes a buffer.
    born: dict[Buffer, int]
    # The last launch that needs it; the number of launches if it stays to the end.
    dies: dict[Buffer, int]
    # (launch, bytes made by it, bytes in memory while it runs, bytes after it); the
    # first is before all launches.
    usage: list[tuple[int, int, int, int]]

    @property
    def peak(self) -> tuple[int, int]:
        """Return (bytes, launch) at the first peak."""
        at, _, most, _ = max(self.usage, key=lambda entry: entry[2])
        return most, at

    def at(self, launch: int) -> list[Buffer]:
        """Return the buffers that are in memory while a launch runs."""
        return [b for b in self.born if self.born[b] <= launch <= self.dies[b]]


def residency(launches: Launches, *, in_place: bool = True) -> Residency:
    """Return when the buffers of launches are in memory; inputs stay to the end, as
    parameters do. ``in_place``: an all-reduce, or a sum over microbatches, overwrites
    an operand that nothing else needs, as Inductor does."""
    born = dict.fromkeys(launches.inputs, -1)
    end = len(launches.launches)
    dies = dict.fromkeys(launches.inputs, end)
    waits = {x.of: i for i, x in enumerate(launches.launches) if x.of is not None}
    for i, launch in enumerate(launches.launches):
        until = waits.get(launch, i)
        for buffer in launch.writes:
            born[buffer], dies[buffer] = i, until
        for buffer in launch.reads:
            dies[buffer] = max(dies[buffer], until)
    dies.update((buffer, end) for result in launches.outputs for buffer in result)
    if in_place:
        _reuse(launches, waits, born, dies)
    return Residency(born, dies, list(_bytes_by_launch(launches, dies)))


def _reuse(
    launches: Launches,
    waits: dict[Launch, int],
    born: dict[Buffer, int],
    dies: dict[Buffer, int],
) -> None:
    """End the lifetime of buffers that launches overwrite when these begin, unless they
    are read later, in place."""
    last: dict[Buffer, int] = {}
    for i, launch in enumerate(launches.launches):
        last.update(dict.fromkeys(launch.reads, i))
    for i, launch in enumerate(launches.launches):
        for buffer in _written_over(launch):
            frees = last[buffer] == i and dies[buffer] == waits.get(launch, i)
            if frees and born[buffer] >= 0:
                dies[buffer] = i - 1


def _written_over(launch: Launch) -> list[Buffer]:
    """Return the operands that a launch may overwrite with its results."""
    if op_facts_of(launch.nodes[-1].target).over_first:
        return [*launch.reads][:1]
    return [*launch.reads] if launch.kind == "all_reduce" else []


def _bytes_by_launch(
    launches: Launches, dies: dict[Buffer, int]
) -> Iterator[tuple[int, int, int, int]]:
    freed: dict[int, int] = defaultdict(int)
    for buffer, i in dies.items():
        freed[i] += buffer.nbytes
    total = sum(buffer.nbytes for buffer in launches.inputs)
    yield -1, total, total, total
    for i, launch in enumerate(launches.launches):
        allocated = sum(buffer.nbytes for buffer in launch.writes)
        yield i, allocated, total + allocated, total + allocated - freed[i]
        total += allocated - freed[i]


def by_kind(
    graph: fx.Graph, signature: Signature, launches: Launches | None = None
) -> tuple[tuple[str, int], ...]:
    """Return (kind, bytes a rank holds) at the peak of a local graph as it runs,
    without kinds of 0 bytes. ``launches``: those of the graph, if known.

    Raises PlanError as ``launches_of`` does.
    """
    launches = launches or launches_of(graph)
    total = dict.fromkeys(MEMORY_KINDS, 0)
    for buffer, kind in kinds_at_peak(graph, signature, launches).items():
        total[kind] += buffer.nbytes
    state = optimizer_bytes(graph, signature)
    total["optimizer state"] = sum(state.values())
    return tuple((kind, size) for kind, size in total.items() if size)


def optimizer_bytes(graph: fx.Graph, signature: Signature) -> dict[fx.Node, int]:
    """Map each parameter of a local graph that has a gradient to the bytes of its
    optimizer state, ``memory_constraints.MOMENTS`` times its own."""
    of = {out.of for out in signature.outputs if out.kind == "gradient"}
    inputs = graph.find_nodes(op="placeholder")
    pairs = enumerate(zip(inputs, signature.inputs, strict=True))
    return {
        node: MOMENTS * bytes_of(node)
        for k, (node, declared) in pairs
        if k in of and declared.kind == "parameter"
    }


def kinds_at_peak(
    graph: fx.Graph, signature: Signature, launches: Launches
) -> dict[Buffer, str]:
    """Return the kind of each buffer that is in memory at the peak."""
    inputs = graph.find_nodes(op="placeholder")
    pairs = zip(inputs, signature.inputs, strict=True)
    parameters = {node for node, declared in pairs if declared.kind == "parameter"}
    gathered = set(filter(_is_split, parameters))
    for node in graph.nodes:
        read = [n for n in node.all_input_nodes if tensors_in(n.meta.get("val"))]
        if node.op == "call_function" and read and gathered.issuperset(read):
            gathered.add(node)
    # Later lines override earlier ones.
    kinds: dict[Buffer, str] = {}
    for launch in launches.launches:
        kinds.update(dict.fromkeys(launch.writes, "passing"))
    for launch in launches.launches:
        if launch.axes:
            both_ends = (*launch.reads, *launch.writes)
            kinds.update(dict.fromkeys(both_ends, "buffers of collectives"))
    forward_buffers = {b for x in launches.launches if not x.backward for b in x.writes}
    for launch in launches.launches:
        if launch.backward:
            saved = forward_buffers.intersection(launch.reads)
            kinds.update(dict.fromkeys(saved, "saved for the backward"))
    kinds.update((b, "gathered parameters") for b in kinds if b.node in gathered)
    for out, buffers in zip(signature.outputs, launches.outputs, strict=True):
        if out.kind == "gradient":
            kinds.update(dict.fromkeys(buffers, "gradients"))
    for buffer in launches.inputs:
        is_parameter = buffer.node in parameters
        kinds[buffer] = "parameters" if is_parameter else "inputs and buffers"
    resident = residency(launches)
    return {buffer: kinds[buffer] for buffer in resident.at(resident.peak[1])}


def _is_split(node: fx.Node) -> bool:
    spec = node.meta.get("fxpar_spec")
    return spec is not None and bool(spec.sharded_axes)


# The stream of a rank's launches; the prefix of that of all launches at a place of a
# pipeline.
COMPUTE, PLACE_STREAM = "compute", "place"

# Number of the largest tensors at the peak that are named.
LARGEST = 10


@dataclass(frozen=True)
class Event:
    """Is one launch and the time when it runs."""

    # The name of its last op, with ``_wait`` appended for a wait that is no op; in
    # stages, the name of the action.
    name: str
    kind: str  # "fused", "contraction", "alone", "wait", or a collective
    stream: str  # "compute", or axes joined by "+"
    start: float  # in seconds of the step
    duration: float  # seconds; for a wait, those in which compute is idle because of it
    axes: tuple[str, ...] = ()  # a collective's axes; empty for any other launch
    # Bytes that a kernel moves through memory; for a collective ``plan.Collective``'s.
    bytes: int = 0
    flops: float = 0.0  # a contraction's flops
    nodes: int = 1  # number of ops that it runs
    of: str | None = None  # name of the collective that a wait waits for
    # Name of the node of the one-device graph; None: it has none.
    origin: str | None = None
    line: str | None = None  # the user's line

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class LiveTensor:
    """Is a tensor in memory at the peak."""

    name: str  # the name of the node that computes it
    bytes: int  # on one rank
    line: str | None = None  # the user's line


@dataclass(frozen=True)
class Traffic:
    """Is the sum of the collectives of one kind along the same axes."""

    kind: str  # as in ``plan.Collective``
    axes: tuple[str, ...]  # the axes over which they communicate
    calls: int  # number of collectives
    bytes: int  # as in ``plan.Collective``
    sent: int  # bytes that one rank sends, by a ring where there are several algorithms


@dataclass(frozen=True)
class Timeline:
    """Is one step of one rank, in seconds and bytes."""

    events: tuple[Event, ...]  # in the order in which they are launched
    seconds: float  # duration of the step
    compute_seconds: float  # sum of the kernels
    communication_seconds: float  # sum of the collectives, overlapping or not
    # Time in which collectives run and no kernel does, or delay kernels.
    exposed_seconds: float
    traffic: tuple[Traffic, ...]  # collectives, summed up by kind and axes
    memory: tuple[tuple[float, int], ...]  # (time, bytes) at each change
    peak_bytes: int  # the most in memory at a time
    held: tuple[LiveTensor, ...]  # the largest tensors at the peak, largest first
    backward: float | None = None  # when the backward of a joint graph begins

    @property
    def hidden_seconds(self) -> float:
        """Return the communication that overlaps with kernels or communication."""
        return max(0.0, self.communication_seconds - self.exposed_seconds)

    @cached_property
    def sent(self) -> dict[str, int]:
        """Return the bytes that one rank sends, by axes as in ``Event.stream``."""
        out: dict[str, int] = defaultdict(int)
        for traffic in self.traffic:
            out["+".join(traffic.axes)] += traffic.sent
        return dict(out)


@dataclass(frozen=True)
class Task:
    """Is a kernel, a collective or a wait, in the order of launches."""

    # The name under which it is shown.
    name: str
    # Its duration.
    seconds: float = 0.0
    # The axes that a collective runs along; a kernel and a wait have none.
    axes: tuple[str, ...] = ()
    # The collective that a wait is for.
    of: int | None = None
    # Seconds for which a collective first holds the compute stream.
    delay: float = 0.0


class Simulation:
    """Says when each of some tasks runs, given in the order they are launched.

    The model is what PyTorch does, with both NCCL and gloo. Kernels run one after the
    other. Each set of axes that communicates has a process group, and so a stream: a
    collective starts once all tasks launched before it have run, not only its operand,
    since its stream waits for the compute stream where it is called. It also waits for
    those called before it along any of its axes: sets that share an axis share its
    links, on which two at a time would each have a part, to end no sooner together.
    Axes that are not shared have links of their own, as the devices of FlexFlow do. A
    wait holds the compute stream until its collective is done. A collective of no
    duration is as if it were not there.

    ``starts``, ``ends``: seconds, by index of the task.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.starts, self.ends, self._clock = list[float](), list[float](), [0.0]
        now, free = 0.0, dict[str, float]()
        for task in tasks:
            start = now
            if task.of is not None:
                now = end = max(now, self.ends[task.of])
            elif not task.axes:
                now = end = now + task.seconds
            else:
                now += task.delay
                axes = [axis_of(axis) for axis in task.axes if task.seconds]
                begin = max([now, *(free.get(axis, 0.0) for axis in axes)])
                end = begin + task.seconds
                free.update(dict.fromkeys(axes, end))
                start = start if task.delay else begin
            self.starts.append(start)
            self.ends.append(end)
            self._clock.append(now)
        # When all is done.
        self.seconds = max([now, *free.values()])

    def clock(self, i: int) -> float:
        """Return when the compute stream has passed task i, or all tasks: -1."""
        return self._clock[i + 1 if i >= 0 else i]


def simulate(
    graph: fx.Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    fused: bool = True,
    launches: Launches | None = None,
) -> Timeline:
    """Return the timeline of one step of a local graph, joint or not, in its order.

    mesh: with the hardware's links (``hardware.on(mesh)``). fused: False for one kernel
    per op, launched eagerly. launches: those of the graph, if they are known.

    Raises PlanError for an unknown collective, or a group that names no axes.
    """
    launches = launches or launches_of(graph, fused=fused)
    tasks = _tasks(launches, mesh, _machine(hardware, fused))
    times = Simulation(tasks)
    live = residency(launches, in_place=fused)
    events = _events(launches.launches, tasks, times)
    in_backward = (i for i, launch in enumerate(launches.launches) if launch.backward)
    first = next(in_backward, None)
    waited = sum(e.duration for e in events if e.of) + sum(t.delay for t in tasks)
    return Timeline(
        events,
        times.seconds,
        sum(e.duration for e in events if not e.axes and e.of is None),
        sum(e.duration for e in events if e.axes),
        waited + times.seconds - times.clock(-1),
        _traffic(launches.launches, mesh),
        tuple(_curve(live, times).items()),
        live.peak[0],
        _largest(live),
        None if first is None else times.starts[first],
    )


def launch_seconds(
    launches: Launches, mesh: Mesh, hardware: Hardware, *, fused: bool = True
) -> dict[str, float]:
    """Return the seconds of each launch by itself, by the name of its last node;
    arguments as for ``simulate``."""
    tasks = _tasks(launches, mesh, _machine(hardware, fused))
    names = (launch.nodes[-1].name for launch in launches.launches)
    return {x: t.delay + t.seconds for x, t in zip(names, tasks, strict=True)}


def _machine(hardware: Hardware, fused: bool) -> Hardware:
    return hardware if fused else replace(hardware, launch=hardware.eager_launch)


def _tasks(program: Launches, mesh: Mesh, hardware: Hardware) -> list[Task]:
    """Return the task of each launch."""
    # A phase that repeats a collective has an equal launch: a wait is for the last one.
    where: dict[Launch, int] = {}
    tasks: list[Task] = []
    for i, launch in enumerate(program.launches):
        where[launch] = i
        if launch.of is not None:
            task = Task(launch.name, of=where[launch.of])
        elif launch.axes:
            curve = collectives.along(launch.kind, mesh, launch.axes)
            seconds = curve.seconds(launch.before)
            delay = seconds * hardware.beside
            task = Task(launch.name, seconds - delay, launch.axes, delay=delay)
        elif launch.kind == "fused":
            task = Task(launch.name, hardware.fused(launch.moved, launch.light))
        else:
            seconds = hardware.launch + hardware.kernel(
                launch.moved,
                launch.flops,
                launch.dims,
                launch.dtype,
                launch.family,
                launch.hidden_flops,
            )
            task = Task(launch.name, seconds)
        tasks.append(task)
    return tasks


def _events(
    launches: Sequence[Launch], tasks: Sequence[Task], times: Simulation
) -> tuple[Event, ...]:
    out = []
    spans = zip(tasks, times.starts, times.ends, strict=True)
    for launch, (task, start, end) in zip(launches, spans, strict=True):
        node = launch.nodes[-1]
        out.append(
            Event(
                launch.name,
                launch.kind,
                "+".join(launch.axes) or COMPUTE,
                start,
                task.delay + task.seconds if launch.of is None else end - start,
                launch.axes,
                max(launch.before, launch.after) if launch.axes else launch.moved,
                launch.flops,
                len(launch.nodes),
                launch.of.name if launch.of is not None else None,
                node.meta.get("fxpar_origin"),
                user_line(node),
            )
        )
    return tuple(out)


def _traffic(launches: Sequence[Launch], mesh: Mesh) -> tuple[Traffic, ...]:
    groups: dict[tuple[str, tuple[str, ...]], list[Launch]] = defaultdict(list)
    for launch in launches:
        if launch.axes:
            groups[launch.kind, launch.axes].append(launch)
    return tuple(
        Traffic(
            kind,
            axes,
            len(group),
            sum(max(launch.before, launch.after) for launch in group),
            round(sum(send(mesh.count(axes), x.before) for x in group)),
        )
        for (kind, axes), group in sorted(groups.items())
        if (send := KINDS[kind].sent)
    )


def _curve(live: Residency, times: Simulation) -> dict[float, int]:
    """Return {time: bytes in memory} at each change."""
    curve: dict[float, int] = {}
    for i, begin, during, after in live.usage:
        if i < 0:
            curve[0.0] = after
            continue
        if begin:
            curve[times.clock(i - 1) if i else 0.0] = during
        if after != during:
            curve[times.clock(i)] = after
    return curve


def _largest(live: Residency) -> tuple[LiveTensor, ...]:
    """Return the largest tensors at the peak."""
    there = sorted(live.at(live.peak[1]), key=lambda buffer: -buffer.nbytes)
    return tuple(
        LiveTensor(b.node.name, b.nbytes, user_line(b.node)) for b in there[:LARGEST]
    )


def predict_step(
    graph: fx.Graph,
    mesh: Mesh,
    hardware: Hardware,
    *,
    settings: Settings = DEFAULT,
    disable: Collection[str] = (),
    fused: bool = True,
) -> Timeline:
    """Return the timeline of one step. ``settings``, ``disable``: settings and disabled
    passes of the order; ``fused``: as for ``simulate``, which says what is raised."""
    axis = pipeline_axis(mesh)
    if axis is not None:
        simulate_stages = OF_STAGES["simulate"]
        timeline: Timeline = simulate_stages(
            graph, hardware.on(mesh), axis, hardware, fused=fused
        )
        return timeline
    graph = as_run(graph, disable=disable, settings=settings)
    if mesh.is_shared_equally:
        machine = hardware.at_speed(mesh.slowest)
        return simulate(graph, machine.on(mesh), machine, fused=fused)
    values = [node.meta.get("val") for node in graph.nodes]
    mode = fake.mode_of(values) or fake.new_fake_mode()
    lines = []
    for rank, speed in distinct_ranks(mesh):
        machine, own = hardware.at_speed(speed), sized(graph, mesh, rank, mode)
        lines.append(simulate(own, machine.on(mesh), machine, fused=fused))
    return max(lines, key=lambda line: line.seconds)
