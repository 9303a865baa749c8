"""Wraps a compiled graph in what each call needs, and checks and edits Dynamo graphs.

In: a Dynamo graph, and what AOTAutograd compiled of it. Out: a ``Compiled``, which
``call_variants.Calls`` runs: it checks arguments at the first call, watches the
backward, and returns results as DTensors where asked; or an error with the user's line.
Never: a change of what a graph computes.

Ranks that send rows of their own to experts (``features.experts``) do not know how many
rows others feed, nor whether they send any: at each run they agree on a room, in rows,
and run the graph that is compiled for it.

In local mode ``dist.all_reduce(x)`` and the like are in a Dynamo graph as functional
collectives, whose result ``copy_`` writes to ``x``. In eager code they write to memory
that autograd does not see: the gradient of the tensor written to goes to its value
before, and none goes to the tensor sent. ``take_eager_gradients`` gives the graph these
gradients; those of functional collectives that the user calls stay.

Results share memory as they do on one device. For ``return z, z[0]`` without a gradient
a graph gives two values, each gathered by itself: ``return_once`` gives the graph
without results that are views of others, ``with_views`` a call that adds them as views,
so that a write to one is seen in all, and nothing is sent twice. Never: a view of an
input, or one with a gradient; AOTAutograd makes these.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxpar import _torch
from fxpar.errors import FxparError, PlanError, RankMismatchError
from fxpar.graph import custom_ops as _custom_ops  # noqa: F401  (registers its ops)
from fxpar.runtime.caches.known_programs import KnownProgram
from fxpar.runtime.caches.program_identity import placeholders
from fxpar.runtime.calls import outside_graphs
from fxpar.runtime.calls.call_variants import CompileJob
from fxpar.runtime.calls.open_sizes import SizeRange, open_sizes
from fxpar.runtime.ranks import drift, mean_gradients, meeting, worlds
from fxpar.runtime.ranks.meeting import name_lost_ranks
from fxpar.runtime.stage_times import FIRST, stage
from fxpar.sharding.plan import Plan
from fxpar.sharding.program import Input, user_line
from fxpar.sharding.spec import Spec

# The last ones: a program may be compiled again and again.
_PLANS = deque[Plan](maxlen=1000)

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def plans() -> list[Plan]:
    """Return the plans that the fxpar backend made in this process, in order; of very
    many the last."""
    return list(_PLANS)


@contextlib.contextmanager
def refusing_data(gm: fx.GraphModule) -> Iterator[None]:
    """Raise PlanError, with the user's line, if the traced graph depends on data."""
    try:
        yield
    except FxparError:
        raise
    except Exception as error:
        refused = data_dependent(gm, error)
        if refused is None:
            raise
        raise refused from error


def data_dependent(gm: fx.GraphModule, error: Exception) -> PlanError | None:
    """Return the error for a Dynamo graph that cannot be traced because a number or a
    shape in it depends on data; None if ``error`` has another cause."""
    kind = _torch.aot.untraceable(error)
    if kind not in ("value", "shape"):
        return None
    reads = (
        user_line(node)
        for node in gm.graph.nodes
        if isinstance(node.meta.get("example_value"), (torch.Tensor, *_NUMBERS))
        and _torch.fake.is_data_dependent(node.meta["example_value"])
    )
    failed = _torch.aot.failed_node(error)
    named = (user_line(node) for node in gm.graph.nodes if node.name == failed)
    masked = (user_line(node) for node in gm.graph.nodes if _writes_by_mask(node))
    where = next(reads, None) or next(named, None)
    if kind == "shape":  # of ``nonzero`` of the mask, in the backward
        where = where or next(masked, None)
    loops = (
        node
        for node in gm.graph.nodes
        if _torch.aot.higher_order_name(node.target) == "higher_order::while_loop"
    )
    if where is None and (loop := next(loops, None)) is not None:
        return PlanError(
            "how many steps a while_loop keeps for its backward is known only once it "
            "has run",
            where=user_line(loop),
            fix="write it as a scan, whose steps are counted, run it under "
            "torch.no_grad(), or torch.compile the model and call optimizer.step()",
        )
    what, option = {
        "value": ("a number of Python is the value of a tensor", "scalar_outputs"),
        "shape": ("a shape depends on values", "dynamic_output_shape_ops"),
    }[kind]
    fix = "compute it outside of what is one graph (fxpar.train_step, fullgraph=True)"
    if _torch.dynamo.is_capturing(option):
        fix = f"leave torch._dynamo.config.capture_{option} off, so that the graph ends"
    return PlanError(
        f"{what}, inside one graph",
        where=where,
        fix=f"{fix}, or compute with tensors alone (torch.where and a mask)",
    )


def _writes_by_mask(node: fx.Node) -> bool:
    """Return whether a node of a Dynamo graph writes to places of a boolean mask."""
    if node.target not in (operator.setitem, torch.index_put, "index_put_"):
        return False
    values = (x.meta.get("example_value") for x in node.all_input_nodes[1:])
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in values)


def raiser(error: FxparError) -> Callable[..., Any]:
    """Return a function that raises ``error`` in place of a compiled graph.

    It does so once: Dynamo forgets it, so that the next call compiles again, with the
    options and the environment of that time. Ranks that come to the call get the error.
    """

    def fail(*_: Any) -> Any:
        torch.compiler.reset()
        meeting.fail(f"{type(error).__name__}: {error}")
        raise error

    return fail


@dataclass(eq=False)
class Compiled:
    """Is a compiled graph, which is called with the arguments of one rank."""

    # The callable that AOTAutograd made.
    compiled: Callable[..., Any]
    # Run at its first call.
    checks: Sequence[Callable[[Sequence[Any]], None]]
    # What was decided; without a plan where there was nothing to plan.
    program: KnownProgram
    # The request, with the ranks on the mesh that was chosen, without open sizes.
    job: CompileJob
    # The user's line of the graph break that ends the graph, if any.
    broken_at: str | None
    # The sizes it holds for; None: it leaves none open.
    sizes: SizeRange | None = None
    # The user's line of its last result.
    source_line: str | None = None
    # Compiles the graph for the room of all ranks (``rows_to_experts``).
    with_room: WithRoom | None = None

    def __post_init__(self) -> None:
        self.plan, self.written = self.program.plan, self.program.written
        self._names = [x.name for x in self.job.named_inputs]
        self.sent_rows = self.plan.sent_rows if self.plan is not None else ()
        self._of_room = dict[int, Compiled]()
        if self.plan is not None:
            _PLANS.append(self.plan)
        self._first, self._watches = True, False

    def __call__(self, *args: Any) -> Any:
        if not self.sent_rows or self.with_room is None:
            return self._run(args)
        where = f" at {self.source_line}" if self.source_line else ""
        room = agreed_room(self.sent_rows, f"a call of the graph that ends{where}")
        if room is None or not (room or any(self.sent_rows)):
            return self._run(args)
        if room not in self._of_room:
            self._of_room[room] = self.with_room(room, args)
        return self._of_room[room]._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        outside_graphs.graph_runs(self, self.broken_at, args, self._names)
        try:
            outputs = self._begun(args) if self._first else self.compiled(*args)
        except RuntimeError as error:
            name_lost_ranks(error)
            raise
        if not self._watches and torch.is_grad_enabled():
            function = _torch.aot.wrap_backward(outputs, self._backward)
            self._watches = function is not None
            if self._watches and self.job.ranks.manual is not None:
                mean_gradients.serve_backward(args, outputs)
        is_global = self.job.options.outputs == "global"
        return outputs if is_global else self._dressed(outputs)

    def _backward(
        self, _: Any, gradients: Sequence[Any], run: Callable[[], Any]
    ) -> Any:
        if self.job.options.outputs == "global" and self.job.ranks.mesh.size > 1:
            drift.note_gradients(self.source_line, gradients)
        try:
            return run()
        except RuntimeError as error:
            name_lost_ranks(error)
            raise

    def _begun(self, args: Sequence[Any]) -> Any:
        """Check the arguments, and run the graph for the first time."""
        with stage(FIRST):
            for check in self.checks:
                check(args)
            self._first = False
            return self.compiled(*args)

    def _dressed(self, outputs: Any) -> Any:
        """Return the results as DTensors. One that the graph does not compute (an input
        handed through) is a global value."""
        return type(outputs)(
            self.job.ranks.dtensor(
                x, self.program.results.get(i) or Spec.whole(x.dim())
            )
            if isinstance(x, torch.Tensor)
            else x
            for i, x in enumerate(outputs)
        )


# (room, arguments) -> the graph compiled for them.
WithRoom = Callable[[int, Sequence[Any]], Compiled]


def refuse_nested(
    gm: fx.GraphModule, inputs: Sequence[Input], examples: Sequence[Any]
) -> None:
    """Raise PlanError if an input is a nested tensor: the lengths of its rows are not
    sizes of the program."""
    for node, name, x in zip(placeholders(gm), inputs, examples, strict=True):
        if isinstance(x, torch.Tensor) and x.is_nested:
            raise PlanError(
                f"input {name.name} is a nested tensor, whose lengths are no sizes",
                where=next(filter(None, map(user_line, node.users)), None),
                fix="feed its values and where each begins, and make it inside, by "
                "torch.nested.nested_tensor_from_jagged",
            )


def agreed_room(sent: Sequence[int], what: str) -> int | None:
    """Return the room in rows, the same on all ranks; None if all send equally many
    rows, 0 if some rank sends none since it has all experts. ``sent``:
    ``Plan.sent_rows``.

    Raises RankMismatchError, on all ranks, if some do not send rows here."""
    with worlds.inside(None):
        words = meeting.meet("rows to experts", ",".join(map(str, sent)), what)
    if len(set(words)) == 1:
        return None
    rows = [word.split(",") for word in words]
    if len({*map(len, rows)}) > 1:
        error = RankMismatchError(
            f"in {what} ranks send rows to different mixtures of experts",
            fix="use the same experts on every rank, in the same order, or set "
            "expert_exchange (FXPAR_EXPERT_EXCHANGE) to gather",
        )
        raise meeting.as_reported(error)
    counts = [int(n) for each in rows for n in each]
    # Powers of two: few rooms to compile for, whatever the numbers of rows are.
    return 1 << (max(counts) - 1).bit_length() if all(counts) else 0


def take_eager_gradients(gm: fx.GraphModule) -> None:
    """Give in-place collectives the gradients of eager code; change ``gm`` in place."""
    for node in list(gm.graph.find_nodes(op="call_method", target="copy_")):
        written, value = node.args[:2]
        launch = _launch_of(value)
        if launch is None:
            continue
        for sent in launch.all_input_nodes:
            if isinstance(sent.meta.get("example_value"), torch.Tensor):
                with gm.graph.inserting_before(launch):
                    detached = gm.graph.call_method("detach", (sent,))
                detached.meta = dict(sent.meta)
                launch.replace_input_with(sent, detached)
        with gm.graph.inserting_before(node):
            redirected = gm.graph.call_function(
                torch.ops.fxpar.with_gradient_of, (value, written)
            )
        redirected.meta = {
            **node.meta,
            "example_value": value.meta.get("example_value"),
        }
        node.replace_input_with(value, redirected)
    gm.recompile()


def _launch_of(value: Any) -> fx.Node | None:
    """Return the functional collective whose result a value is, or None."""
    if not isinstance(value, fx.Node) or "wait_tensor" not in str(value.target):
        return None
    launch = value.args[0]
    is_functional = "_c10d_functional" in str(getattr(launch, "target", ""))
    return launch if isinstance(launch, fx.Node) and is_functional else None


_symbols = _torch.symbols
_memory_of = _torch.objects.memory_of


@dataclass(frozen=True)
class StridedLayout:
    """Holds where the elements of a tensor are in its memory; numbers or symbols."""

    # Elements along each dim.
    size: tuple[Any, ...]
    # Distance from one element to the next along each dim, in elements.
    stride: tuple[Any, ...]
    # Number of elements of the memory before the first.
    offset: Any

    @staticmethod
    def of(x: torch.Tensor) -> StridedLayout:
        return StridedLayout(tuple(x.shape), x.stride(), x.storage_offset())

    def given(self, size_values: dict[str, int]) -> StridedLayout:
        """Return the layout with numbers for symbols, by their names."""

        def number(n: Any) -> Any:
            return _symbols.substituted(n, size_values)

        size, stride = map(number, self.size), map(number, self.stride)
        return StridedLayout(tuple(size), tuple(stride), number(self.offset))

    @property
    def span(self) -> range:
        """Return the range of memory from first to last element, for traced sizes."""
        sizes, strides = map(_symbols.hint_shape, (self.size, self.stride))
        begin = _symbols.hint_of(self.offset)
        if 0 in sizes:
            return range(begin, begin)
        last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        return range(begin, begin + last + 1)


@dataclass(frozen=True)
class ResultView:
    """Is a result of a Dynamo graph that is a view of another result."""

    # Position of the view among the results.
    position: int
    # Position of the result that it is a view of.
    of: int
    # Layout of the view.
    layout: StridedLayout
    # Layout of that other result.
    layout_of: StridedLayout


def views_of_results(gm: fx.GraphModule) -> list[ResultView]:
    """Return the results of a Dynamo graph that are views of another one, whose
    elements are dense in its memory."""
    values = [_value(node) for node in gm.graph.output_node().args[0]]
    inputs = [*gm.graph.find_nodes(op="placeholder")]
    inputs += gm.graph.find_nodes(op="get_attr")
    input_memory = {_memory_of(x) for x in map(_value, inputs) if x is not None}
    size_values = dict.fromkeys((size.name for size in open_sizes(gm)), 2)
    layouts = {
        i: StridedLayout.of(x)
        for i, x in enumerate(values)
        if x is not None
        and _memory_of(x) not in input_memory
        and _is_known(x, size_values)
    }
    bases: list[int] = []
    views: list[ResultView] = []
    for i in sorted(layouts, key=lambda i: -len(layouts[i].span)):  # the largest first
        of = (base for base in bases if _is_view(values[i], values[base]))
        base = next(of, None)
        if base is not None:
            views.append(ResultView(i, base, layouts[i], layouts[base]))
        elif len(layouts[i].span) == _symbols.hint_of(values[i].numel()):
            bases.append(i)
    return views


def _value(node: Any) -> Any:
    """Return the value of a node if it is a tensor with strides, else None."""
    x = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return x if strided and not isinstance(x, DTensor) else None


def _is_known(x: torch.Tensor, size_values: dict[str, int]) -> bool:
    """Return whether the layout of ``x`` follows from the sizes in ``size_values``."""
    try:
        StridedLayout.of(x).given(size_values)
    except (KeyError, _symbols.Inexpressible):
        return False
    return True


def _is_view(x: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether ``x``, without a gradient, is in the memory of ``base``."""
    if x.requires_grad or x.dtype != base.dtype or _memory_of(x) != _memory_of(base):
        return False
    inside, around = StridedLayout.of(x).span, StridedLayout.of(base).span
    return around.start <= inside.start and inside.stop <= around.stop


def return_once(gm: fx.GraphModule, views: Sequence[ResultView]) -> fx.GraphModule:
    """Return a copy of a Dynamo graph without its results that are views of others."""
    once = _torch.dynamo.copy_graph(gm)
    output = once.graph.output_node()
    left_out = {view.position for view in views}
    results = [x for i, x in enumerate(output.args[0]) if i not in left_out]
    output.args = (type(output.args[0])(results),)
    once.recompile()
    return once


def with_views(
    gm: fx.GraphModule, views: Sequence[ResultView], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap ``call``, of ``return_once``'s graph, to return all results of ``gm``."""
    count, sizes = len(gm.graph.output_node().args[0]), open_sizes(gm)
    left_out = {view.position for view in views}
    positions = [i for i in range(count) if i not in left_out]

    def viewing(*args: Any) -> Any:
        returned = call(*args)
        size_values = {size.name: size.of(args) for size in sizes}
        results = dict(zip(positions, returned, strict=True))
        for view in views:
            layout, whole = (
                view.layout.given(size_values),
                view.layout_of.given(size_values),
            )
            if results[view.of].stride() != whole.stride:
                results[view.of] = _with_layout(results[view.of], whole)
            base = results[view.of].detach()
            begin = base.storage_offset() + layout.offset - whole.offset
            results[view.position] = base.as_strided(layout.size, layout.stride, begin)
        return type(returned)(results[i] for i in range(count))

    return viewing


def _with_layout(x: torch.Tensor, layout: StridedLayout) -> torch.Tensor:
    """Return a copy with dims in the order of these strides; gradients flow."""
    dims = sorted(range(x.dim()), key=lambda d: -layout.stride[d])
    inverse = [dims.index(d) for d in range(x.dim())]
    return x.permute(dims).contiguous().permute(inverse)
