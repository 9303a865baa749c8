"""AccPar (Song et al., HPCA 2020) as problems of fxpar's solver: how much less is
communicated than by data parallelism, and what unlike devices gain.

    python benchmarks/accpar.py [--json PATH]

Each layer is a node with three strategies a level, as AccPar has them: type I splits
the batch, II the inner, III the outer dim of the weight. What a type sums up is a
cost of the node, what neighbours reshard a table of an edge, in elements that one of
two parties fetches. A mesh of 2^7 is solved level by level, each level on
the halves of the one before, as AccPar does (``recursive``), or all levels at once
(``jointly``), which AccPar does not. Layer shapes, ResNet's without its projections,
are those of AccPar's published code.

Unlike devices: a group of TPU v2 and one of v3 as a further axis on top, with one ratio
for all layers. Figures are data sheets', so speed-ups are this model's, not measured.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import _common
import numpy as np

from fxpar.sharding.cost.hardware_table import Hardware, lookup
from fxpar.sharding.solver import Edge, Problem, evaluate, solve

LEVELS, BATCH = 7, 512

# What a party with share a fetches of the tensor between two layers, by their types,
# as a multiple of its elements (AccPar's table; a tensor and its error are alike): the
# other's part, 1 - a, of one of them, or what lies crosswise, a * (1 - a), of both.
_OTHER = np.array([[0, 0, 1], [1, 1, 0], [0, 0, 1]])
_CROSS = np.array([[0, 2, 0], [0, 0, 0], [2, 0, 0]])


@dataclass(frozen=True)
class Layer:
    """One layer, or one party's part of it. ``inner``, ``outer``: channels in and out;
    ``taps``: of its kernel; ``before``, ``after``: pixels of its images."""

    name: str
    inner: float
    outer: float
    taps: int = 1
    before: int = 1
    after: int = 1
    batch: float = BATCH

    @property
    def summed(self) -> tuple[float, float, float]:
        """Elements of what each type leaves partial: weight, output, input error."""
        return (
            self.inner * self.outer * self.taps,
            self.batch * self.outer * self.after,
            self.batch * self.inner * self.before,
        )

    @property
    def flops(self) -> float:
        """Of the forward and both halves of the backward."""
        return 6.0 * self.batch * self.inner * self.outer * self.taps * self.after

    def part(self, kind: int, share: float = 0.5) -> Layer:
        """What a party with a share has of it under a type."""
        name = ("batch", "inner", "outer")[kind]
        return replace(self, **{name: getattr(self, name) * share})


@dataclass(frozen=True)
class Network:
    """Layers one after the other; ``shortcuts``: (first, last) layer of a block whose
    input is added to what the last one reads."""

    layers: tuple[Layer, ...]
    shortcuts: tuple[tuple[int, int], ...] = ()


def _linear(*widths: int) -> list[Layer]:
    pairs = itertools.pairwise(widths)
    return [Layer(f"fc{i + 1}", a, b) for i, (a, b) in enumerate(pairs)]


def _conv(i: int, ins: int, outs: int, kernel: int, before: int, after: int) -> Layer:
    return Layer(f"conv{i + 1}", ins, outs, kernel**2, before**2, after**2)


# Of each convolution: channels in and out, kernel, side of its images before and after.
_ALEXNET = (
    (3, 96, 11, 224, 55),
    (96, 256, 5, 55, 27),
    (256, 384, 3, 27, 13),
    (384, 384, 3, 13, 13),
    (384, 256, 3, 13, 6),
)
_VGG11 = (
    (3, 64, 3, 224, 112),
    (64, 128, 3, 112, 56),
    (128, 256, 3, 56, 56),
    (256, 256, 3, 56, 28),
    (256, 512, 3, 28, 28),
    (512, 512, 3, 28, 14),
    (512, 512, 3, 14, 14),
    (512, 512, 3, 14, 7),
)


def _plain(convolutions: Sequence[Sequence[int]], flat: int) -> Network:
    layers = [_conv(i, *shape) for i, shape in enumerate(convolutions)]
    return Network((*layers, *_linear(flat, 4096, 4096, 1000)))


def _resnet(blocks: Sequence[int], deep: bool) -> Network:
    found = [(3, 64, 7, 224, 56)]
    for repeat, width, side in zip(
        blocks, (64, 128, 256, 512), (56, 28, 14, 7), strict=True
    ):
        block = [(width, width, 3, side, side)] * 2
        if deep:
            middle = (width, width, 3, side, side)
            ends = ((width, n * width, 1, side, side) for n in (1, 4))
            block = [next(ends), middle, next(ends)]
        found += block * repeat
    layers = [_conv(i, *shape) for i, shape in enumerate(found)] + _linear(2048, 1000)
    step = 3 if deep else 2
    last = len(layers) - step
    return Network(tuple(layers), tuple((i, i + step) for i in range(1, last, step)))


NETWORKS = {
    "alexnet": _plain(_ALEXNET, 9216),
    "vgg11": _plain(_VGG11, 25088),
    "resnet18": _resnet((2, 2, 2, 2), False),
    "resnet34": _resnet((3, 4, 6, 3), False),
    "resnet50": _resnet((3, 4, 6, 3), True),
}


DATA, INNER, OUTER = 0, 1, 2
Choice = tuple[int, ...]


def problem_of(
    network: Network,
    layers: Sequence[Layer],
    *,
    share: float = 0.5,
    shortcuts: bool = False,
) -> Problem:
    """One level: what the party with a share fetches, in elements."""
    costs = tuple(np.array(layer.summed) for layer in layers)
    moved = _OTHER * (1 - share) + _CROSS * share * (1 - share)
    pairs = list(itertools.pairwise(range(len(layers))))
    pairs += network.shortcuts if shortcuts else ()
    tables = tuple(moved * layers[j].summed[OUTER] for _, j in pairs)
    edges = tuple(Edge(i, j, t) for t, (i, j) in enumerate(pairs))
    return Problem(costs, edges, tables)


def best(problem: Problem, kinds: Sequence[int]) -> Choice:
    """The best choice among these types. Of equally good ones that with the lowest
    type of the last layer, then of the one before: later levels depend on it, and so
    AccPar's dynamic program takes them."""
    costs = tuple(
        np.where(np.isin(range(3), kinds), cost, np.inf) for cost in problem.costs
    )
    problem = replace(problem, costs=costs)
    found = solve(problem)
    fixed: dict[int, int] = {}
    for i in reversed(range(len(costs))):
        for kind in kinds[: kinds.index(found.choice[i])]:
            other = solve(problem, fixed={**fixed, i: kind})
            if other.cost <= found.cost * (1 + 1e-12):
                found = other
                break
        fixed[i] = found.choice[i]
    return found.choice


def _one_weird_trick(layers: Sequence[Layer]) -> Choice:
    return tuple(INNER if x.name.startswith("fc") else DATA for x in layers)


# How each method chooses the types of a level.
METHODS = {
    "data parallel": lambda problem, layers: (DATA,) * len(layers),
    "one weird trick": lambda problem, layers: _one_weird_trick(layers),
    "hypar": lambda problem, layers: best(problem, (DATA, INNER)),
    "accpar": lambda problem, layers: best(problem, (DATA, INNER, OUTER)),
}


def recursive(
    network: Network,
    method: str,
    *,
    layers: Sequence[Layer] | None = None,
    shortcuts: bool = False,
    levels: int = LEVELS,
) -> float:
    """Elements fetched on a device's way through all levels, each solved on the halves
    of the one before."""
    layers = network.layers if layers is None else layers
    total = 0.0
    for _ in range(levels):
        problem = problem_of(network, layers, shortcuts=shortcuts)
        kinds = METHODS[method](problem, layers)
        total += evaluate(problem, kinds)[0]
        layers = [x.part(kind) for x, kind in zip(layers, kinds, strict=True)]
    return total


def jointly(network: Network, levels: int) -> float:
    """As ``recursive`` by "accpar", with all levels in one problem: a strategy of a
    layer is its type on each of them."""
    ways = list(itertools.product(range(3), repeat=levels))
    costs = [np.zeros(len(ways)) for _ in network.layers]
    tables = [np.zeros((len(ways),) * 2) for _ in network.layers[1:]]
    moved = (_OTHER + _CROSS / 2) / 2
    for level in range(levels):
        kinds = np.array([way[level] for way in ways])
        between = moved[np.ix_(kinds, kinds)]
        for i, layer in enumerate(network.layers):
            parts = []
            for way in ways:
                part = layer
                for kind in way[:level]:
                    part = part.part(kind)
                parts.append(part.summed)
            summed = np.array(parts)
            costs[i] += summed[np.arange(len(ways)), kinds]
            if i:
                tables[i - 1] += between * summed[:, OUTER]
    edges = tuple(Edge(i, i + 1, i) for i in range(len(tables)))
    return solve(Problem(tuple(costs), edges, tuple(tables)), seconds=60).cost


@dataclass(frozen=True)
class Group:
    """Devices alike: how many, flops/s and bytes/s of each. Elements are bfloat16."""

    count: int
    flops: float
    bandwidth: float

    def seconds(self, elements: float, flops: float) -> float:
        """Of a step: fetching, then computing."""
        return 2 * elements / self.bandwidth + flops / (self.count * self.flops)


Pair = tuple[Group, Group]


def _slower(one: Problem, other: Problem, groups: Pair) -> Problem:
    """What the party that takes longer takes, in seconds, cost by cost."""

    def longest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.maximum(a / groups[0].bandwidth, b / groups[1].bandwidth)

    costs = tuple(map(longest, one.costs, other.costs))
    return replace(
        one, costs=costs, tables=tuple(map(longest, one.tables, other.tables))
    )


def unlike(
    network: Network, method: str, groups: Pair, share: float
) -> tuple[float, float]:
    """Seconds of a step of two groups, the first with a share of every layer."""
    parts = (share, 1 - share)
    one, other = (problem_of(network, network.layers, share=part) for part in parts)
    kinds = METHODS[method](_slower(one, other, groups), network.layers)
    out = []
    for group, problem, part in zip(groups, (one, other), parts, strict=True):
        layers = [x.part(k, part) for x, k in zip(network.layers, kinds, strict=True)]
        levels = int(math.log2(group.count))
        fetched = evaluate(problem, kinds)[0]
        fetched += recursive(network, method, layers=layers, levels=levels)
        out.append(group.seconds(fetched, sum(x.flops for x in layers)))
    return out[0], out[1]


def balanced(
    network: Network, method: str, groups: Pair, rounds: int = 8
) -> tuple[float, float]:
    """(the first group's share, seconds) with which both finish together, as near as
    types let them: by bisection, and never above equal shares."""
    low, high = 0.0, 1.0
    found = max(unlike(network, method, groups, 0.5)), 0.5
    for _ in range(rounds):
        share = (low + high) / 2
        first, second = unlike(network, method, groups, share)
        found = min(found, (max(first, second), share))
        low, high = (share, high) if first < second else (low, share)
    return found[1], found[0]


# DP / method as AccPar's published code counts it, run at commit 51515db; of ResNets
# its search adds shortcuts greedily, and its count leaves them out.
PUBLISHED = {
    "alexnet": (6.42, 7.27, 9.20),
    "vgg11": (8.13, 8.83, 9.92),
    "resnet18": (1.11, 1.38, 1.50),
    "resnet34": (1.06, 1.27, 1.38),
    "resnet50": (1.08, 1.20, 1.26),
}
# Levels at which all of them still make a small problem together.
JOINT = 5
# The paper's averages over its networks (AlexNet, VGGs, ResNets) on 128 + 128 boards,
# as remembered: the paper was not at hand.
REMEMBERED = {"one weird trick": 2.98, "hypar": 3.78, "accpar": 6.30}


def alike_row(name: str) -> dict[str, Any]:
    """Communication on 2^7 devices alike: elements, and DP over each method."""
    network = NETWORKS[name]
    elements = {m: recursive(network, m) for m in METHODS}
    base = elements["data parallel"]
    own = recursive(network, "accpar", shortcuts=True)
    return {
        "network": name,
        "elements": elements,
        "ratio": {m: base / n for m, n in elements.items()},
        "published": dict(zip(list(METHODS)[1:], PUBLISHED[name], strict=True)),
        "accpar_with_shortcuts": base / own,
        f"recursive_over_joint_{JOINT}_levels": recursive(
            network, "accpar", levels=JOINT
        )
        / jointly(network, JOINT),
    }


def unlike_row(name: str, groups: Pair) -> dict[str, Any]:
    """Speed-ups over data parallelism with equal shards on two unlike groups."""
    network = NETWORKS[name]
    even = {m: max(unlike(network, m, groups, 0.5)) for m in METHODS}
    base = even["data parallel"]
    share, seconds = balanced(network, "accpar", groups)
    return {
        "network": name,
        "seconds_data_parallel": base,
        "speedup_equal_shards": {m: base / t for m, t in even.items()},
        "speedup_accpar_ratio": base / seconds,
        "share_of_slower_group": share,
    }


def groups_of(bandwidths: tuple[float, float] | None = None) -> Pair:
    """128 chips of TPU v2 and 128 of v3, with the links of their pods or others."""
    found = []
    for i, name in enumerate(("tpu-v2", "tpu-v3")):
        chip: Hardware = lookup(name)
        own = chip.levels[0].bandwidth
        peak = chip.peak("bfloat16").flops
        found.append(Group(128, peak, bandwidths[i] if bandwidths else own))
    return found[0], found[1]


def ceiling(groups: Pair) -> float:
    """What balance alone gains where only computing counts."""
    rates = [group.count * group.flops for group in groups]
    return (0.5 / min(rates)) * sum(rates)


def _mean(rows: Sequence[dict[str, Any]], method: str | None) -> float:
    return float(
        np.mean(
            [
                row["speedup_equal_shards"][method]
                if method
                else row["speedup_accpar_ratio"]
                for row in rows
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where figures go")
    args = parser.parse_args()
    alike = [alike_row(name) for name in NETWORKS]
    for row in alike:
        ratios = " ".join(f"{r:6.3f}" for r in row["ratio"].values())
        shown = f"{row['network']:<9} {ratios}   published {row['published']}"
        joint = row[f"recursive_over_joint_{JOINT}_levels"]
        print(
            f"{shown}  shortcuts {row['accpar_with_shortcuts']:.3f} joint {joint:.3f}"
        )
    settings = {"links of pods": None, "1 and 2 GB/s": (1e9, 2e9)}
    mixed = {}
    for text, bandwidths in settings.items():
        groups = groups_of(bandwidths)
        rows = [unlike_row(name, groups) for name in NETWORKS]
        mean = {m: _mean(rows, m) for m in METHODS}
        mixed[text] = {"rows": rows, "mean": mean, "mean_ratio": _mean(rows, None)}
        print(f"\nTPU v2 + v3, {text}, ceiling of balance {ceiling(groups):.2f}")
        for row in rows:
            ratios = " ".join(f"{r:6.2f}" for r in row["speedup_equal_shards"].values())
            share = row["share_of_slower_group"]
            uneven = row["speedup_accpar_ratio"]
            print(f"{row['network']:<9} {ratios} | {uneven:.2f} with share {share:.3f}")
        print("mean     ", mean, mixed[text]["mean_ratio"])
    data = {
        "conditions": _common.conditions(),
        "alike": alike,
        "unlike": mixed,
        "ceiling": ceiling(groups_of()),
        "remembered": REMEMBERED,
    }
    _common.write(args.json, "accpar", data)


if __name__ == "__main__":
    main()
