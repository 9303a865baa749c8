"""Which module each op belongs to, for those who read a plan; nothing is decided by it.

In: a Program. Out: per op ``forward/layers.0.mlp`` or ``backward/layers.0.mlp``, where
the path is empty for what belongs to no module. Never changes the program.

Dynamo notes the modules a node was called in. A graph that was traced without it is
read by its parameters: an op that reads ``layers.0.mlp.weight`` belongs to
``layers.0.mlp``, one between two such ops to what both have in common, or to the layer
whose calls its own source lines share. An op of the backward belongs to the module of
the forward op that autograd made it for, which has the same ``seq_nr``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import Any

from torch import fx

from fxpar.sharding.program import Op, Program, backward_of

Path = tuple[str, ...]

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_ROOT = re.compile(r"^L\['\w+'\]")
_KEY = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")


def owners(program: Program) -> list[str]:
    """Phase and module path of each op, in order."""
    ops = program.ops
    nodes = backward_of(ops[0].node.graph) if ops else set()
    late = [op.node in nodes for op in ops]
    paths = [_noted(op.node) for op in ops]
    forward = [op.index for op in ops if not late[op.index]]
    if any(path is not None for path in paths):
        for i in forward:
            paths[i] = paths[i] or ()
    else:
        for i, path in _readers(program).items():
            paths[i] = None if late[i] else path
        _fill([ops[i] for i in forward], paths)
    made_by: dict[Any, Path | None] = {}
    for i in forward:
        # The first with a number is the one that autograd saw: later ones, which need
        # no gradient, carry the number of the last that did.
        made_by.setdefault(ops[i].node.meta.get("seq_nr"), paths[i])
    backward = [op.index for op in ops if late[op.index]]
    for i in backward:
        # A sum of gradients has the number of whatever autograd saw last.
        if paths[i] is None and not ops[i].node.meta.get("is_gradient_acc"):
            paths[i] = made_by.get(ops[i].node.meta.get("seq_nr"))
    _fill([ops[i] for i in backward], paths)
    return [
        ("backward/" if is_late else "forward/") + ".".join(path or ())
        for is_late, path in zip(late, paths, strict=True)
    ]


def _noted(node: fx.Node) -> Path | None:
    """The path of the innermost module that tracing noted, ``L['self']`` cut off."""
    stack = next((node.meta[key] for key in _STACKS if node.meta.get(key)), None)
    if not stack:
        return None
    text, _ = list(stack.values())[-1]
    text = _KEY.sub(r".\1", _ROOT.sub("", text))
    return tuple(part for part in text.split(".") if part)


def _readers(program: Program) -> dict[int, Path]:
    """Ops that read a parameter or buffer, or what was made of one alone."""
    owned: dict[int, Path] = {}
    for declared, v in zip(program.signature.inputs, program.inputs, strict=True):
        if v is not None and declared.kind in ("parameter", "buffer"):
            owned[v] = tuple(declared.name.split("."))[:-1]
    out = {}
    for op in program.ops:
        paths = [owned[v] for v in op.operands if v in owned]
        if paths:
            out[op.index] = paths[0]
            if len(paths) == len(op.operands):
                owned |= dict.fromkeys(op.results, paths[0])
    return out


def _fill(ops: Sequence[Op], paths: list[Path | None]) -> None:
    """Modules of the ops that have none yet, from their neighbours that have: what
    both share, or below it the layer of the one that more source lines are shared with,
    of the earlier one in doubt."""
    labelled = [k for k, op in enumerate(ops) if paths[op.index] is not None]
    frames = [_frames(op.node) for op in ops]
    layers = _layers(path for path in paths if path is not None)
    for a, b in pairwise([None, *labelled, None]):
        before = paths[ops[a].index] or () if a is not None else ()
        after = paths[ops[b].index] or () if b is not None else ()
        for k in range(0 if a is None else a + 1, len(ops) if b is None else b):
            like_a = len(frames[k] & frames[a]) if a is not None else 0
            like_b = len(frames[k] & frames[b]) if b is not None else 0
            path = after if like_b > like_a else before
            shared = _shared(before, after)
            inner = (path[:end] for end in range(len(shared) + 1, len(path) + 1))
            paths[ops[k].index] = next((p for p in inner if p in layers), shared)


def _layers(paths: Iterable[Path]) -> set[Path]:
    """Modules named by a number that hold modules, as layers do."""
    heads = (path[:end] for path in set(paths) for end in range(1, len(path)))
    return {head for head in heads if head[-1].isdigit()}


def _shared(a: Path, b: Path) -> Path:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(part for part, _ in same)


def _frames(node: fx.Node) -> frozenset[tuple[str, str]]:
    return frozenset(_FRAME.findall(node.meta.get("stack_trace") or ""))
