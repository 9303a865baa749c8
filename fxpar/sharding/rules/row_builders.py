"""What the row modules share: rules from words per dim, and rows by op name.

A word is what a dim is in rule text: a factor ``"k"``, whole as ``"k!"``, ``"_"`` for
a dim without a factor, or a tuple of factors for a compound dim, major to minor. Rules
are built from words rather than from text wherever a tensor may have no dims, which
text cannot tell from no tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpar.sharding.factors import Dims, Passage, Rule
from fxpar.sharding.rules.table import Row, RuleFunction, tensors_of

Word = str | tuple[str, ...]


def make(
    operands: Iterable[Sequence[Word]],
    results: Iterable[Sequence[Word]],
    sizes: Mapping[str, int] | None = None,
    passages: Sequence[Passage] = (),
    reductions: Mapping[str, str] | None = None,
) -> Rule:
    """The rule of these words; ``sizes`` are needed for compound dims only. ``~k`` in a
    result is no dim: every rank along ``k`` computes the result alike."""
    whole: set[str] = set()

    def factors(word: Word) -> tuple[str, ...]:
        parts = (word,) if isinstance(word, str) else word
        whole.update(part[:-1] for part in parts if part.endswith("!"))
        return tuple(part.rstrip("!") for part in parts if part != "_")

    def tensor(words: Sequence[Word]) -> Dims:
        return tuple(factors(word) for word in words)

    dims: list[list[Word]] = []
    alike: set[tuple[int, str]] = set()
    for i, words in enumerate(results):
        dims.append([w for w in words if w[:1] != "~"])
        alike |= {(i, str(w[1:])) for w in words if w[:1] == "~"}
    return Rule(
        tuple(tensor(t) for t in operands),
        tuple(tensor(t) for t in dims),
        tuple((sizes or {}).items()),
        frozenset(whole),
        tuple((reductions or {}).items()),
        tuple(passages),
        alike=frozenset(alike),
    )


def whole(*args: Any, **kwargs: Any) -> Rule:
    """A call all of whose operands and results are whole."""
    operands = [["_"] * x.ndim for x in tensors_of((args, kwargs))]
    return replace(make(operands, []), open=True)


def words_of(
    x: torch.Tensor | Sequence[int], whole: Collection[int] = (), prefix: str = "d"
) -> list[str]:
    """A word per dim: ``_`` where the size is 1, whole at the dims in ``whole``."""
    shape = x.shape if isinstance(x, torch.Tensor) else x
    return [
        "_" if size == 1 else f"{prefix}{i}" + "!" * (i in whole)
        for i, size in enumerate(shape)
    ]


def aligned(shapes: Sequence[Sequence[int]]) -> tuple[list[str], list[list[str]]]:
    """(words of what the shapes broadcast to, words of each)."""
    full = torch.broadcast_shapes(*shapes)
    words = words_of(full, prefix="b")
    words_of_each = []
    for shape in shapes:
        skip = len(full) - len(shape)
        pairs = zip(words[skip:], shape, full[skip:], strict=True)
        words_of_each.append([word if size == n else "_" for word, size, n in pairs])
    return words, words_of_each


def at(dim: int, ndim: int) -> int:
    """A dim counted from the front. A tensor without dims has dim 0, as in torch."""
    return dim % max(ndim, 1)


def all_at(dims: int | Sequence[int] | None, ndim: int) -> frozenset[int]:
    """Dims counted from the front; None and an empty list mean all of them."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return frozenset(range(ndim))
    return frozenset(at(d, ndim) for d in ([dims] if isinstance(dims, int) else dims))


def keys(names: str, namespace: str = "aten") -> list[Any]:
    """Table keys of op names separated by spaces: ``"add.Tensor relu"``.

    An aten op is its overload, if this torch has it. Others are named by text, as they
    may be registered later than this table.
    """
    if namespace != "aten":
        return [f"{namespace}::{name}" for name in names.split()]
    overloads = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        op = getattr(torch.ops.aten, packet, None)
        op = getattr(op, overload or "default", None)
        if op is not None:
            overloads.append(op)
    return overloads


def rows(
    names: str, rule: str | RuleFunction, namespace: str = "aten", **marks: Any
) -> dict[Any, Row]:
    """The same row for each of the named ops."""
    return dict.fromkeys(keys(names, namespace), Row(rule, **marks))
