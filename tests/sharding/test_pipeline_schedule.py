"""Schedules of pipelines: torch's actions are complete, bubbles are those of the
formulas in closed form, and chains are cut where that is best."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence

import pytest

from fxpar.errors import MeshError, OptionError, PlanError
from fxpar.sharding import pipeline_schedule as schedules
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.pipeline_axis import split_off, with_stages
from fxpar.sharding.pipeline_schedule import Action, bubble, picture, rows_of, timed
from fxpar.sharding.program import Input, Signature
from fxpar.sharding.rest_over_stages import of_one_stage, split_over_stages
from fxpar.sharding.search.price_stages import (
    Held,
    StageMemory,
    cut_chain,
    least_staged,
    of_places,
)
from fxpar.sharding.spec import Spec

SIZES = [(2, 1), (2, 4), (4, 2), (4, 8), (4, 12), (8, 16), (16, 32)]


# Seconds of stages of one size: a backward takes twice a forward.
ALIKE = [1.0] * 64, [2.0] * 64


ORDERS = [
    (name, places, parts)
    for name in schedules.SCHEDULES
    for places, parts in SIZES
    if name != "dualpipev" or parts >= 2 * places
]


@pytest.mark.parametrize(("name", "places", "parts"), ORDERS)
def test_every_action_once_and_none_too_early(
    name: str, places: int, parts: int
) -> None:
    slots = timed(rows_of(name, places, parts), *ALIKE)
    ends = {slot.action: slot.end for slot in slots}
    stages = places * schedules.SCHEDULES[name].rounds
    assert len(ends) == len(slots)
    for stage, part in itertools.product(range(stages), range(parts)):
        done = {kind for kind in "FBIW" if Action(stage, kind, part) in ends}
        assert done in ({"F", "B"}, {"F", "I", "W"})
    for slot in slots:
        stage, kind, part = slot.action
        before = (
            [Action(stage - 1, "F", part)]
            if kind == "F"
            else [Action(stage, "I", part)]
            if kind == "W"
            else [Action(stage, "F", part)]
            + [Action(stage + 1, each, part) for each in "BI"]
        )
        assert all(ends.get(x, 0.0) <= slot.start for x in before)


@pytest.mark.parametrize(("places", "parts"), SIZES)
def test_bubbles_are_those_of_the_formulas(places: int, parts: int) -> None:
    want = (places - 1) / (parts + places - 1)
    for name in ("gpipe", "1f1b"):
        slots = timed(rows_of(name, places, parts), *ALIKE)
        assert bubble(slots, places) == pytest.approx(want)
    if parts % places == 0:
        want = (places - 1) / (2 * parts + places - 1)
        for name in ("interleaved", "looped_bfs"):
            slots = timed(rows_of(name, places, parts), *ALIKE)
            assert bubble(slots, places) == pytest.approx(want)
    slots = timed(rows_of("zero_bubble", places, parts), *ALIKE)
    least = timed(rows_of("1f1b", places, parts), *ALIKE)
    assert bubble(slots, places) <= bubble(least, places) + 1e-9


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
@pytest.mark.parametrize(("places", "parts"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_stages_forth_and_back_wait_least(name: str, places: int, parts: int) -> None:
    """Where the three parts of a stage's work take as long, p - 1 of them in 6 m (zero
    bubble, arXiv 2401.10241, section 6)."""
    slots = timed(rows_of(name, places, parts), *ALIKE)
    want = (places - 1) / (6 * parts + places - 1)
    assert bubble(slots, places) == pytest.approx(want)
    assert schedules.stage_places(name, 2) == (0, 1, 1, 0)


def test_too_few_microbatches_for_an_order_are_refused() -> None:
    with pytest.raises(PlanError, match="no order for 2 microbatches on 8 stages"):
        rows_of("dualpipev", 4, 2)


def test_fewer_microbatches_take_an_order_of_the_same_stages() -> None:
    for name, places in itertools.product(schedules.SCHEDULES, (2, 3, 4)):
        for parts in range(1, 18):
            order = schedules.order_for(name, places, parts)
            timed(rows_of(order, places, parts), *ALIKE)
            own, other = (schedules.stage_places(x, places) for x in (name, order))
            assert own == other
    assert schedules.order_for("interleaved", 2, 8) == "interleaved"
    assert schedules.order_for("interleaved", 2, 7) == "looped_bfs"
    assert schedules.order_for("dualpipev", 2, 2) == "zbv"
    for name, parts in (("interleaved", 7), ("dualpipev", 2)):
        with pytest.raises(PlanError, match="no order for"):
            rows_of(name, 2, parts)


def test_a_picture_of_1f1b() -> None:
    slots = timed(rows_of("1f1b", 2, 3), *ALIKE)
    assert (
        picture(slots, 2, 1.0)
        == "0: 0 1 . . a a 2 b b . c c\n1: . 0 a a 1 b b 2 c c . ."
    )


def test_forwards_alone() -> None:
    slots = timed(rows_of("gpipe", 3, 4, trains=False), *ALIKE)
    assert {slot.action.kind for slot in slots} == {"F"}
    assert bubble(slots, 3) == pytest.approx(2 / 6)


def test_actions_that_wait_for_each_other_are_refused() -> None:
    rows = rows_of("1f1b", 2, 2)
    rows[0].reverse()
    with pytest.raises(PlanError, match="wait for each other"):
        timed(rows, *ALIKE)


@pytest.mark.parametrize("name", sorted(schedules.SCHEDULES))
def test_no_cut_beats_the_least_seconds_of_its_schedule(name: str) -> None:
    """Stages cut at random; those that fill and empty alone wait for all others."""
    rng, places, parts = random.Random(0), 4, 8
    rows = rows_of(name, places, parts)
    for _ in range(100):
        count = len(schedules.stage_places(name, places))
        forward = [rng.choice([0.0, 0.3, 1.0, 1.0]) for _ in range(count)]
        backward = [2 * x for x in forward]
        slots = timed(rows, forward, backward)
        end, part = max(slot.end for slot in slots), sum(forward) + sum(backward)
        assert least_staged(part, places, parts, name) <= end * (1 + 1e-9)


def test_sending_takes_time() -> None:
    rows = rows_of("gpipe", 2, 1, trains=False)
    assert max(slot.end for slot in timed(rows, *ALIKE, 0.5)) == 2.5


def test_axes_of_stages() -> None:
    planned, pipeline = split_off(Mesh.parse("pp=2,dp=3"))
    assert str(planned) == "dp=3" and pipeline is not None and pipeline.places == 2
    assert str(with_stages(planned, pipeline)) == "pp=2,dp=3"
    refined = planned.refined(["dp"])
    assert str(with_stages(refined, pipeline)) == "pp=2,dp=3"
    planned, pipeline = split_off(Mesh.parse("stage=4"))
    assert str(planned) == "dp=1" and str(pipeline.mesh) == "stage=4,dp=1"
    assert split_off(Mesh.parse("dp=2,pp=1"))[1] is None
    with pytest.raises(MeshError, match="2 axes of stages"):
        split_off(Mesh.parse("pp=2,stage=2"))
    with pytest.raises(MeshError, match="devices of different speeds"):
        split_off(Mesh.parse("pp=2,dp=2{1,0.5}"))
    with pytest.raises(OptionError, match="no axis of stages"):
        split_off(Mesh.parse("dp=4"), "1f1b")


def test_parts_of_a_refined_axis_stay() -> None:
    _, pipeline = split_off(Mesh.parse("pp=2,tp=4"))
    assert str(with_stages(Mesh.parse("tp=2*2"), pipeline)) == "pp=2,tp=2*2"


def test_chains_are_cut_as_by_trying_all_cuts() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        count, stages = rng.randint(4, 9), rng.randint(2, 4)
        seconds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(count)]
        cuts = cut_chain(seconds, [0.0] * count, stages, 8)

        def slowest(cuts: tuple[int, ...], seconds: list[float] = seconds) -> float:
            ends = [0, *cuts, len(seconds)]
            return max(sum(seconds[i:j]) for i, j in itertools.pairwise(ends))

        every = itertools.combinations(range(1, count), stages - 1)
        assert len(cuts) == stages - 1 and sorted(set(cuts)) == list(cuts)
        assert slowest(cuts) == pytest.approx(min(map(slowest, every)))


def test_chains_with_pins_are_cut_as_by_trying_all_cuts() -> None:
    kinds = set()
    for seed in range(60):
        rng = random.Random(seed)
        count, stages = rng.randint(4, 8), rng.randint(2, 3)
        seconds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(count)]
        places = rng.sample(range(count), 2)
        pins = {i: rng.randrange(stages) for i in places}
        fit = [
            cuts
            for cuts in itertools.combinations(range(1, count), stages - 1)
            if all(sum(cut <= i for cut in cuts) == at for i, at in pins.items())
        ]
        cuts = cut_chain(seconds, [0.0] * count, stages, 8, pins)
        kinds.add(bool(fit))
        if not fit:
            assert cuts == ()
            continue

        def slowest(cuts: tuple[int, ...], seconds: list[float] = seconds) -> float:
            ends = [0, *cuts, len(seconds)]
            return max(sum(seconds[i:j]) for i, j in itertools.pairwise(ends))

        assert cuts in fit
        assert slowest(cuts) == pytest.approx(min(map(slowest, fit)))
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("spec", "shape", "rests"),
    [
        ("[_, _]", (6, 4), "[pp, _]"),
        ("[dp, _]", (8, 4), "[dp, pp]"),
        ("[dp]", (8,), "[dp+pp]"),
        ("[dp]", (6,), "[dp]"),
        ("[_, _]", (3, 4), "[_, pp]"),
        ("[]", (), "[]"),
    ],
)
def test_parameters_rest_over_stages(
    spec: str, shape: tuple[int, ...], rests: str
) -> None:
    mesh = Mesh.parse("pp=2,dp=2")
    whole = split_over_stages(Spec.parse(spec), shape, mesh, "pp")
    assert whole == Spec.parse(rests)
    inputs = (Input("w", "parameter", whole),)
    (bare,) = of_one_stage(Signature(inputs, ()), "pp").inputs
    assert bare.at_rest == Spec.parse(spec)


def test_a_chain_is_cut_where_less_is_sent() -> None:
    seconds, crossing = [1.0] * 8, [5.0] * 8
    crossing[3] = 0.1
    assert cut_chain(seconds, crossing, 2, 4) == (3,)
    assert cut_chain(seconds, [0.0] * 8, 2, 4) == (4,)
    crossing = [0.0] * 8
    crossing[4] = float("inf")  # inside of one op
    assert cut_chain(seconds, crossing, 2, 4) in ((3,), (5,))


def test_a_stage_that_holds_few_microbatches_waits_for_messages() -> None:
    """Cut in the middle, the first stage has two on their way, 16 seconds and 3 of
    messages for both; a shorter last stage without messages is faster."""
    crossing = [3.0] * 16
    crossing[7] = 0.0

    def holding(flying: float) -> StageMemory:
        room, held = (1.0, 1.0), (flying, 1.0)
        return StageMemory(room, held, (), (), [0.0] * 16)

    seconds = [1.0] * 16
    assert cut_chain(seconds, crossing, 2, 100, memory=holding(2.0)) == (7,)
    assert cut_chain(seconds, crossing, 2, 100, memory=holding(100.0)) == (8,)


def test_chains_are_cut_where_stages_fit_as_by_trying_all_cuts() -> None:
    kinds = set()
    for seed in range(60):
        rng = random.Random(seed)
        count, stages = rng.randint(4, 8), rng.randint(2, 3)
        seconds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(count)]
        some = [rng.sample(range(count), rng.randint(1, 2)) for _ in range(count)]
        weights = [(rng.choice([1.0, 4.0]), tuple(ops)) for ops in some]
        memory = StageMemory(
            room=tuple(rng.uniform(8, 24) for _ in range(stages)),
            in_flight=tuple(range(stages, 0, -1)),
            throughout=weights,
            saved=[(rng.choice([0.5, 1.0]), (i,)) for i in range(count)],
            passing=[rng.choice([0.0, 3.0]) for _ in range(count)],
        )

        def held(stage: int, i: int, j: int, memory: StageMemory = memory) -> float:
            def own(items: Sequence[Held]) -> float:
                return sum(n for n, ops in items if any(i <= op < j for op in ops))

            flying = memory.in_flight[stage] * own(memory.saved)
            return own(memory.throughout) + flying + max(memory.passing[i:j])

        def bytes_of(cuts: tuple[int, ...], count: int = count) -> list[float]:
            pairs = itertools.pairwise([0, *cuts, count])
            return [held(stage, i, j) for stage, (i, j) in enumerate(pairs)]

        def slowest(cuts: tuple[int, ...], seconds: list[float] = seconds) -> float:
            ends = [0, *cuts, len(seconds)]
            return max(sum(seconds[i:j]) for i, j in itertools.pairwise(ends))

        fit = [
            cuts
            for cuts in itertools.combinations(range(1, count), stages - 1)
            if all(map(operator.le, bytes_of(cuts), memory.room))
        ]
        cuts = cut_chain(seconds, [0.0] * count, stages, 8, memory=memory)
        free = cut_chain(seconds, [0.0] * count, stages, 8)
        assert of_places(memory, free, range(stages)) == pytest.approx(bytes_of(free))
        kinds.add((bool(fit), free in fit))
        if fit:
            assert cuts in fit
            assert slowest(cuts) == pytest.approx(min(map(slowest, fit)))
        else:
            assert cuts == ()
    assert kinds == {(True, True), (True, False), (False, False)}


def test_long_chains_are_cut_in_no_time() -> None:
    crossing = [1e4 * (i % 40 > 0) for i in range(4000)]
    cuts = cut_chain([1.0] * 4000, crossing, 16, 32)
    assert all(cut % 40 == 0 for cut in cuts) and len(cuts) == 15


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (0.5, 1.0, 0.25), (1.0, 1.0)])
def test_stages_of_slower_places_are_smaller(speeds: tuple[float, ...]) -> None:
    """The slowest stage of the cut is as fast as in the best of all cuts."""
    seconds, stages = [1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0], len(speeds)

    def slowest(cuts: Sequence[int]) -> float:
        ends = itertools.pairwise((0, *cuts, len(seconds)))
        works = (sum(seconds[a:b]) for a, b in ends)
        return max(work / speed for work, speed in zip(works, speeds, strict=True))

    every = itertools.combinations(range(1, len(seconds)), stages - 1)
    cuts = cut_chain(seconds, [0.0] * len(seconds), stages, 8, speeds=speeds)
    assert slowest(cuts) == min(map(slowest, every))
    if len(set(speeds)) > 1:
        alike = cut_chain(seconds, [0.0] * len(seconds), stages, 8)
        assert slowest(cuts) < slowest(alike)
