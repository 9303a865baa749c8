"""Convolutions whose inner windows run while the rows around a shard come: the numbers
of the plain program, what is refused and why, and where it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpar
from fxpar.errors import ScheduleError
from fxpar.features.uneven import overlap_halo
from fxpar.passes.order.forward_backward import as_run
from tests.helpers.toys import Given, Toy

PERMUTE = torch.ops.fxpar.permute.default
CONVOLUTION = torch.ops.aten.convolution.default

# Of 4 ranks along tp: what each has of the next one, and of the one before.
NEXT, BEFORE = [1, 2, 3, 0], [3, 0, 1, 2]

BOTH = "overlap([permute, permute_1], convolution) -> whole, inner"
FRONT = "overlap(permute, convolution)"


def moved(x: torch.Tensor, sources: list[int]) -> torch.Tensor:
    return torch.ops.fxpar.permute(x.contiguous(), sources, "fxpar:tp")


def with_halo(x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    """Around the end: no row is the same as another, and none is zero."""
    front = [moved(x[:, :, -before:], BEFORE)] if before else []
    return torch.cat(
        [*front, x, *([moved(x[:, :, :behind], NEXT)] if behind else [])], 2
    )


def image(rows: int, *more: int) -> Given:
    """Of 2 images of 3 channels, split along their rows."""
    lie = ", ".join(["_", "_", "tp", *["_"] * len(more)])
    return f"[{lie}]", (2, 3, rows, *more)


def weight(*kernel: int, ins: int = 3) -> Given:
    return f"[{', '.join(['_'] * (2 + len(kernel)))}]", (6, ins, *kernel)


def toy(before: int, behind: int, x: Given, w: Given, **settings: Any) -> Toy:
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(x[1]) - 2]

    def program(x: Any, w: Any) -> Any:
        return torch.relu(convolve(with_halo(x, before, behind), w, **settings))

    return Toy(program, x, w)


# Of "one dim".
SETTINGS, ENDS = "None, [1], [0], [1], False, [0], 1", "convolution_default_1"

CASES: dict[str, tuple[Toy, str]] = {
    "3 x 3": (toy(1, 1, image(32, 5), weight(3, 3), padding=(0, 1)), BOTH),
    "one dim": (toy(1, 1, image(32), weight(3)), BOTH),
    "volume": (toy(1, 1, image(24, 4, 3), weight(3, 1, 1)), BOTH),
    "groups": (toy(1, 1, image(32, 5), weight(3, 3, ins=1), groups=3), BOTH),
    "dilated": (toy(4, 4, image(48, 5), weight(5, 1), dilation=(2, 1)), BOTH),
    "stem": (toy(3, 2, image(32, 7), weight(7, 3), stride=2), BOTH),
    "stride, before alone": (toy(1, 0, image(32, 5), weight(3, 3), stride=2), FRONT),
    "behind alone": (toy(0, 2, image(32, 5), weight(3, 3)), FRONT),
    "uneven ends": (toy(1, 3, image(32, 5), weight(5, 3)), BOTH),
    "one inner window": (toy(1, 1, image(12, 5), weight(3, 3)), BOTH),
    "ends read each other's rows": (toy(4, 4, image(40, 2), weight(9, 1)), BOTH),
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_stay(name: str) -> None:
    case, line = CASES[name]
    after = case.check(line)
    sent = after.find_nodes(op="call_function", target=PERMUTE)
    assert len(sent) == (2 if line == BOTH else 1)


def test_in_the_order_it_runs() -> None:
    """The shard's own windows, then those of both ends, along the batch."""
    case, line = CASES["one dim"]
    nodes = [text.partition(": ") for text in case.text(line).splitlines()]
    assert [(name, text.partition(" = ")[2]) for name, _, text in nodes[6:-2]] == [
        ("inner", f"aten.convolution.default(x_1, w_1, {SETTINGS})"),
        ("slice_tensor", "aten.slice.Tensor(x_1, 2, 0, 2)"),
        ("cat_default", "aten.cat.default([permute, slice_tensor], 2)"),
        ("slice_tensor_1", "aten.slice.Tensor(x_1, 2, 6, 8)"),
        ("cat_default_1", "aten.cat.default([slice_tensor_1, permute_1], 2)"),
        ("cat_default_2", "aten.cat.default([cat_default, cat_default_1], 0)"),
        (ENDS, f"aten.convolution.default(cat_default_2, w_1, {SETTINGS})"),
        ("slice_tensor_2", f"aten.slice.Tensor({ENDS}, 0, 0, 2)"),
        ("slice_tensor_3", f"aten.slice.Tensor({ENDS}, 0, 2, 4)"),
        ("whole", "aten.cat.default([slice_tensor_2, inner, slice_tensor_3], 2)"),
    ]


def test_one_direction_of_two() -> None:
    """The rows that are not named are waited for before."""
    toy(1, 1, image(32, 5), weight(3, 3)).check(FRONT)


def test_two_dims_one_after_the_other() -> None:
    def program(x: Any, w: Any) -> Any:
        x = with_halo(x, 1, 1)
        ends = [moved(x[..., -1:], BEFORE), x, moved(x[..., :1], NEXT)]
        return F.conv2d(torch.cat(ends, 3), w)

    case = Toy(program, image(32, 6), weight(3, 3))
    lines = "overlap([permute_2, permute_3], convolution) -> whole, inner\n"
    after = case.check(lines + "overlap([permute, permute_1], inner)")
    assert len(after.find_nodes(op="call_function", target=CONVOLUTION)) == 3


# What is refused


def refused(case: Toy, line: str, why: str) -> None:
    before = str(case.before)
    with pytest.raises(ScheduleError, match=why):
        case.after(line)
    assert str(case.before) == before


def joined_elsewhere(x: Any, w: Any) -> Any:
    y = moved(x[:, :, -1:], BEFORE)
    return F.conv1d(x, w) + y.sum()


def between_others(x: Any, w: Any) -> Any:
    y = moved(x[:, :, -1:], BEFORE)
    return F.conv1d(torch.cat([x, y, x], 2), w)


def along_channels(x: Any, w: Any) -> Any:
    y = moved(x[:, -1:], BEFORE)
    return F.conv1d(torch.cat([y, x[:, :2]], 1), w)


def transposed(x: Any, w: Any) -> Any:
    return F.conv_transpose1d(with_halo(x, 1, 1), w.transpose(0, 1))


def pooled(x: Any, w: Any) -> Any:
    return F.max_pool2d(with_halo(x, 1, 1)[..., None], (3, 1)), w * 1


X, W = image(32), weight(3)
PLAIN = CASES["one dim"][0]
REFUSED: dict[str, tuple[Toy, str, str]] = {
    "no join": (Toy(joined_elsewhere, X, W), FRONT, "joined with others"),
    "between": (Toy(between_others, X, W), FRONT, "between others"),
    "channels": (Toy(along_channels, X, W), FRONT, "slides over others"),
    "transposed": (Toy(transposed, X, W), BOTH, "is transposed"),
    "padded": (toy(1, 1, X, W, padding=1), BOTH, "pads the dim"),
    "no inner window": (toy(1, 1, image(8), W), BOTH, "has no window"),
    "chunks": (PLAIN, f"{FRONT[:-1]}, chunks=2)", "leave out chunks"),
    "ring": (PLAIN, f"{FRONT[:-1]}, ring=1)", "leave out chunks"),
    "no convolution": (Toy(pooled, X, W), BOTH.replace("convolution", "mul"), "gather"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    refused(*REFUSED[name])


def test_the_batch_of_both_ends_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = overlap_halo._joined

    def swapped(build: Any, parts: Any, dim: int) -> fx.Node:
        return real(build, parts if dim else parts[::-1], dim)

    monkeypatch.setattr(overlap_halo, "_joined", swapped)
    case, line = CASES["3 x 3"]
    with pytest.raises(AssertionError):
        case.check(line)


# In plans


class Net(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.first = conv(2, 3, 7, stride=2, padding=3)
        self.second = conv(3, 3, 3, padding=1, groups=3)
        self.last = conv(3, 2, 3, padding=2, dilation=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x).square().mean()


LINES = """
overlap([permute, permute_1], convolution_default)
overlap([permute_2, permute_3], convolution_default_1)
overlap([permute_4, permute_5], convolution_default_2)
"""


def planned(dims: int, grad: bool, schedule: str = "none") -> tuple[Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 32, *[8] * (dims - 1), dtype=torch.float64)
    lie = tuple("h" if d == 2 else None for d in range(dims + 2))
    options = {"mode": "propagate", "grad": grad, "in_specs": [lie]}
    model = Net(dims).double()
    return fxpar.plan(model, x, mesh="h=2", schedule=schedule, **options), x


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_plan_with_it(dims: int, grad: bool) -> None:
    plain, _ = planned(dims, grad)
    plan, x = planned(dims, grad, LINES)
    assert plan.collectives == plain.collectives, "as much is sent, in one order"
    run = as_run(plan.result.local)
    for moved in (plan, replace(plan, result=replace(plan.result, graph=run))):
        got, want = moved.outcome(x), moved.reference_outcome(x)
        torch.testing.assert_close(got.result, want.result, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
    # Of the first, which has a stride, each end has other windows.
    beside = ["permute", "permute", "convolution", "read", "convolution"]
    assert forward(run) == [*beside, "convolution", *beside, *beside]
    before = forward(as_run(plain.result.local))
    assert before == ["permute", "permute", "read", "convolution"] * 3


def forward(graph: fx.Graph) -> list[str]:
    """Of the forward: permutes, where one is read first, convolutions."""
    out: list[str] = []
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") == "is_backward":
            break
        if node.target is PERMUTE:
            out.append("permute")
        elif any(read.target is PERMUTE for read in node.all_input_nodes):
            out += ["read"] * (out[-1] != "read")
        elif node.target is CONVOLUTION:
            out.append("convolution")
    return out


# Where it is chosen


def chosen(rows: int, hardware: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are chosen for halos."""
    monkeypatch.setenv("FXPAR_HARDWARE", hardware)
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    x = torch.randn(1, 64, rows, 64)
    options = {"mode": "propagate", "in_specs": [(None, None, "h", None)]}
    plain, plan = (
        fxpar.plan(model, x, mesh="h=2", schedule=schedule, **options)
        for schedule in ("none", "auto")
    )
    lines = plan.schedule.splitlines()
    assert plan.predicted.seconds < plain.predicted.seconds or not lines
    return [line for line in lines if "convolution" in line]


def test_auto_takes_it_where_it_is_predicted_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(chosen(2048, "h100", monkeypatch)) == 2
    assert not chosen(8, "h100", monkeypatch)
