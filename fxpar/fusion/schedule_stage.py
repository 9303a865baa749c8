"""The schedule's place in the pipeline: what ``Request.reschedule`` is given.

In: ``options.schedule`` ("auto", "none", text or a file), and the hardware if it is
known. Out: a function from the local graph with steps, and the plan if that is a saved
one, to ``Scheduled``: the graph after the schedule, and the plan with its schedule, its
near misses, and the collectives that are there now.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch import fx

from fxpar.errors import FxparWarning, ScheduleError, compose
from fxpar.fusion import fused_matmul
from fxpar.fusion.apply_schedule import Unexpected, apply
from fxpar.fusion.choose_schedule import Chosen, choose
from fxpar.fusion.node_legality import PRODUCTS
from fxpar.fusion.schedule import Schedule
from fxpar.fusion.verbs import fuse_nodes
from fxpar.passes import Scheduled, collective_nodes
from fxpar.sharding.cost.hardware_table import Hardware
from fxpar.sharding.cost.op import nbytes_of
from fxpar.sharding.decide import Decision
from fxpar.sharding.plan import Collective, Plan

Reschedule = Callable[[fx.Graph, Decision, Plan | None], Scheduled]


def rescheduler(asked: str, hardware: Hardware | None) -> Reschedule:
    """``asked``: as the option; "auto" chooses where the hardware is known, and follows
    a ``saved`` plan. What is returned raises ScheduleError if a schedule does not fit.
    """

    def reschedule(
        graph: fx.Graph, decision: Decision, saved: Plan | None
    ) -> Scheduled:
        given = "" if asked == "none" else asked
        if asked == "auto" and saved is not None:
            given = saved.schedule
        elif asked == "auto":
            if hardware is None or decision.mesh.size == 1:
                return Scheduled(graph)
            machine = hardware.at_speed(decision.mesh.slowest)
            try:
                return _after(graph, choose(graph, decision.mesh, machine))
            except Exception as error:
                failed(error)
                return Scheduled(graph)
        schedule = Schedule.of(given)
        if not schedule:
            return Scheduled(graph)
        after = apply(schedule, graph, decision.mesh)
        return _noted(graph, after, str(schedule), (), ())

    return reschedule


def failed(error: Exception) -> None:
    """Say that no schedule could be chosen: the program runs as it is without. What
    the graph holds that no verb takes is a limit, anything else ours to mend."""
    if isinstance(error, ScheduleError) and not isinstance(error, Unexpected):
        what, where = f"no schedule is chosen: {error.what}", error.where
        fix = "leave it so, or set FXPAR_SCHEDULE=none, which does not look for one"
    else:
        what, where = f"no schedule is chosen: {type(error).__name__}: {error}", None
        fix = "report it, and set FXPAR_SCHEDULE=none"
    text = compose(what, where=where, fix=fix)
    warnings.warn(text, FxparWarning, stacklevel=2)


def _after(graph: fx.Graph, chosen: Chosen) -> Scheduled:
    others = tuple(map(str, chosen.others))
    if not chosen.schedule:
        return Scheduled(graph, lambda plan: replace(plan, near=chosen.near), others)
    (seconds, then), (peak, left) = chosen.seconds, chosen.peak
    note = (
        f"schedule: a step is predicted to take {then * 1e3:.4g} ms instead of "
        f"{seconds * 1e3:.4g} ms, and {left} bytes instead of {peak}"
    )
    text = str(chosen.schedule)
    done = _noted(graph, chosen.graph, text, chosen.near, (note,))
    return replace(done, others=others)


def _noted(
    before: fx.Graph,
    after: fx.Graph,
    schedule: str,
    near: tuple[str, ...],
    notes: tuple[str, ...],
) -> Scheduled:
    fuse_nodes.inline(after)
    had, have = Counter(_collectives(before)), Counter(_collectives(after))

    def noted(plan: Plan) -> Plan:
        return replace(
            plan,
            schedule=schedule,
            near=near,
            notes=(*plan.notes, *notes),
            collectives=_moved(plan.collectives, had - have, have - had),
        )

    return Scheduled(after, noted)


def _moved(
    known: tuple[Collective, ...],
    gone: Counter[Collective],
    come: Counter[Collective],
) -> tuple[Collective, ...]:
    """Collectives of the plan without those that the schedule took away, and with those
    it brought."""
    left = []
    for collective in known:
        if gone[collective]:
            gone[collective] -= 1
        else:
            left.append(collective)
    return (*left, *come.elements())


def _collectives(graph: fx.Graph) -> list[Collective]:
    out = []
    for node in graph.nodes:
        if node.target in collective_nodes.COLLECTIVE:
            grows = node.target is not collective_nodes.reduce_scatter
            whole = node if grows else node.all_input_nodes[0]
            source = node.meta.get("fxpar_cause", node.name)
            kind, axes = node.target.__name__, collective_nodes.axes_of(node)
            size = nbytes_of(whole.meta["val"])
            out.append(Collective(kind, axes, size, source))
        elif node.target in PRODUCTS:
            source = node.meta.get("fxpar_cause", node.name)
            out.append(fused_matmul.collective_of(node, source))
    return out
