"""Decides whether the text of a graph says all that the graph computes.

In: a Dynamo graph. Out: yes or no, and texts of ops. Code that a graph calls by name is
not in its text, so that a plan kept for the next start would still be used after that
code was edited. Torch's own check of a Dynamo graph (``check_node_safe``) does not look
into bodies, and accepts ops of all libraries. Never: accepts an op of the user's by its
name alone.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

# Namespaces of ops that come with torch or fxpar, whose versions are in every key.
_SHIPPED = {
    *("aten", "prim", "prims", "inductor", "inductor_prims", "fxpar"),
    *("_c10d_functional", "_c10d_functional_autograd", "torch_attn"),
}

# Modules that come with torch or Python.
_MODULES = ("torch", "fxpar", "math", "builtins", "_operator")

# Ops that torch does not cache, although arguments and bodies say all of them.
_OF_BODIES = {
    *("associative_scan", "autograd_function_apply", "cond", "map_impl", "out_dtype"),
    *("scan", "while_loop", "wrap_with_autocast", "wrap_with_set_grad_enabled"),
}

# Ops whose kernels are in a table of the process; arguments are positions there.
_OF_TABLES = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")

# Types of most arguments.
_PLAIN = {fx.Node, int, float, bool, str, type(None), torch.dtype, torch.device}

_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def is_users_op(target: Any) -> bool:
    """Return whether a target is an op that comes neither with torch nor with fxpar."""
    if not isinstance(target, _OPS):
        return False
    packet: Any = getattr(target, "overloadpacket", target)
    return packet._qualified_op_name.partition("::")[0] not in _SHIPPED


def is_complete(graph: fx.Graph) -> bool:
    """Return whether the text of a Dynamo graph, with the texts of its bodies, which
    are not looked at here, says all that it computes."""
    leaves: list[Any] = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    others = (x for x in leaves if type(x) not in _PLAIN)
    return all(map(_is_printed, others)) and not unknown_functions(graph)


def unknown_functions(graph: fx.Graph) -> list[Any]:
    """Return the functions that a Dynamo graph calls, bodies aside, that may differ
    although their name is the same."""
    return [
        target
        for (op, target), nodes in graph._find_nodes_lookup_table.table.items()
        if nodes and op == "call_function" and not _is_known(target, next(iter(nodes)))
    ]


def text_of_op(op: Any) -> str:
    """Return the name of an op; for one of the user's with its schema and tags, which a
    compiler reads."""
    if not is_users_op(op):
        return str(op)
    return f"{op} {op._schema} {sorted(map(str, op.tags))}"


def is_lowered_by_user(op: Any) -> bool:
    """Return whether Inductor generates code for an op by a function of the user's."""
    if not is_users_op(op):
        return False
    from torch._inductor import lowering

    has_lowering = op in lowering.lowerings and op not in lowering.fallbacks
    return has_lowering or op in getattr(lowering, "user_lowerings", ())  # not 2.11


def _is_known(target: Any, node: fx.Node) -> bool:
    """Return whether a function is the same wherever its name is, with this torch."""
    if isinstance(target, _OPS):
        return not is_users_op(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        name, module = target.name(), _module_of(type(target))
        is_own = module.startswith("torch.") and name not in _OF_TABLES
        return is_own and (target.cacheable() or name in _OF_BODIES)
    name, module = getattr(target, "__name__", ""), _module_of(target)
    if module.partition(".")[0] in _MODULES:
        # A function that another one made may hold values of its own.
        return getattr(sys.modules.get(module), name, None) is target
    if isinstance(target, BuiltinFunctionType):
        return False
    try:
        from torch._functorch._aot_autograd.autograd_cache import check_node_safe

        check_node_safe(node)
    except Exception:
        return False
    return not node.meta.get("is_wrapped")


def _is_printed(x: Any) -> bool:
    """Return whether the text of an argument is all of it."""
    if isinstance(x, _OPS):
        return not is_users_op(x)
    return _module_of(x if callable(x) else type(x)).partition(".")[0] in _MODULES


def _module_of(x: Any) -> str:
    return str(getattr(x, "__module__", ""))
