"""Defines what a feature adds to the core's list of steps.

A feature's room is a folder here. Its ``__init__`` says what it adds: rows of
``fxpar.pipeline``, each after a step of the core or of a feature, which graphs have
anything to do for it, and what a search chooses. In: the graph as it is when a row's
turn comes, and the state of the pipeline. Out: whether the row runs. Never: a module of
a feature is imported before one of its rows runs, or a row changes a graph that it is
not on for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import fx

from fxpar.passes.order.order_collectives import Pass
from fxpar.sharding.plan_request import Request

# Given a traced graph, a request, and what gives the seconds of a step that a short
# search finds for a request: the request with a choice of what changes the graph, and
# notes of why.
Choose = Callable[
    [fx.Graph, Request, Callable[[Request], float]], tuple[Request, list[str]]
]


@dataclass(frozen=True)
class Feature:
    """Is what a feature adds to the list of steps."""

    name: str  # its folder here
    # A step, or the stage that a list begins with -> the rows right after it.
    rows: Mapping[str, Sequence[Pass]]
    # Modules that register the ops which compiled code of it calls.
    ops: Sequence[str] = ()
    # The ops for which there is something for a search to choose, and the module whose
    # ``choose``, a ``Choose``, does.
    choices: tuple[str, str] | None = None
    # Modules with a ``register_lowering``, which tells Inductor of ops.
    lowerings: Sequence[str] = ()


def later(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that is imported when it is first called: what
    tables of the core hold of a feature."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def steps_of(module: str) -> Callable[..., Pass]:
    """Return the function that makes rows whose steps are functions of a module, each
    of its row's name."""

    def step(name: str, ops: str = "", **more: Any) -> Pass:
        return Pass(name, later(module, name), ops=ops, **more)

    return step


def with_features(
    begin: str, core: Sequence[Pass], features: Collection[Feature]
) -> tuple[Pass, ...]:
    """Return a list of steps with the rows of features in their places. ``begin``: the
    stage of the graph before the first."""
    left: dict[str, list[Pass]] = {}
    for feature in features:
        for after, rows in feature.rows.items():
            left.setdefault(after, []).extend(rows)
    merged, ahead = list[Pass](), list(reversed(core))
    ahead += reversed(left.get(begin, ()))
    while ahead:
        step = ahead.pop()
        merged.append(step)
        ahead += reversed(left.get(step.name, ()))
    return tuple(merged)
