"""Defines a row of the table of ops, makes rows, and evaluates a row into the rule of
one op call.

A row maps an ATen overload to its factors: text (``"m k, k n -> m n"``) or, where
attributes matter, a function of the call's own arguments (tensors are given as fake
tensors) that returns text or a Rule. ``linear`` / ``monotone`` / ``movement`` name, by
argument position, the operands that may be partial together: ``"0+1"`` both at once,
``"0|1"`` either one with the other whole; a position that holds no tensor in a call
voids its group. ``shape`` is the position of the argument that spells the result's
shape, which partitioning makes local. ``even``: its shards must all be of one size;
``empty``: its behaviour on an empty shard (``Rule.empty``).

A word describes a dim in rule text: a factor ``"k"``, whole as ``"k!"``, ``"_"`` for a
dim without a factor, or a tuple of factors for a compound dim, major to minor. Rules
are built from words rather than from text wherever a tensor may have no dims, which
text cannot distinguish from no tensor.

In: a row, and a call with fake tensors. Out: a sized Rule, or None.
Never: knows a mesh.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch

from fxpar import _torch
from fxpar.errors import RuleError
from fxpar.sharding.factors import LINEAR, MONOTONE, MOVEMENT, Dims, Passage, Rule

RuleFunction = Callable[..., "Rule | str | None"]


@dataclass(frozen=True)
class Row:
    """Holds one row of the table; the module explains its marks."""

    # Text, or a function of the call's arguments that returns text or a Rule; None: the
    # call has no rule, and is made whole.
    rule: str | RuleFunction | None
    # Groups of operands that may be partial sums.
    linear: str | None = None
    # Groups that may be partial maxima and minima.
    monotone: str | None = None
    # Groups that may be partial in any reduction.
    movement: str | None = None
    # The reduction over factors that no result has; None: sum.
    reduce: str | None = None
    # Position of the argument that spells the result's shape.
    shape: int | None = None
    # Whether shards must all be of one size.
    even: bool = False
    # Its behaviour on an empty shard: "fill", "never", or None, it runs.
    empty: str | None = None
    # Its local form, ``(call, *local args, **local kwargs) -> node``; None: the op on
    # the shards of its operands.
    local: Callable[..., Any] | None = None
    # Its other facts: fields of ``op_facts.OpFacts``.
    facts: Mapping[str, Any] = field(default_factory=dict)


# Fields of a row that are given by name; all other names are facts.
MARKS = {x.name for x in fields(Row)} - {"rule", "local", "facts"}


def _passages(
    entry: Row, args: Sequence[Any], kwargs: dict[str, Any], whole_numbers: bool
) -> tuple[Passage, ...]:
    """Return the passages that the row's marks describe. ``whole_numbers``: only the
    results are whole numbers; rounding to them is monotone at best, never linear."""
    out, positions, n = [], list[range](), 0  # of the operands that each argument holds
    for arg in [*args, *kwargs.values()]:
        positions.append(range(n, n := n + len(tensors_of(arg))))
    for text, reductions in (
        (None if whole_numbers else entry.linear, LINEAR),
        (entry.monotone, MONOTONE),
        (entry.movement, MOVEMENT),
    ):
        for group in text.split("|") if text else []:
            places = [int(p) for p in group.split("+")]
            operands = [positions[p] if p < len(positions) else () for p in places]
            if all(operands):
                out.append(Passage(tuple(i for h in operands for i in h), reductions))
    return tuple(out)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an op's arguments or result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in _torch.fake.tree_leaves(value) if isinstance(x, torch.Tensor)]


def evaluate(
    entry: Row, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Rule | None:
    """Return the sized rule of one call, or None if the row has none for it.

    ``args``/``kwargs``: the call's arguments with fake tensors; ``result``: its fake
    result. Raises RuleError if the row does not fit the call.
    """
    rule_or_text = entry.rule(*args, **kwargs) if callable(entry.rule) else entry.rule
    if rule_or_text is None:
        return None
    rule = parse_rule(rule_or_text) if isinstance(rule_or_text, str) else rule_or_text
    if entry.reduce:
        reductions = dict.fromkeys(rule.contracted, entry.reduce) | rule.reduction
        rule = replace(rule, reductions=tuple(reductions.items()))
    results = tensors_of(result)
    operands = tensors_of((args, kwargs))
    dtypes = {x.dtype for x in results}
    # Of whole numbers but bools sums of sums are exact.
    read = {x.dtype for x in operands} | dtypes
    is_exact = torch.bool not in read and all(map(_is_whole, read))
    whole = any(map(_is_whole, dtypes)) and not is_exact
    passages = _passages(entry, args, kwargs, whole)
    evenly = frozenset(rule.factors) if entry.even else rule.evenly
    empty = entry.empty or rule.empty
    passages = rule.passages + passages
    passages = tuple(_of_dtypes(passage, operands, dtypes) for passage in passages)
    passages = tuple(passage for passage in passages if passage.reductions)
    rule = replace(rule, passages=passages, evenly=evenly, empty=empty)
    shapes = [tuple(t.shape) for t in [*operands, *results]]
    return rule.with_sizes(shapes)


def _of_dtypes(
    passage: Passage, operands: Sequence[torch.Tensor], results: Collection[torch.dtype]
) -> Passage:
    """Return the passage restricted to reductions that are exact for results of these
    dtypes. Where a dtype that wraps is cast, only maxima and minima survive; so too for
    sums of bools, which are True where any is."""
    read = {operands[i].dtype for i in passage.operands}
    changed = [dtype for dtype in read if {dtype} != results]
    # 64-bit integers, used as counts, do not leave their range in practice.
    if not any(_is_whole(dtype) and dtype.itemsize < 8 for dtype in changed):
        return passage
    reductions = tuple(op for op in passage.reductions if op in MONOTONE)
    return replace(passage, reductions=reductions)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def names(n: int, prefix: str = "d") -> list[str]:
    """Return ``n`` factor names."""
    return [f"{prefix}{i}" for i in range(n)]


_TOKEN = re.compile(r"\(([^()]*)\)|(~[A-Za-z]\w*|[A-Za-z]\w*!?|_)|(\S)")
_FORM = 'write factors as in "m k, k n -> m n"; `k!` whole, `_` none, `(a b)` compound'


def parse_rule(text: str) -> Rule:
    """Return the rule that a text describes, without sizes. Raises RuleError naming the
    malformed part."""
    operand_text, arrow, result_text = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", fix=_FORM)

    def words(part: str) -> list[Word]:
        tokens = _TOKEN.findall(part)
        for junk in [x for _, _, x in tokens if x]:
            raise RuleError(f"rule {text!r}: unexpected {junk!r}", fix=_FORM)
        return [word or tuple(group.split()) for group, word, _ in tokens]

    operands = [x.strip() for x in operand_text.split(",") if operand_text.strip()]
    *results, last = result_text.split(",")
    is_open = last.strip() == "~"
    rule = make(
        [words(part.removeprefix("+")) for part in operands],
        [words(part) for part in (results if is_open else [*results, last])],
    )
    if "~" in operand_text:
        raise RuleError(f"rule {text!r}: `~` marks results only", fix=_FORM)
    for dims in rule.operands + rule.results:
        for name, times in Counter(itertools.chain(*dims)).items():
            if times > 1:
                raise RuleError(f"rule {text!r}: {name!r} twice in one tensor")
    accumulates = tuple(i for i, x in enumerate(operands) if x.startswith("+"))
    return replace(rule, accumulates=accumulates, open=is_open)


def text(*tensors: Sequence[str], results: Sequence[Sequence[str]]) -> str:
    """Return rule text from words per dim."""
    operands = ", ".join(" ".join(t) for t in tensors)
    return f"{operands} -> {', '.join(' '.join(t) for t in results)}"


Word = str | tuple[str, ...]


def make(
    operands: Iterable[Sequence[Word]],
    results: Iterable[Sequence[Word]],
    sizes: Mapping[str, int] | None = None,
    passages: Sequence[Passage] = (),
    reductions: Mapping[str, str] | None = None,
) -> Rule:
    """Return the rule of these words; ``sizes`` are needed for compound dims only.
    ``~k`` in a result is no dim: all ranks along ``k`` compute equal results."""
    whole: set[str] = set()

    def factors(word: Word) -> tuple[str, ...]:
        parts = (word,) if isinstance(word, str) else word
        whole.update(part[:-1] for part in parts if part.endswith("!"))
        return tuple(part.rstrip("!") for part in parts if part != "_")

    def tensor(words: Sequence[Word]) -> Dims:
        return tuple(factors(word) for word in words)

    dims: list[list[Word]] = []
    equal_over: set[tuple[int, str]] = set()
    for i, words in enumerate(results):
        dims.append([w for w in words if w[:1] != "~"])
        equal_over |= {(i, str(w[1:])) for w in words if w[:1] == "~"}
    return Rule(
        tuple(tensor(t) for t in operands),
        tuple(tensor(t) for t in dims),
        tuple((sizes or {}).items()),
        frozenset(whole),
        tuple((reductions or {}).items()),
        tuple(passages),
        equal_over=frozenset(equal_over),
    )


def whole(*args: Any, **kwargs: Any) -> Rule:
    """Return the rule of a call all of whose operands and results are whole."""
    operands = [["_"] * x.ndim for x in tensors_of((args, kwargs))]
    return replace(make(operands, []), open=True)


def words_of(
    x: torch.Tensor | Sequence[int], whole: Collection[int] = (), prefix: str = "d"
) -> list[str]:
    """Return a word per dim: ``_`` where the size is 1, whole at the dims in
    ``whole``."""
    shape = x.shape if isinstance(x, torch.Tensor) else x
    return [
        "_" if size == 1 else f"{prefix}{i}" + "!" * (i in whole)
        for i, size in enumerate(shape)
    ]


def keeping(x: torch.Tensor, whole: Collection[int] = (), results: int = 1) -> Rule:
    """Return the rule of results of the shape of ``x``, with the dims in ``whole``
    whole."""
    words = words_of(x, whole)
    return make([words], [words] * results)


def align(shape: Sequence[int], full: Sequence[int], words: Sequence[str]) -> list[str]:
    """Return words of a tensor that broadcasts to ``full``, from the last
    ``len(shape)`` words; a stretched dim has none."""
    skip = len(full) - len(shape)
    pairs = zip(words[skip:], shape, full[skip:], strict=True)
    return [word if n == size else "_" for word, n, size in pairs]


def aligned(
    shapes: Sequence[Sequence[int]], prefix: str = "b"
) -> tuple[list[str], list[list[str]]]:
    """Return (words of the shape that the shapes broadcast to, words of each shape)."""
    full = torch.broadcast_shapes(*shapes)
    words = words_of(full, prefix=prefix)
    return words, [align(shape, full, words) for shape in shapes]


def at(dim: int, ndim: int) -> int:
    """Return a dim counted from the front. A tensor without dims has dim 0, as in
    torch."""
    return dim % max(ndim, 1)


def all_at(dims: int | Sequence[int] | None, ndim: int) -> frozenset[int]:
    """Return dims counted from the front; None and an empty list mean all of them."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return frozenset(range(ndim))
    return frozenset(at(d, ndim) for d in ([dims] if isinstance(dims, int) else dims))


def each(numbers: int | Sequence[int], k: int) -> list[int]:
    """Return one number per dim, where one number may be given for all."""
    values = [numbers] if isinstance(numbers, int) else [*numbers]
    return values * k if len(values) == 1 else values


T = TypeVar("T")


def look_up(table: Mapping[Any, T], target: Any) -> T | None:
    """Return the table's entry for a call's target, by the op or, for ops that are
    registered late, by its name."""
    if target in table:
        return table[target]
    if isinstance(target, _torch.inductor.OpOverload):
        return table.get(target.name())
    return table.get(_torch.aot.higher_order_name(target))


def keys(names: str) -> list[Any]:
    """Return table keys of op names separated by spaces: ``"add.Tensor relu"``.

    An aten op is its overload, if this torch has it. Others are named by text with
    their namespace, ``"prims::exp"``, as they may be registered later than this table.
    """
    overloads: list[Any] = []
    for name in names.split():
        if "::" in name:
            overloads.append(name)
            continue
        packet, _, overload = name.partition(".")
        op = getattr(torch.ops.aten, packet, None)
        op = getattr(op, overload or "default", None)
        if op is not None:
            overloads.append(op)
    return overloads


def rows(
    names: str,
    rule: str | RuleFunction | None,
    *,
    facts: str = "",
    local: Callable[..., Any] | None = None,
    **marks: Any,
) -> dict[Any, Row]:
    """Return the same row for each of the named ops. ``facts``: names of
    ``op_facts.OpFacts`` that are true; ``marks``: fields of Row, and facts that have a
    value. Without a rule, the row states facts of an op that is made whole."""
    values = {mark: marks.pop(mark) for mark in set(marks) - MARKS}
    stated = dict.fromkeys(facts.split(), True) | values
    row = Row(rule, **marks, local=local, facts=stated)
    return dict.fromkeys(keys(names), row)


def by_rank(
    pattern: str,
    ranks: Sequence[int],
    rule: RuleFunction,
    local: Callable[..., Any] | None = None,
    **marks: Any,
) -> dict[Any, Row]:
    """Return rows for ``pattern`` with each number of spatial dims put in, which the
    rule and the local form take as their first argument."""
    out: dict[Any, Row] = {}
    for k in ranks:
        op, form = pattern.format(k), local and partial(local, k)
        out |= rows(op, partial(rule, k), local=form, **marks)
    return out
