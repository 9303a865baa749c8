"""Arithmetic of open sizes, known from the same operation on the same expressions.

Of every op that Dynamo traces on an open size, torch asks for products and comparisons
of sizes and strides, mostly those it asked for before. In: an operation of torch's on
two expressions. Out: what torch gives, as a node of its own. An expression is all
that an operation looks at, as long as no symbol was replaced by another; what looks at
more (ranges of symbols), or is to be seen (a graph that is traced, logs, translation
validation), is asked of torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# Operations whose result is a function of the two expressions alone.
_OPERATIONS = (
    *("_add", "_sub", "_mul", "_eq", "_ne", "_lt", "_le", "_gt", "_ge"),
    *("_and_", "_or_"),
)

# Of values that are known of an expression.
_PLAIN = frozenset((int, bool, type(None)))


class SizeArithmetic:
    """What came of operations, in one environment of symbols."""

    def __init__(self) -> None:
        self._env: Any = None
        self._version = -1  # of what symbols were replaced by
        self._results: dict[Any, Any] = {}

    def results(self, env: Any) -> dict[Any, Any]:
        """By operation and operands; empty where something has changed since."""
        version = env._replacements_version_counter
        if env is not self._env or version != self._version:
            self._env, self._version, self._results = env, version, {}
        return self._results


@contextlib.contextmanager
def sizes_known() -> Iterator[None]:
    """Context in which results of arithmetic on open sizes are known once torch gave
    them."""
    from torch._logging import _internal as logs
    from torch.fx.experimental.sym_node import SymNode, sym_node_log

    ask: Any = SymNode.__dict__["expr"].fget
    is_seen = logs.GET_DTRACE_STRUCTURED or sym_node_log.isEnabledFor(logging.DEBUG)
    is_inside = hasattr(ask, "fxpar")  # such a context already
    if is_seen or is_inside or not counts_replacements():
        yield
        return
    arithmetic, expression = SizeArithmetic(), _expression(ask)
    each: dict[str, Any] = {
        name: _operation(name, getattr(SymNode, name), arithmetic)
        for name in _OPERATIONS
    }
    with mock.patch.multiple(SymNode, expr=property(expression), **each):
        yield


@functools.cache
def counts_replacements() -> bool:
    """Whether torch says that a symbol was replaced (2.13)."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return hasattr(ShapeEnv(), "_replacements_version_counter")


def _operation(
    name: str, ask: Callable[[Any, Any], Any], arithmetic: SizeArithmetic
) -> Callable[[Any, Any], Any]:
    """An operation of torch's, asked once for the same operands."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode

    node_type: Any = SymNode

    def operation(self: Any, other: Any) -> Any:
        env = self.shape_env
        if type(other) is not node_type or env is None or other.shape_env is not env:
            return ask(self, other)
        if type(self._hint) not in _PLAIN or type(other._hint) not in _PLAIN:
            return ask(self, other)
        if env._translation_validation_enabled or get_proxy_mode() is not None:
            return ask(self, other)
        results = arithmetic.results(env)
        key = (name, *_operand(self), *_operand(other))
        node = results.get(key)
        if node is None:
            node = results[key] = ask(self, other)
        result = object.__new__(node_type)
        result.__dict__.update(node.__dict__)
        return result

    return operation


def _operand(node: Any) -> tuple[Any, ...]:
    return node._expr, node.pytype, node._hint, node._optimized_summation


def _expression(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The expression of a node, as torch gives it: it asks first whether that is a
    number, which takes longest."""

    def expression(self: Any) -> Any:
        env = self.shape_env
        if env is not None:
            version = env._replacements_version_counter
            if version == 0:
                return self._expr
            if self._expr_cache is not None and version == self._expr_ver:
                return self._expr_cache
        return ask(self)

    expression.fxpar = True  # type: ignore[attr-defined]
    return expression
