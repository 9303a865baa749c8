"""bound -> bound: work that can wait is done while a collective is under way.

In: the bound graph of a forward or a backward, waits where their results are first
needed. Out: the same nodes, changed in place only in their order. Where nothing stands
between a collective and its wait, what stood before it and is not needed for it, back
to the last wait, comes behind it: the gradients of weights run beside the all-reduce of
an input's gradient, as Megatron-LM writes by hand (Korthikanti et al. 2022, section
4.2.2). It never moves a collective, a wait, a random draw or a write, so all ranks keep
one order of them; a value is held no longer than from one wait to the next.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from fxpar.passes.arithmetic import contracts, is_light, is_view
from fxpar.passes.waits import WAIT, is_chunk


def delay(graph: fx.Graph) -> None:
    """Put work behind each collective that has none beside it."""
    moved: set[fx.Node] = set()
    since: list[fx.Node] = []  # the last wait
    for node in list(graph.nodes):
        if node.target is WAIT:
            since.clear()
        waits = [user for user in node.users if user.target is WAIT]
        if waits and not is_chunk(node) and not _has_work(node, min(waits)):
            later = _unneeded(node, since, moved)
            if any(contracts(n.target) for n in later):
                for each in reversed(later):
                    node.append(each)
                moved.update(later)
                since = [n for n in since if n not in moved]
        since.append(node)
    graph.lint()


def _has_work(node: fx.Node, wait: fx.Node) -> bool:
    at = node.next
    while at is not wait:
        if contracts(at.target):
            return True
        at = at.next
    return False


def _unneeded(
    node: fx.Node, since: list[fx.Node], moved: Collection[fx.Node]
) -> list[fx.Node]:
    """Of the nodes ``since`` the last wait, in order, those that neither ``node`` needs
    nor anything that must stay."""
    needed = set(node.all_input_nodes)
    later = []
    for each in reversed(since):
        if each in needed or each in moved or not _may_move(each):
            needed.update(each.all_input_nodes)
        else:
            later.append(each)
    return later[::-1]


def _may_move(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or node.is_impure():
        return False
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return False
    known = is_light(target) or contracts(target) or is_view(node)
    return known or target is operator.getitem
