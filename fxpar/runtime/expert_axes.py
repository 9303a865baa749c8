"""Over which axes a search may split experts, where none is named for them.

Experts that lie on the ranks of an axis are another program than experts that lie whole
(``normalize_experts``), so each is planned by itself, and the one that is predicted to
be faster is taken. In: a traced graph and a request. Out: data; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from fxpar.passes.builder import shape_of
from fxpar.passes.experts.sorted_products import SORTS, products_by
from fxpar.passes.graph_bodies import body_of
from fxpar.passes.size_nodes import is_open
from fxpar.sharding.factors import Axes
from fxpar.sharding.pipeline_axis import pipeline_axis
from fxpar.sharding.plan_request import Request
from fxpar.sharding.search.run_search import SearchOptions

# A plan with experts split must be faster by this share: a prediction is a model.
_SAME = 0.02
# Share of the seconds of a search that each of the others may take.
_TRIAL = 0.5


def choices(graph: fx.Graph, request: Request) -> list[Axes]:
    """The axes to choose from, none first; empty where there is nothing to choose."""
    mode, mesh = request.mode, request.mesh
    if not isinstance(mode, SearchOptions) or request.meshes or request.expert_axes:
        return []
    if mesh.is_refined or is_open(graph) or any(map(body_of, graph.nodes)):
        return []
    if pipeline_axis(mesh) is not None:
        return []
    counts = {
        experts
        for node in graph.nodes
        if node.target in SORTS and len(shape_of(node.args[0])) == 1
        for experts in products_by(node).values()
    }
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    sets = dict.fromkeys([*((axis,) for axis in axes), tuple(axes)])
    fit = [a for a in sets if a and not any(n % mesh.count(a) for n in counts)]
    return [(), *fit] if counts and fit else []


def trial(request: Request) -> Request:
    """The request to predict a plan that is compared, which leaves nothing behind."""
    mode = request.mode
    assert isinstance(mode, SearchOptions)
    shorter = replace(mode, seconds=mode.seconds * _TRIAL, ranked=False)
    return replace(request, mode=shorter, cached=False, debug=0, dump=None)


def best(seconds: Mapping[Axes, float]) -> tuple[Axes, str]:
    """(the axes whose plan takes the fewest seconds, a note that says so). None of them
    where that saves little."""
    axes = min(seconds, key=seconds.__getitem__)
    if not axes or seconds[axes] >= seconds[()] * (1 - _SAME):
        return (), ""
    return axes, (
        f"experts are split over {'+'.join(axes)}: {seconds[axes] * 1e3:.4g} ms a step "
        f"searched, {seconds[()] * 1e3:.4g} ms if each rank has all of them"
    )
