"""What a sharded model sends: as its plan says, as FSDP2 sends, as Megatron sends.

Bytes are those of ``Collective.bytes``. They are counted three times: from the plan;
from the tensors that the collectives of the running graphs are called with, by axes;
and from what the process group was called with, as the profiler saw it.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import fxpar
from fxpar import _torch
from fxpar.runtime.ranks.groups import group_of
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.plan import Plan
from tests.helpers.models import LAYERS, LENGTH, WIDTH, WORDS, build_loss
from tests.helpers.spawn import ranks_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("propagated")]

BATCH, FLOAT = 8, 4

# What Megatron splits by columns (the weight is [out, in]) and by rows.
HINTS: dict[str, Any] = {
    **{f"*.{n}_proj.weight": ("tp", None) for n in ("q", "k", "v", "gate", "up")},
    **{f"*.{n}_proj.weight": (None, "tp") for n in ("o", "down")},
}

Kinds = dict[str, int]  # kind -> bytes
Sent = tuple[str, tuple[str, ...], int]  # kind, axes, bytes


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# What the process group is called with

CALLS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
}

SIZES = {"float": 4, "double": 8, "long int": 8, "unsigned char": 1, "bool": 1}


def profiled(run: Callable[[], Any]) -> Kinds:
    """Bytes by kind of all that ``run`` makes the process group do."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    out: Counter[str] = Counter()
    operand = ""  # dtype of a functional collective's, which calls the group's
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        namespace, _, name = event.get("name", "").partition("::")
        if namespace == "_c10d_functional":
            operand = event["args"]["Input type"][0]
        elif namespace == "c10d":
            out[CALLS[name]] += max(_tensors(event["args"], operand))
    return dict(out)


def _tensors(call: dict[str, Any], operand: str) -> Iterator[int]:
    """Bytes of each tensor among the arguments. Lists do not tell their dtype."""
    for kind, dims in zip(call["Input type"], call["Input Dims"], strict=True):
        if kind == "TensorList":
            yield sum(math.prod(shape) for shape in dims) * SIZES[operand]
        elif kind in SIZES:
            yield math.prod(dims) * SIZES[kind]


# What compiled graphs do


class Counted(fx.Interpreter):
    """Runs a graph and notes its collectives: kind, group, bytes."""

    def __init__(self, gm: fx.GraphModule, noted: list[tuple[str, str, int]]) -> None:
        super().__init__(gm)
        self.noted = noted

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        name = str(target)
        ours = name.startswith(("_c10d_functional.", "fxpar.all_gather"))
        if ours and "wait_tensor" not in name:
            kind = name.split(".")[1].split("_into_")[0].removesuffix("_tensor")
            bytes_ = max(x.nbytes for x in (args[0], result))
            self.noted.append((kind, args[-1], bytes_))
        return result


@dataclass(frozen=True)
class Traffic:
    """Of one training step: ``planned``, ``sent`` by each graph in turn, ``carried``
    by the process group. ``parameters``: bytes of all of them."""

    planned: list[Sent]
    sent: list[list[Sent]]
    carried: Kinds
    parameters: int


def traffic(
    mesh: str,
    hints: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Traffic:
    """Of Llama, sharded."""
    model, batch = build_loss("llama", BATCH)
    weight = sum(p.nbytes for p in model.parameters())
    model = fxpar.shard(model, mesh=mesh, hints=hints)
    chosen = {"codegen": "eager", "mesh": mesh, **(options or {})}
    program = torch.compile(model, backend="fxpar", options=chosen)
    noted: list[list[tuple[str, str, int]]] = []

    def counting(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        notes: list[tuple[str, str, int]] = []
        noted.append(notes)
        return _torch.inductor.make_boxed(lambda *args: Counted(gm, notes).run(*args))

    def step() -> None:
        program(**batch).backward()

    before = len(fxpar.plans())
    with mock.patch("fxpar.compilation.run_op_by_op", counting):
        step()  # ranks compare plans and inputs once
    (plan,) = fxpar.plans()[before:]
    for notes in noted:
        notes.clear()
    carried = profiled(step)
    names = groups(plan.mesh)
    sent = [[(kind, names[group], n) for kind, group, n in notes] for notes in noted]
    return Traffic(planned(plan), sent, carried, weight)


def groups(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Axes by name of the process group."""
    every = [*((name,) for name in mesh.names), mesh.names]
    return {group_of(mesh, axes): tuple(axes) for axes in every}


def planned(plan: Plan) -> list[Sent]:
    order = plan.mesh.ordered
    return [(c.kind, tuple(order(c.axes)), c.bytes) for c in plan.collectives]


def by_axes(sent: Sequence[Sent]) -> dict[tuple[str, tuple[str, ...]], int]:
    out: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for kind, axes, n in sent:
        out[kind, axes] += n
    return dict(out)


def by_kind(sent: Sequence[Sent]) -> Kinds:
    out: Counter[str] = Counter()
    for kind, _, n in sent:
        out[kind] += n
    return dict(out)


def measured(mesh: str, *args: Any) -> Traffic:
    """On the ranks of a mesh, which all send the same; as planned."""
    first, *others = ranks_of(mesh).run(traffic, mesh, *args)
    assert all(other == first for other in others)
    together = [one for graph in first.sent for one in graph]
    assert by_axes(together) == by_axes(first.planned)
    assert by_kind(together) == first.carried
    return first


# Against FSDP2


def fsdp2(ranks: int) -> Kinds:
    """Bytes by kind of a training step of the same model, each layer and the root
    sharded fully, gathered for the forward and again for the backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, batch = build_loss("llama", BATCH)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for layer in model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    rank = mesh.get_local_rank()
    mine = {k: x.chunk(ranks)[rank] for k, x in batch.items()}

    def step() -> None:
        model(**mine).backward()

    step()
    return profiled(step)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_dp_sends_what_fsdp2_sends(ranks: int) -> None:
    """Save that FSDP2, told to reshard its root too, gathers for the backward also the
    embedding, which no gradient needs, and the head, which the forward read last. The
    loss and the number of labels are summed over ranks."""
    mesh = f"dp={ranks}"
    ours, theirs = measured(mesh), ranks_of(mesh).run(fsdp2, ranks)[0]
    every, embedding = ours.parameters, WORDS * WIDTH * FLOAT
    head = embedding
    assert theirs == {"all_gather": 2 * every, "reduce_scatter": every}
    forward, backward = map(by_kind, ours.sent)
    assert forward == {"all_gather": every, "all_reduce": 2 * FLOAT}
    assert backward == {"all_gather": every - embedding - head, "reduce_scatter": every}


# Against Megatron


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tp_sends_what_megatron_sends(ranks: int) -> None:
    """Two sums of the hidden states a layer, forward and backward, nothing else."""
    ours = measured(f"tp={ranks}", HINTS)
    hidden = BATCH * LENGTH * WIDTH * FLOAT
    forward, backward = ours.sent
    assert forward == [("all_reduce", ("tp",), hidden)] * (2 * LAYERS)
    assert backward == [("all_reduce", ("tp",), hidden)] * (2 * LAYERS)


OPEN = {
    name: tuple("tp?" if entry == "tp" else "?" for entry in entries)
    for name, entries in HINTS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("hints", [HINTS, OPEN], ids=["closed", "open"])
def test_tp_and_dp_keep_to_their_axes(hints: dict[str, Any]) -> None:
    """What tp splits dp splits further if the hint leaves dims open, and gathers; else
    its gradient is summed over dp. The rest is gathered over dp alone."""
    ours = measured("dp=2,tp=2", hints)
    hidden = BATCH // 2 * LENGTH * WIDTH * FLOAT
    rest = (2 * WORDS * WIDTH + (2 * LAYERS + 1) * WIDTH) * FLOAT
    split = (ours.parameters - rest) // 2
    held = rest + (split if hints is OPEN else 0)
    forward, backward = map(by_axes, ours.sent)
    dp, tp = ("dp",), ("tp",)
    assert forward == {
        ("all_gather", dp): held,
        ("all_reduce", dp): 2 * FLOAT,
        ("all_reduce", tp): 2 * LAYERS * hidden,
    }
    summed = {} if hints is OPEN else {("all_reduce", dp): split}
    assert backward == {
        ("all_gather", dp): held - 2 * WORDS * WIDTH * FLOAT,
        ("reduce_scatter", dp): held,
        ("all_reduce", tp): 2 * LAYERS * hidden,
        **summed,
    }


# Less often


def accumulated() -> tuple[list[Kinds], list[Kinds]]:
    """Bytes of each of three microbatches, the last outside ``no_sync``, after all was
    done once; and of the plans that were made, in order."""
    model, batch = build_loss("llama", BATCH)
    model = fxpar.shard(model, mesh="dp=4")
    options = {"codegen": "eager", "mesh": "dp=4"}
    program = torch.compile(model, backend="fxpar", options=options)

    def step(last: bool) -> None:
        with contextlib.nullcontext() if last else fxpar.no_sync(model):
            program(**batch).backward()

    before = len(fxpar.plans())
    for last in (False, True):
        step(last)
    model.zero_grad()
    carried = [profiled(lambda last=last: step(last)) for last in (False, False, True)]
    return carried, [by_kind(planned(plan)) for plan in fxpar.plans()[before:]]


@pytest.mark.slow
def test_only_the_microbatch_after_no_sync_reduces() -> None:
    carried, plans = ranks_of("dp=4").run(accumulated)[0]
    first, second, last = carried
    every = sum(p.nbytes for p in build_loss("llama")[0].parameters())
    assert set(first) == {"all_gather", "all_reduce"}
    assert first["all_reduce"] == 2 * FLOAT
    assert second == first == plans[0]
    assert last == {**first, "reduce_scatter": every}


@pytest.mark.slow
def test_kept_parameters_are_gathered_once() -> None:
    ours = measured("dp=4", None, {"reshard_after_forward": False})
    forward, backward = map(by_kind, ours.sent)
    assert backward == {"reduce_scatter": ours.parameters}
    assert forward == {"all_gather": ours.parameters, "all_reduce": 2 * FLOAT}
