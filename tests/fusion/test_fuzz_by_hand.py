"""Random schedules of random programs written by hand, in which all verbs come up:
they change no number, and what is kept in slices is the slices."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from fxpar.errors import ScheduleError
from fxpar.fusion import apply_schedule
from fxpar.fusion.apply_schedule import Unexpected, apply, apply_stages
from fxpar.graph import collective_nodes
from fxpar.passes.simulate.emulate_collectives import scatter
from fxpar.sharding.spec import Spec
from tests.helpers.schedule_cases import pipeline, simulated
from tests.helpers.toys import (
    Toy,
    all_gather,
    all_reduce,
    dropped,
    form_of,
    reduce_scatter,
)

ALL = 2000
# Seeds whose schedules have every verb, and some more.
FIRST = (28, 29, 36, 54, *range(12))
TRIES = 20

# ``share`` is for stages, ``balance`` for attention.
OTHERS = {"overlap", "share", "balance"}
ALONE = {*apply_schedule.VERBS, "chunks", "ring", "fused"} - OTHERS

MESHES = ("dp=2,tp=2", "tp=4", "tp=2")

# What inputs are: whole, rows of a shard, summands, the sides of a product.
GIVEN = {
    "whole": "[_, _]",
    "rows": "[tp, _]",
    "sum": "[_, _] partial(sum: tp)",
    "left": "[_, tp]",
    "right": "[tp, _]",
}

UNARY: tuple[Callable[[Any], Any], ...] = (
    lambda x: x * 2,
    torch.tanh,
    lambda x: torch.softmax(x, -1),
    lambda x: x.to(torch.float32).to(torch.float64),
    lambda x: x.view(-1, 2, x.shape[-1]).relu().view(x.shape),
    lambda x: torch.softmax(x, 0),
    lambda x: x.T.contiguous() if x.shape[0] == x.shape[1] else x + 1,
    dropped,
    dropped,
)
BINARY = (torch.add, torch.mul, torch.sub)


class Program:
    """A program of one rank, grown from a seed: a pool of values and what they are."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = random.Random(seed)
        self.mesh = rng.choice(MESHES)
        self.count = 4 if self.mesh == "tp=4" else 2
        both = {"both": "[_, _] partial(sum: dp+tp)"} if "dp" in self.mesh else {}
        self.given = GIVEN | both
        self.kinds = [*self.given, "whole", *rng.choices(list(self.given), k=2)]

    def toy(self) -> Toy:
        given = [(self.given[kind], (8, 8)) for kind in ("whole", *self.kinds)]
        return Toy(self._run, *given, mesh=self.mesh)

    def _run(self, state: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``state`` is updated by what is reduced, and read nowhere else."""
        rng, pool = random.Random(self.seed), dict[str, list[torch.Tensor]]()
        for kind, value in zip(self.kinds, inputs, strict=True):
            pool.setdefault(kind, []).append(value)
        pool["whole"].append(self._reduced(rng, pool))
        results = [state + pool["whole"][-1]]
        for _ in range(rng.randint(4, 10)):
            made = self._grown(rng, pool)
            pool.setdefault(made[0], []).append(made[1])
            if rng.random() < 0.4:
                results.append(made[1])
        return *results, pool["whole"][-1]

    def _reduced(self, rng: random.Random, pool: Any) -> torch.Tensor:
        if "both" in pool and rng.random() < 0.5:
            return all_reduce(rng.choice(pool["both"]), "dp+tp")
        return all_reduce(rng.choice(pool["sum"]))

    def _grown(self, rng: random.Random, pool: Any) -> tuple[str, torch.Tensor]:
        def one(kind: str) -> torch.Tensor:
            return rng.choice([*pool[kind], *pool[kind][-1:] * len(pool[kind])])

        n = self.count
        how = rng.choice(("reduce", "gather", "scatter", "product", "unary", "binary"))
        if how == "reduce":
            return "whole", self._reduced(rng, pool)
        if how == "gather":
            return "whole", all_gather(one("rows"), n)
        if how == "scatter":
            return "rows", reduce_scatter(one("sum"), n)
        if how == "product":
            if rng.random() < 0.4:
                return "sum", one("left") @ one("right")
            kind = rng.choice(("rows", "whole"))
            return kind, one(kind) @ one("whole") / 8
        kind = rng.choice(("whole", "rows"))
        if how == "unary":
            return kind, rng.choice(UNARY)(one(kind))
        return kind, rng.choice(BINARY)(one(kind), one(kind))


class Lines:
    """Random lines for a graph."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def line(self, graph: fx.Graph) -> str | None:
        calls = [n for n in graph.nodes if n.op == "call_function"]
        self.calls, self.steps = (
            calls,
            [n for n in calls if collective_nodes.is_step(n)],
        )
        self.inputs = graph.find_nodes(op="placeholder")
        form = self.random.choice([*sorted(ALONE), "reorder", "reorder", "as_slice"])
        made = getattr(self, f"_{form}")()
        return made if made is None or "(" in made else f"{form}({made})"

    def _of(self, *kinds: Any) -> fx.Node | None:
        found = [n for n in self.steps if not kinds or n.target in kinds]
        return self.random.choice(found) if found else None

    def _split(self) -> str | None:
        node = self._of(collective_nodes.all_reduce)
        return node and f"{node.name}, dim={self.random.randrange(2)}"

    def _hierarchical(self) -> str | None:
        two = [n for n in self.steps if len(collective_nodes.axes_of(n)) == 2]
        return f"{self.random.choice(two).name}, inner=tp, outer=dp" if two else None

    def _cut(self) -> str:
        node = self.random.choice([*self.calls, *self.inputs])
        return f"{node.name}, axes=tp, dim={self.random.randrange(2)}"

    def _merge(self) -> str | None:
        node = self._of(
            collective_nodes.all_gather,
            collective_nodes.all_reduce,
            collective_nodes.slice_,
        )
        others = [n for n in self.steps if n is not node]
        if node is None or not others:
            return None
        same = [n for n in others if n.args == node.args]
        return f"{node.name}, {self.random.choice(same or others).name}"

    def _drop(self) -> str | None:
        node = self._of(collective_nodes.all_gather)
        return node and node.name

    def _moved(self) -> str | None:
        node = self._of()
        return node and node.name

    _hoist = _sink = _moved

    def _reorder(self) -> str | None:
        node = self._of(
            self.random.choice(
                (collective_nodes.all_gather, collective_nodes.all_reduce)
            )
        )
        names = ", ".join(n.name for n in self._readers(node)) if node else ""
        return f"[{names}], {node.name}" if node and names else None

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        known, at = {node}, node.next
        while at.op != "output":
            if known.intersection(at.all_input_nodes) and self.random.random() < 0.7:
                known.add(at)
                yield at
                if self.random.random() < 0.3:
                    return
            at = at.next

    def _fuse(self) -> str | None:
        node = self.random.choice(self.calls)
        names = {node.name: None} | {n.name: None for n in self._readers(node)}
        return f"[{', '.join([*names][:5])}]"

    def _bucket(self) -> str | None:
        node = self._of(
            collective_nodes.all_gather,
            collective_nodes.all_reduce,
            collective_nodes.reduce_scatter,
        )
        alike = [n for n in self.steps if node and n.target is node.target]
        names = {n.name for n in self.random.sample(alike, min(2, len(alike)))}
        return f"[{', '.join(sorted(names))}]" if names else None

    def _as_slice(self) -> str | None:
        cut = [
            n
            for n in self.inputs
            if any(u.target is collective_nodes.slice_ for u in n.users)
        ]
        if not cut:
            return None
        state, given = self.random.choice(cut), [self.calls[-1]]
        given += [n for n in self.steps if any(u.op == "output" for u in n.users)] * 3
        return f"{state.name}, {self.random.choice(given).name}"

    def _overlapped(self, how: str) -> str | None:
        node = self._of(
            collective_nodes.all_gather,
            collective_nodes.all_reduce,
            collective_nodes.reduce_scatter,
        )
        if node is None:
            return None
        before = [(n.name, node.name) for n in node.all_input_nodes]
        behind = [(node.name, n.name) for n in node.users if n.op != "output"]
        one, other = self.random.choice([*before, *behind])
        return f"overlap({one}, {other}, {how})"

    def _chunks(self) -> str | None:
        return self._overlapped("chunks=2")

    def _ring(self) -> str | None:
        return self._overlapped(f"ring={self.random.randint(1, 2)}")

    def _fused(self) -> str | None:
        mms = [n for n in self.calls if n.target is torch.ops.aten.mm.default]
        pairs = [(n, mm) for mm in mms for n in mm.all_input_nodes if n in self.steps]
        pairs += [(mm, n) for mm in mms for n in mm.users if n in self.steps]
        if not pairs:
            return None
        one, other = self.random.choice(pairs)
        return f"overlap({one.name}, {other.name}, fused=1)"


def check(seed: int) -> Counter[str]:
    """How many lines were done, by form."""
    toy, drawn, done = Program(seed).toy(), Lines(seed), Counter[str]()
    inputs = [n.name for n in toy.before.find_nodes(op="placeholder")]
    graph = toy.after("", lowered=False)
    said, sliced = list[str](), dict[int, Spec]()
    for _ in range(TRIES):
        line = drawn.line(graph)
        if line is None:
            continue
        try:
            after = apply(line, graph, toy.mesh, permit=inputs, lowered=False)
        except Unexpected:
            raise
        except ScheduleError:
            continue
        _note_slices(line, graph, after, sliced)
        graph = after
        said.append(line)
        done[form_of(line)] += 1
    try:
        _compare(toy, apply("", graph, toy.mesh, lowered=True), sliced)
    except Exception as error:
        error.add_note("\n".join([f"seed {seed}", str(toy.before), *said]))
        raise
    return done


def _note_slices(line: str, before: fx.Graph, after: fx.Graph, sliced: Any) -> None:
    """Of each output that a line made a slice: how it lies."""
    if not line.startswith("as_slice("):
        return
    name = line.partition("(")[2].rstrip(")").partition(",")[0]
    (state,) = [n for n in after.find_nodes(op="placeholder") if n.name == name]
    pairs = zip(_results(before), _results(after), strict=True)
    for i, (had, has) in enumerate(pairs):
        if had.meta["val"].shape != has.meta["val"].shape:
            sliced[i] = state.meta["fxpar_spec"]


def _results(graph: fx.Graph) -> Any:
    return graph.output_node().args[0]


def _compare(toy: Toy, after: fx.Graph, sliced: dict[int, Spec]) -> None:
    parts = toy.parts()
    want = toy.run(toy.before, parts)
    for i, (node, spec) in enumerate(
        zip(after.find_nodes(op="placeholder"), toy.specs, strict=True)
    ):
        now = node.meta["fxpar_spec"]
        if now != spec:
            for rank, mine in enumerate(parts):
                mine[i] = scatter(mine[i], now, toy.mesh)[rank]
    got = toy.run(after, parts)
    for rank, (a, b) in enumerate(zip(want, got, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if i in sliced:
                x = scatter(x, sliced[i], toy.mesh)[rank]
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)


def test_random_schedules() -> None:
    done: Counter[str] = Counter()
    for i, seed in enumerate([*FIRST, *range(ALL)]):
        if i >= len(FIRST) and set(done) >= ALONE:
            break
        done += check(seed)
    assert set(done) >= ALONE, ALONE - set(done)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, ALL, 20))
def test_many_random_schedules(start: int) -> None:
    for seed in range(start, start + 20):
        check(seed)


# Lines for the two stages of a pipeline.
STAGED = (
    "split(all_reduce, stage=0, dim=0) -> rs, ag",
    "split(all_reduce, stage=0, dim=1) -> rs, ag",
    "reorder([add, tanh, add_1], ag)",
    "reorder([add, tanh], ag)",
    "share(axes=tp, dim=0) -> border",
    "share(axes=tp, dim=1) -> border",
    "overlap(add_1, isend, chunks=2)\noverlap(irecv, mm, chunks=2)",
    "overlap(rs, border, chunks=2, dim=1)\noverlap(irecv, border, chunks=2, dim=1)",
    "overlap(mm_1, all_reduce, chunks=2, stage=1)",
    "fuse([add, tanh], stage=0)",
    "fuse([tanh, add_1, isend], stage=0)",
    "hoist(irecv)",
    "sink(irecv)",
    "sink(isend)",
    "cut(r_1, axes=tp, dim=0)",
    "split(all_reduce, stage=1)",
)


def staged(seed: int) -> Counter[str]:
    rng, toys, done = random.Random(seed), pipeline("").toys, Counter[str]()
    graphs, specs = [toy.before for toy in toys], [toy.specs for toy in toys]
    text, after = "", graphs
    for line in rng.sample(STAGED, len(STAGED)):
        try:
            more = f"{text}\n{line}"
            after = apply_stages(more, graphs, toys[0].mesh, "pp", inputs=specs)
        except Unexpected:
            raise
        except ScheduleError:
            continue
        text = more
        done[form_of(line)] += 1
    try:
        pairs = zip(simulated(toys, graphs), simulated(toys, after), strict=True)
        for want, got in pairs:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    except Exception as error:
        error.add_note(f"seed {seed}\n{text}")
        raise
    return done


BETWEEN = {"share", "split", "reorder", "chunks", "fuse", "hoist", "sink", "cut"}


def test_random_schedules_of_stages() -> None:
    done = sum((staged(seed) for seed in range(8)), Counter())
    assert set(done) >= BETWEEN, BETWEEN - set(done)


@pytest.mark.slow
def test_many_random_schedules_of_stages() -> None:
    for seed in range(8, 300):
        staged(seed)
