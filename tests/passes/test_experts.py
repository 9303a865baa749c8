"""Mixtures of experts without capacity: rows are sorted by expert, whoever has it.

Numbers are those of one device in float64, all ranks in lockstep; for models of Hugging
Face those of its own loop over experts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

import fxpar
from fxpar.errors import FxparWarning, OptionError, RoomError, ScheduleError
from fxpar.features.experts import (
    expert_ops,
)
from fxpar.fusion import node_legality
from fxpar.graph.builder import PART
from fxpar.passes.order.forward_backward import as_run
from fxpar.planning import TracedPlan
from tests.helpers.models import MIXTURES, build_double, double

pytest.importorskip("transformers.integrations.moe")

TOKENS, WIDTH, EXPERTS = 16, 8, 4


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=ends)


def chosen(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts for each token, and what each counts."""
    weights, ids = torch.topk(scores, 2, dim=-1)
    return ids.reshape(-1), (weights / weights.sum(-1, keepdim=True)).reshape(-1)


def ends_of(ids: torch.Tensor, experts: int) -> torch.Tensor:
    counts = torch.histc(ids.double(), experts, 0, experts - 1)
    return counts.cumsum(0, dtype=torch.int32)


def mixture(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As transformers and torchtitan dispatch: sort, products, the sort undone."""
    ids, weights = chosen(scores)
    key, order = torch.sort(ids)
    ends = ends_of(key, up.shape[0])
    rows = torch.nn.functional.silu(grouped(x[order // 2], up, ends))
    rows = grouped(rows, down, ends) * weights[order][:, None]
    place = torch.argsort(order)
    return rows[place].view(-1, 2, x.shape[1]).sum(1)


def added(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The results are added where their tokens are."""
    ids, weights = chosen(scores)
    _, order = torch.sort(ids, stable=True)
    ends = ends_of(ids, up.shape[0])
    rows = grouped(torch.relu(grouped(x[order // 2], up, ends)), down, ends)
    return torch.zeros_like(x).index_add(0, order // 2, rows * weights[order, None])


def lifted(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """What stands between products is not zero where its operands are."""
    ids, weights = chosen(scores)
    _, order = torch.sort(ids)
    ends = ends_of(ids, up.shape[0])
    rows = grouped(torch.relu(grouped(x[order // 2], up, ends)), down, ends) + 1.0
    return torch.zeros_like(x).index_add(0, order // 2, rows * weights[order, None])


def dense(
    x: torch.Tensor,
    scores: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    act: Any,
) -> torch.Tensor:
    """Every expert on every token."""
    weights, ids = torch.topk(scores, 2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    each = torch.einsum("tk,ekn->ten", x, up)
    each = torch.einsum("ten,enk->tek", act(each), down)
    hot = torch.zeros_like(scores).scatter(1, ids, weights)
    return torch.einsum("te,tek->tk", hot, each)


def arguments(experts: int = EXPERTS, tokens: int = TOKENS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (
        (tokens, WIDTH),
        (tokens, experts),
        (experts, WIDTH, 12),
        (experts, 12, WIDTH),
    )
    args = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    args[1] = args[1].softmax(-1)
    return [x.requires_grad_() for x in args]


def planned(fn: Any, args: list[torch.Tensor], mesh: str, **more: Any) -> TracedPlan:
    return fxpar.plan(fn, *args, mesh=mesh, mode="propagate", grad=True, **more)


def compare(
    plan: TracedPlan, args: list[torch.Tensor], act: Any, more: float = 0.0
) -> None:
    """The results and gradients of a plan with those of all experts on all tokens."""
    result, gradients = plan.simulate(*args)
    want = dense(*args, act) + more  # type: ignore[arg-type]
    grads = torch.autograd.grad(want.sum(), args)
    torch.testing.assert_close(result, want, rtol=1e-11, atol=1e-12)
    for got, grad in zip(gradients.values(), grads, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-11, atol=1e-12)


def ops(graph: fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes)


PROGRAMS = {mixture: torch.nn.functional.silu, added: torch.relu}


def slow(*cases: Any) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    "mesh", ["dp=2,ep=2", *slow("ep=2", "ep=4", "dp=4", "ep=2,tp=2")]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=["sorted back", "added"])
def test_rows_go_to_their_experts(program: Any, mesh: str) -> None:
    args = arguments()
    plan = planned(program, args, mesh)
    compare(plan, args, PROGRAMS[program])
    made = ops(plan.result.normalized)  # type: ignore[union-attr]
    assert made["fxpar.expert_mm.default"] == 4
    assert not made["aten.sort.default"]
    if "ep" in mesh:
        assert plan.inputs[2].dims[0] == plan.inputs[3].dims[0] == ("ep",)
        assert plan.inputs[0].dims[0][-1] == "ep"


@pytest.mark.parametrize("program", [added, *slow(mixture)])
def test_tokens_that_the_axis_does_not_divide(program: Any) -> None:
    args = arguments(tokens=15)
    plan = planned(program, args, "dp=2")
    compare(plan, args, PROGRAMS[program])
    assert plan.inputs[0].dims[0] == ("dp",)


@pytest.mark.parametrize("exchange", ["gather", "exact", *slow("all_to_all")])
def test_a_bias_by_expert_is_not_sent(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads its own experts' rows of it; its gradient is summed over ``dp``."""
    monkeypatch.setenv("FXPAR_EXPERT_EXCHANGE", exchange)
    if exchange == "all_to_all":
        monkeypatch.setenv("FXPAR_EXPERT_ROOM", "4")

    def program(x: Any, scores: Any, up: Any, down: Any, *bias: Any) -> torch.Tensor:
        ids, weights = chosen(scores)
        key, order = torch.sort(ids)
        ends = ends_of(key, up.shape[0])
        rows = grouped(x[order // 2], up, ends)
        for each in bias:
            rows = rows + each[key]
        rows = grouped(torch.relu(rows), down, ends) * weights[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, rows)

    bias = torch.randn(EXPERTS, 12, dtype=torch.float64, requires_grad=True)
    sent = []
    for more in ([], [bias]):
        args = [*arguments(), *more]
        plan = planned(program, args, "dp=2,ep=2")
        got, want = plan.simulate(*args), plan.reference(*args)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        sent.append(Counter((c.kind, c.axes, c.bytes) for c in plan.collectives))
    assert [x[:2] for x in sent[1] - sent[0]] == [("all_reduce", ("dp",))]
    assert not sent[0] - sent[1]


def test_slots_for_tokens_that_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each microbatch rows are counted by itself, and no rank is told."""
    monkeypatch.setenv("FXPAR_EXPERT_EXCHANGE", "all_to_all")
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", "4")
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    args, whole = arguments(), (None, None)
    plan = planned(mixture, args, "ep=2", in_specs=[whole, whole, None, None])
    compare(plan, args, torch.nn.functional.silu)


def blocks(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A gate and what it gates, side by side, as Mixtral has them."""
    return rows.chunk(2, -1)


def turns(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The two column by column, as GPT-OSS has them."""
    return rows[..., ::2], rows[..., 1::2]


def turns_without_ends(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cut = torch.ops.aten.slice.Tensor
    return cut(rows, -1, None, None, 2), cut(rows, -1, 1, None, 2)


def unlike(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts that are no dim of the weight: seven columns, of which six are used."""
    gate, up = rows.split([5, 7], -1)
    return rows[..., 5:11] + gate.sum(-1, keepdim=True), up[..., :6]


def gated(parts: Any) -> tuple[Any, Any]:
    """(a program whose first weight holds a gate too, its activation)."""

    def activation(rows: torch.Tensor) -> torch.Tensor:
        gate, up = parts(rows)
        return torch.nn.functional.silu(gate) * up

    def program(
        x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        ids, weights = chosen(scores)
        key, order = torch.sort(ids)
        ends = ends_of(key, up.shape[0])
        rows = grouped(activation(grouped(x[order // 2], up, ends)), down, ends)
        rows = rows * weights[order][:, None]
        return rows[torch.argsort(order)].view(-1, 2, x.shape[1]).sum(1)

    return program, activation


def gated_arguments() -> list[torch.Tensor]:
    x, scores, up, down = arguments()
    return [x, scores, up, down[:, :6].detach().requires_grad_()]


@pytest.mark.parametrize("mesh", ["ep=2,tp=2", *slow("tp=2", "dp=2,tp=3", "ep=2")])
@pytest.mark.parametrize("parts", [blocks, turns, turns_without_ends])
def test_a_gate_and_what_it_gates_are_split_alike(parts: Any, mesh: str) -> None:
    """Inside of experts ``tp`` sums once each way; of rows nothing is gathered."""
    args = gated_arguments()
    program, activation = gated(parts)
    hints = {"down": ("ep?" if "ep" in mesh else "?", "tp?" if "tp" in mesh else "?")}
    plan = planned(program, args, mesh, hints=hints)
    compare(plan, args, activation)
    made = ops(plan.result.normalized)  # type: ignore[union-attr]
    assert not made["aten.split.Tensor"] and not made["aten.slice.Tensor"]
    if "tp" in mesh:
        sent = [(c.kind, c.bytes) for c in plan.collectives if "tp" in c.axes]
        held = EXPERTS // (2 if "ep" in mesh else 1) * WIDTH * 12 * 8
        assert [kind for kind, _ in sent].count("all_reduce") == 2
        # The gradient of a weight that lies whole: of blocks no rank has one.
        gathered = [("all_gather", held)] if parts is blocks else []
        assert [x for x in sent if x[0] != "all_reduce"] == gathered
    assert ops(plan.result.local)["aten.sort.stable"] == 1  # type: ignore[union-attr]


def test_parts_that_are_no_dim_of_the_weight_stay() -> None:
    args = gated_arguments()
    program, activation = gated(unlike)
    plan = planned(program, args, "ep=2,tp=2")
    compare(plan, args, activation)
    made = ops(plan.result.normalized)  # type: ignore[union-attr]
    assert made["aten.split_with_sizes.default"] and not made["aten.select.int"]


def test_rows_stay_sorted_between_products() -> None:
    made = ops(planned(mixture, arguments(), "ep=2").result.local)  # type: ignore
    assert made["aten.sort.stable"] == 1
    # The tokens and their gradients into order, and both out of it.
    assert made["aten.index.Tensor"] <= 5


def scanned(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
):
    """As ``mixture``; each row is added to those before it in order."""
    ids, _ = chosen(scores)
    key, order = torch.sort(ids)
    rows = grouped(x[order // 2], up, ends_of(key, up.shape[0]))
    return grouped(rows, down, ends_of(key, up.shape[0])).cumsum(0)


def of_another(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As ``mixture``, with the ends of groups that were not sorted by."""
    ids, _ = chosen(scores)
    _, order = torch.sort(ids)
    ends = ends_of(ids.view(-1, 2).flip(0)[:, :1].reshape(-1), up.shape[0])
    return grouped(grouped(x[order // 2], up, ends), down, ends)


def backwards(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As ``mixture``, the last expert first: groups are not those that are counted."""
    ids, _ = chosen(scores)
    key, order = torch.sort(ids, descending=True)
    ends = ends_of(key, up.shape[0])
    return grouped(grouped(x[order // 2], up, ends), down, ends)


def negative(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As ``mixture``; some rows may come before those of the first expert."""
    ids = (scores * 8).long().flatten() - 1
    key, order = torch.sort(ids)
    ends = ends_of(key, up.shape[0])
    rows = grouped(grouped(x[order // 4], up, ends), down, ends)
    return torch.zeros_like(x).index_add(0, order // 4, rows)


@pytest.mark.parametrize("program", [scanned, of_another, *slow(backwards, negative)])
def test_what_needs_the_order_keeps_it(program: Any) -> None:
    args = arguments()
    plan = planned(program, args, "ep=2")
    made = ops(plan.result.normalized)  # type: ignore[union-attr]
    assert made["aten.sort.default"] + made["aten.sort.stable"] == 1
    assert not made["fxpar.expert_mm.default"]
    assert ("cumsum" in str(plan.notes)) == (program is scanned)
    result, gradients = plan.simulate(*args)
    want = program(*args)
    torch.testing.assert_close(result, want)
    grads = torch.autograd.grad(want.sum(), [args[0], *args[2:]])
    got = [gradients[name] for name in ("x", "up", "down")]
    torch.testing.assert_close(got, list(grads))


@pytest.mark.parametrize("case", ["one has all", *slow("one has none", "uneven")])
def test_any_counts(case: str) -> None:
    args = arguments()
    with torch.no_grad():
        if case == "one has all":
            args[1][:, 0] += 4.0
            args[1][:, 3] += 2.0
        elif case == "one has none":
            args[1][:, 1] = 0.0
        else:
            args[1][:5, 2:] += 4.0
    compare(planned(mixture, args, "dp=2,ep=2"), args, torch.nn.functional.silu)


def rows_in_order(plan: TracedPlan) -> set[int]:
    """How many rows the products of a rank read."""
    nodes = plan.result.local.nodes  # type: ignore[union-attr]
    products = [n for n in nodes if "grouped_mm" in str(n.target)]
    return {n.args[0].meta["val"].shape[0] for n in products}


def test_room_for_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory, the same numbers, or an error that names the line."""
    args = arguments()
    assert rows_in_order(planned(mixture, args, "ep=2")) == {2 * TOKENS}
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", "1.5")
    plan = planned(mixture, args, "ep=2")
    assert rows_in_order(plan) == {3 * TOKENS // 2}
    assert ops(plan.result.local)["aten.sort.stable"] == 1  # type: ignore[union-attr]
    compare(plan, args, torch.nn.functional.silu)
    with torch.no_grad():
        args[1][:, :2] += 4.0  # both of them experts of the first rank
    with pytest.raises(RoomError, match="32 rows.*room for 24") as raised:
        plan.simulate(*args)
    assert "test_experts.py" in str(raised.value)


def test_ranks_tell_each_other_of_rows_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Along ``ep`` all see the same rows; along ``dp`` one number says how many."""
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", "1.5")
    args = arguments()
    for mesh, told in (("ep=2", []), ("dp=2,ep=2", [("dp",)])):
        plan = planned(mixture, args, mesh)
        sent = [c for c in plan.collectives if c.kind == "all_reduce" and c.bytes == 8]
        assert [c.axes for c in sent] == told


def exchanged(fn: Any, args: list[torch.Tensor], mesh: str, **more: Any) -> TracedPlan:
    """A plan in which rows are sent to the ranks of their experts."""
    options = {"expert_exchange": "all_to_all", **more}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(f"FXPAR_{name.upper()}", str(value))
        return planned(fn, args, mesh)


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", *slow("ep=2", "ep=4", "ep=2,tp=2")])
@pytest.mark.parametrize("program", [mixture, *slow(added, lifted)])
def test_rows_are_sent_to_their_experts(program: Any, mesh: str) -> None:
    """Nothing but rows in slots crosses ``ep``, the same numbers come of it."""
    args = arguments()
    plan = exchanged(program, args, mesh, expert_room=2)
    act = torch.nn.functional.silu if program is mixture else torch.relu
    compare(plan, args, act, 1.0 if program is lifted else 0.0)
    sent = [c for c in plan.collectives if "ep" in c.axes]
    told = [c for c in sent if c.kind == "all_reduce"]
    assert {c.kind for c in sent} == {"all_to_all", "all_reduce"}
    assert [c.bytes for c in told] == [8]
    # Two rows of a token, as many slots as that twice, forward and backward.
    held = TOKENS // plan.mesh.count(plan.inputs[0].dims[0])
    slots = [c.bytes for c in sent if c.bytes == 2 * 2 * held * WIDTH * 8]
    assert len(slots) == 4
    assert ops(plan.result.local)["aten.sort.stable"] == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("exchange", ["all_to_all", "exact", "gather"])
def test_rows_of_native_products_are_sent(exchange: str) -> None:
    """Gradients of their weights are products of rows that are transposed before."""

    def native(
        x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        ids, weights = chosen(scores)
        key, order = torch.sort(ids)
        ends = ends_of(key, up.shape[0])
        rows = torch._grouped_mm(x[order // 2], up, offs=ends).relu()
        rows = torch._grouped_mm(rows, down, offs=ends) * weights[order][:, None]
        return rows[torch.argsort(order)].view(-1, 2, x.shape[1]).sum(1)

    torch.manual_seed(0)
    shapes = (TOKENS, 16), (TOKENS, EXPERTS), (EXPERTS, 16, 24), (EXPERTS, 24, 16)
    args = [torch.randn(n).bfloat16() for n in shapes]
    args[1] = args[1].softmax(-1)
    args = [x.requires_grad_() for x in args]
    plan = exchanged(native, args, "dp=2,ep=2", expert_exchange=exchange)
    assert not [note for note in plan.notes if "sorted" in note]
    kind = "all_gather" if exchange == "gather" else "all_to_all"
    assert kind in {c.kind for c in plan.collectives if "ep" in c.axes}
    got, want = plan.outcome(*args), plan.reference_outcome(*args)
    torch.testing.assert_close(got.result, want.result, rtol=0.03, atol=0.1)
    for name, gradient in want.gradients.items():
        off = (got.gradients[name] - gradient).norm() / gradient.norm()
        assert off < 0.02, name
        # Experts that were taken for others would show.
        assert (gradient.roll(1, 0) - gradient).norm() / gradient.norm() > 0.2


@pytest.mark.parametrize("case", ["one has none", *slow("one has all", "uneven")])
def test_any_counts_are_sent(case: str) -> None:
    """With slots for all rows nothing overflows, whatever is chosen."""
    args = arguments()
    with torch.no_grad():
        if case == "one has all":
            args[1][:, 0] += 4.0
            args[1][:, 1] += 2.0
        elif case == "one has none":
            args[1][:, :2] = 0.0
        else:
            args[1][:5, 2:] += 4.0
    compare(exchanged(mixture, args, "dp=2,ep=2"), args, torch.nn.functional.silu)


def test_slots_that_do_not_suffice() -> None:
    """Also where one rank alone sends too many rows."""
    args = arguments()
    with torch.no_grad():
        args[1][:] = torch.tensor([0.4, 0.1, 0.4, 0.1])
        args[1][:4] = torch.tensor([0.4, 0.4, 0.1, 0.1])
    plan = exchanged(mixture, args, "dp=2,ep=2", expert_room=1.5)
    with pytest.raises(RoomError, match="8 rows.*room for 6") as raised:
        plan.simulate(*args)
    assert "test_experts.py" in str(raised.value)
    plan = exchanged(mixture, args, "dp=2,ep=2", expert_room=2)
    compare(plan, args, torch.nn.functional.silu)


EXACT = {"expert_exchange": "exact"}


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", *slow("ep=2", "ep=4", "ep=2,tp=2")])
@pytest.mark.parametrize("program", [mixture, *slow(added, lifted)])
def test_rows_are_sent_by_exact_numbers(program: Any, mesh: str) -> None:
    """Two rows of a token, forward and backward and back; and numbers of experts."""
    args = arguments()
    plan = exchanged(program, args, mesh, **EXACT)
    act = torch.nn.functional.silu if program is mixture else torch.relu
    compare(plan, args, act, 1.0 if program is lifted else 0.0)
    made = ops(plan.result.local)  # type: ignore[union-attr]
    assert made["fxpar.send_rows.default"] == made["fxpar.return_rows.default"] == 2
    assert made["_c10d_functional.all_to_all_single.default"] == 1
    held = TOKENS // plan.mesh.count(plan.inputs[0].dims[0])
    sent = [c for c in plan.collectives if c.kind == "all_to_all"]
    assert [c.bytes for c in sent].count(2 * held * WIDTH * 8) == 4
    assert {c.axes for c in sent} == {("ep",)}


def test_rows_of_bfloat16_are_sent_as_often() -> None:
    """ATen's backward reads rows transposed for the gradient of a weight."""

    def program(x: Any, scores: Any, up: Any) -> Any:
        ids, weights = chosen(scores)
        key, order = torch.sort(ids)
        ends = ends_of(key, up.shape[0])
        rows = torch.nn.functional.grouped_mm(x[order // 2], up, offs=ends)
        place = torch.argsort(order)
        rows = (rows * weights[order][:, None])[place]
        return rows.view(-1, 2, x.shape[1]).sum(1)

    x, scores, *_ = arguments()
    up = torch.randn(EXPERTS, WIDTH, WIDTH, requires_grad=True)
    args = [t.detach().bfloat16().requires_grad_() for t in (x, scores, up)]
    plan = exchanged(program, args, "ep=2", **EXACT)
    made = ops(plan.result.local)  # type: ignore[union-attr]
    assert made["fxpar.send_rows.default"] == made["fxpar.return_rows.default"] == 2


def test_a_schedule_is_chosen_around_exact_numbers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxparWarning)
        plan = exchanged(mixture, arguments(), "dp=2,ep=2", schedule="auto", **EXACT)
    compare(plan, arguments(), torch.nn.functional.silu)


def test_exchanges_of_rows_keep_their_order() -> None:
    graph = exchanged(mixture, arguments(), "ep=2", **EXACT).result.local  # type: ignore[union-attr]
    counts = node_legality.number(graph)
    node_legality.check(graph, "reorder", counts)
    assert counts["exchange"] == 4
    first, second = graph.find_nodes(
        op="call_function", target=torch.ops.fxpar.send_rows.default
    )
    numbers = [node.meta["fxpar_order"] for node in (first, second)]
    first.meta["fxpar_order"], second.meta["fxpar_order"] = reversed(numbers)
    with pytest.raises(ScheduleError, match="would send rows in another order"):
        node_legality.check(graph, "reorder", counts)


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", *slow("ep=4")])
@pytest.mark.parametrize("case", ["one has all", *slow("one has none", "uneven")])
def test_any_exact_numbers(case: str, mesh: str) -> None:
    args = arguments()
    with torch.no_grad():
        if case == "one has all":
            args[1][:, 0] += 4.0
            args[1][:, 1] += 2.0
        elif case == "one has none":
            args[1][:, :2] = 0.0
        else:
            args[1][:5, 2:] += 4.0
    compare(exchanged(mixture, args, mesh, **EXACT), args, torch.nn.functional.silu)


def test_weights_of_rows_stay_with_their_tokens() -> None:
    """What is made for no product is made where the token is: rows come back first."""
    plan = exchanged(mixture, arguments(), "ep=2", expert_exchange="all_to_all")
    sent = [c.bytes for c in plan.collectives if c.kind == "all_to_all"]
    assert len(sent) == 5  # ids, tokens and results, their gradients


def test_gradients_lie_as_weights_do() -> None:
    """An optimizer reads both: those of weights that are read transposed, too."""

    def program(x: Any, scores: Any, up: Any, down: Any) -> Any:
        return mixture(x, scores, up.mT, down.mT)

    x, scores, up, down = arguments()
    weights = [w.detach().mT.contiguous().requires_grad_() for w in (up, down)]
    for fn, args in ((program, [x, scores, *weights]), (mixture, arguments())):
        plan = planned(fn, args, "ep=2")
        results = plan.result.local.output_node().args[0]  # type: ignore[union-attr]
        assert all(r.meta["val"].is_contiguous() for r in results[-2:])
        got, want = plan.simulate(*args), plan.reference(*args)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "tokens, room, kinds",
    [
        (1 << 16, "1.2", {"all_to_all", "all_reduce"}),  # 2.4 rows for 4 tokens
        pytest.param(
            *(1 << 16, "2.4", {"all_gather", "reduce_scatter"}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(1 << 16, "", {"all_gather", "reduce_scatter"}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(30, "1.2", {"all_gather", "reduce_scatter"}), marks=pytest.mark.slow
        ),  # no parts alike
    ],
)
def test_what_takes_less_time_is_taken(
    tokens: int, room: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", room)
    plan = planned(mixture, arguments(tokens=tokens), "ep=4")
    sent = {c.kind for c in plan.collectives if c.axes == ("ep",)}
    assert kinds <= sent and not {"all_to_all", "all_gather"} <= sent


def shared_last(x, scores, up, down, wide, narrow):
    return mixture(x, scores, up, down) + torch.relu(x @ wide) @ narrow


def shared_first(x, scores, up, down, wide, narrow):
    both = torch.relu(x @ wide) @ narrow
    return both + mixture(x, scores, up, down)


# What is sent while experts that all tokens have run.
BESIDE = [
    (shared_last, "gather", "reduce_scatter_tensor"),
    (shared_first, "gather", "all_gather_into_tensor"),
]


@pytest.mark.parametrize("program, exchange, sent", BESIDE)
def test_tokens_travel_beside_shared_experts(
    program: Any, exchange: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order in which the forward runs, without a schedule."""
    monkeypatch.setenv("FXPAR_EXPERT_EXCHANGE", exchange)
    args = arguments(tokens=64)
    shapes = (WIDTH, 32), (32, WIDTH)
    args += [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    plan = planned(program, args, "ep=2")
    names = [str(node.target) for node in as_run(plan.result.local).nodes]
    products = [i for i, name in enumerate(names) if name == "aten.mm.default"][:2]
    travels = ("all_gather", "reduce_scatter", "wait")
    before = [n for n in names[: products[0]] if any(x in n for x in travels)]
    assert sent in before[-1]
    assert not any("wait" in name for name in names[products[0] : products[1]])
    torch.testing.assert_close(plan.simulate(*args), plan.reference(*args))


def test_room_without_groups_is_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", "1")
    args = arguments()
    plan = planned(mixture, args, "dp=2")
    assert rows_in_order(plan) == {TOKENS}
    compare(plan, args, torch.nn.functional.silu)


@pytest.mark.parametrize("value", ["0.5", "all", "inf"])
def test_room_that_cannot_be(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPAR_EXPERT_ROOM", value)
    with pytest.raises(OptionError, match="from 1 on"):
        planned(mixture, arguments(), "ep=2")


def test_experts_that_the_axis_does_not_divide() -> None:
    args = arguments(experts=6)
    plan = planned(mixture, args, "ep=4")
    assert "6 experts are not split over ep (4 ranks)" in str(plan.notes)
    assert plan.inputs[2].dims[0] == ()
    compare(plan, args, torch.nn.functional.silu)


@pytest.mark.slow
def test_a_hint_keeps_experts_whole() -> None:
    args = arguments()
    hints = {"up": (None, None, None), "down": (None, None, None)}
    plan = planned(mixture, args, "ep=2", hints=hints)
    assert plan.inputs[2].is_whole
    compare(plan, args, torch.nn.functional.silu)


def test_a_hint_may_name_the_axis() -> None:
    """As the convention: rows go to their experts."""
    args = arguments()
    hints = {"up": ("ep", None, None)}
    plan = planned(mixture, args, "ep=2", hints=hints)
    assert plan.inputs[2].dims[0] == plan.inputs[3].dims[0] == ("ep",)
    compare(plan, args, torch.nn.functional.silu)
    assert all(c.bytes <= TOKENS * WIDTH * 8 for c in plan.collectives)


def in_parts(mesh: str) -> TracedPlan:
    """A mixture whose batch is cut in two; its numbers are right."""
    args = arguments()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXPAR_MICROBATCHES", "2")
        plan = planned(mixture, args, mesh)
    compare(plan, args, torch.nn.functional.silu)
    return plan


def products_in_order(plan: TracedPlan) -> list[int | None]:
    """The part of the batch of each product by expert, in the order of the program."""
    nodes = plan.result.local.nodes  # type: ignore[union-attr]
    return [n.meta.get(PART) for n in nodes if "grouped_" in str(n.target)]


@pytest.mark.parametrize("mesh", ["dp=2", *slow("tp=2")])
def test_microbatches_run_apart(mesh: str) -> None:
    """Rows of one are sorted and multiplied, forward and backward, before the next."""
    plan = in_parts(mesh)
    assert products_in_order(plan) == [0] * 6 + [1] * 6
    assert ops(plan.result.local)["aten.sort.stable"] == 2  # type: ignore[union-attr]
    assert "2 microbatches" in str(plan.notes) and "wait" not in str(plan.notes)


def squared(*args: torch.Tensor) -> torch.Tensor:
    """A loss of what a mixture gives."""
    return mixture(*args).square().sum()


def numbered(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """A loss in which rows know their numbers while they are with their experts."""
    ids, weights = chosen(scores)
    key, order = torch.sort(ids)
    ends = ends_of(key, up.shape[0])
    rows = torch.relu(grouped(x[order // 2], up, ends)) + order[:, None]
    rows = grouped(rows, down, ends) * weights[order][:, None]
    return rows[torch.argsort(order)].view(-1, 2, x.shape[1]).sum(1).square().sum()


def loss_in_parts(program: Any, mesh: str, **options: Any) -> TracedPlan:
    """A loss of a batch that is cut in two; its numbers are those of the graph."""
    args = arguments()
    plan = exchanged(program, args, mesh, microbatches=2, **options)
    got, want = plan.simulate(*args), plan.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    return plan


WAYS = [("gather", ""), ("gather", "1.75"), ("all_to_all", "1.75"), ("exact", "")]


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", *slow("ep=2", "ep=2,tp=2")])
@pytest.mark.parametrize(("exchange", "room"), WAYS)
def test_microbatches_run_apart_between_ranks(
    mesh: str, exchange: str, room: str
) -> None:
    """Rows that other ranks have come part by part, as no place among them counts."""
    options = {"expert_exchange": exchange, "expert_room": room}
    plan = loss_in_parts(squared, mesh, **options)
    assert products_in_order(plan) == [0] * 6 + [1] * 6
    assert "2 microbatches" in str(plan.notes) and "wait" not in str(plan.notes)
    sent = Counter(c.kind for c in plan.collectives if c.axes == ("ep",))
    assert sent["all_gather" if exchange == "gather" else "all_to_all"] % 2 == 0


def test_microbatches_wait_where_rows_know_their_numbers() -> None:
    plan = loss_in_parts(numbered, "ep=2", expert_exchange="gather")
    assert "wait for one another" in str(plan.notes)


def test_microbatches_wait_where_all_ranks_keep_the_rows() -> None:
    plan = in_parts("ep=2")
    assert "wait for one another" in str(plan.notes)


@pytest.mark.slow
def test_stages_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches wait for one another at the loss alone, as of a dense model."""
    monkeypatch.setenv("FXPAR_MICROBATCHES", "2")
    with double():
        model, batch = build_double("mixtral/2")
        plan = fxpar.plan(model, mesh="pp=2", mode="propagate", grad=True, **batch)
        got = plan.outcome(**batch)
        model.model.set_experts_implementation("eager")
        loss = model(**batch)
        loss.backward()
    assert "wait for one another at 1 ops" in str(plan.notes)
    torch.testing.assert_close(got.result, loss.detach(), rtol=1e-10, atol=0.0)
    for key, p in model.named_parameters():
        torch.testing.assert_close(got.gradients[key], p.grad, rtol=1e-8, atol=1e-10)


MESHES = ["ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "dp=2"]


@pytest.mark.parametrize("mesh", slow(*MESHES))
@pytest.mark.parametrize("name", MIXTURES)
def test_models_of_hugging_face(name: str, mesh: str) -> None:
    with double():
        model, batch = build_double(name)
        plan = fxpar.plan(model, mesh=mesh, mode="propagate", grad=True, **batch)
        assert plan.unknown == ()
        got = plan.outcome(**batch)
        model.model.set_experts_implementation("eager")
        loss = model(**batch)
        loss.backward()
    torch.testing.assert_close(got.result, loss.detach(), rtol=1e-10, atol=0.0)
    for key, p in model.named_parameters():
        torch.testing.assert_close(got.gradients[key], p.grad, rtol=1e-8, atol=1e-10)
        if "experts" in key and "ep" in mesh:
            assert plan.spec(key).dims[0] == ("ep",)
    sent = [c for c in plan.collectives if c.axes == ("ep",)]
    tokens = batch["input_ids"].numel() * 32 * 8
    assert all(c.bytes <= tokens for c in sent if c.kind != "all_reduce")


def test_kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has a kernel for groups it gives what a loop over them gives, and
    zero for rows of no group."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 16).bfloat16(), torch.randn(24, 8).bfloat16()
    weight = torch.randn(3, 8, 16).bfloat16().mT
    ends = torch.tensor([5, 5, 17], dtype=torch.int32)
    calls = [
        lambda: torch.ops.fxpar.grouped_mm(x, weight, ends, 17),
        lambda: torch.ops.fxpar.grouped_outer(x, y, ends, 17),
    ]
    by_loop = [call() for call in calls]
    monkeypatch.setattr(expert_ops, "_has_torch_kernel", lambda *_: True)
    by_kernel = [call() for call in calls]
    torch.testing.assert_close(by_kernel, by_loop)
    assert not by_kernel[0][17:].any() and by_kernel[0][:17].any()
