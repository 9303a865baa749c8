"""Facts of ops: every op of the rule table has them, and they stand in one place."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # registers them

import fxpar
from fxpar import _torch
from fxpar.features.experts import local_experts  # noqa: F401  (registers ops)
from fxpar.features.stages import sums_of_parts  # noqa: F401  (registers ops)
from fxpar.graph import custom_ops  # noqa: F401  (registers ops)
from fxpar.sharding.op_facts import OpFacts, name_of, op_facts_of
from fxpar.sharding.ops import FACTS, FAMILIES, TABLE

aten, prims = torch.ops.aten, torch.ops.prims
ROOT = Path(fxpar.__file__).parent

# Tables of forms of ops, which are no facts: how one call is made local, rewritten, or
# written as an expression of a kernel.
FORMS = {
    "_fast/known_values.py",  # views that lie where their operand does
    "_torch/decompositions.py",  # ops by others that keep dims apart
    "_torch/dtensor.py",  # calls of DTensors that are handled otherwise
    "features/uneven/normalize_shifts.py",  # how rows of a node are read
    "features/experts/normalize_experts.py",  # calls that put rows in order, and back
    "passes/normalize/body_seeds.py",  # how ops draw by index
    "passes/own_shard.py",  # how ops take an offset that is known when they run
    "fusion/kernels/expressions.py",  # how ops are written in Triton
    "fusion/kernels/placement.py",
    "passes/simulate/loop_steps.py",  # calls that read a loop's steps and spell no size
}

# Families whose rules say nothing of what their ops cost: an op has facts by torch, or
# its row states some, or it is one of those listed here, of which there is none.
UNSAID = ("views", "slicing", "indexing", "sources")
LIGHT = {
    *("aten.unfold_backward", "prims.fill"),
    *(f"aten.replication_pad{k}d_backward" for k in (1, 2, 3)),
    *("aten.bucketize", "aten.searchsorted", "aten.masked_scatter"),
    "aten.masked_scatter_backward",
}


def resolved(key: Any) -> Any:
    """The op of a table's key; None of what is registered elsewhere."""
    if not isinstance(key, str):
        return key
    space, _, name = key.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None)
    return getattr(packet, "default", None)


def in_unsaid_families() -> Iterator[Any]:
    for module in FAMILIES:
        if module.__name__.rpartition(".")[2] in UNSAID:
            yield from filter(None, map(resolved, module.ROWS))


def test_every_op_of_the_table_has_facts() -> None:
    """By torch, by the family of its rule, or by a row; what has none is named."""
    assert {m.__name__.rpartition(".")[2] for m in FAMILIES} > set(UNSAID)
    missing = {
        name_of(op)
        for op in in_unsaid_families()
        if op_facts_of(op) == OpFacts() and name_of(op) not in LIGHT
    }
    assert not missing, "say in the rows of these what holds of them: see op_facts"


def test_what_has_no_facts_is_named_for_a_reason() -> None:
    without = {
        name_of(op) for op in in_unsaid_families() if op_facts_of(op) == OpFacts()
    }
    assert without >= LIGHT


# Ops that Inductor decomposes in some calls only, or that passes and local forms add,
# or that graphs have which users trace for a schedule.
LEFT = """
    _log_softmax _softmax _to_copy _unsafe_index_put _unsafe_view
    adaptive_max_pool2d adaptive_max_pool3d add addmm amax amin arange bernoulli bmm
    cat cauchy clamp conj_physical convolution_backward detach
    embedding_dense_backward exponential flip floor_divide full full_like gelu
    gelu_backward geometric index_add index_reduce index_select lerp log_normal
    logaddexp logsumexp masked_scatter max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices mm native_dropout
    native_layer_norm normal rand_like randint randint_like randn_like round rsub
    sigmoid_backward silu silu_backward sinc square stack t tanh_backward
    threshold_backward transpose unfold_backward where zeros
"""


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="its tables")
def test_no_row_is_of_an_op_that_no_graph_has() -> None:
    """What Inductor always decomposes never is in a graph that is planned."""
    decomposed = {
        op.name().removeprefix("aten::").partition(".")[0]
        for op in _torch.inductor.decompositions()
        if op in TABLE
    }
    assert decomposed <= set(LEFT.split())


def test_an_op_has_one_row() -> None:
    rows = Counter(key for module in FAMILIES for key in module.ROWS)
    assert [key for key, count in rows.items() if count > 1] == []


def test_rows_state_facts() -> None:
    for facts in FACTS.values():
        OpFacts(**facts)


@pytest.mark.parametrize(
    ("op", "fact", "other"),
    [
        (aten.permute.default, "view", aten.clone.default),
        (aten._unsafe_view.default, "reshapes", aten.permute.default),
        (aten.reshape.default, "reshapes", aten.view.dtype),
        (aten.slice.Tensor, "moves", aten.relu.default),
        (aten.hypot.default, "pointwise", aten.cumsum.default),
        (aten.index.Tensor, "gathers", aten.index_put.default),
        (aten.index_put.default, "scatters", aten.slice_scatter.default),
        (aten.full.default, "constant", aten.bernoulli.p),
        (aten.sort.stable, "alone", aten.cumsum.default),
        (aten.split.Tensor, "by_row", aten.flip.default),
        (aten.mul.Tensor, "by_row", aten.bernoulli.p),
        (aten.topk.default, "places", aten.cumsum.default),
        (aten.copy_.default, "mutates", aten.copy.default),
        (aten.randn.default, "draws", torch.ops.fxpar.random.default),
        (torch.ops.fxpar.random.default, "random", aten.full.default),
        (aten.mm.default, "equation", aten._scaled_mm.default),
        (
            torch.ops._c10d_functional.all_reduce.default,
            "communicates",
            aten.sum.default,
        ),
    ],
)
def test_a_fact_holds_of_one_op_and_not_of_another(
    op: Any, fact: str, other: Any
) -> None:
    assert getattr(op_facts_of(op), fact)
    assert not getattr(op_facts_of(other), fact)


def sets_of_ops(source: str) -> Iterator[int]:
    """Lines of literal sets, lists, tuples and dicts of three or more ops, or of their
    names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            items: list[Any] = list(node.elts)
        elif isinstance(node, ast.Dict):
            items = list(node.keys)
        else:
            continue
        texts = [ast.unparse(item) for item in items if item is not None]
        texts = [text.strip("\"'") for text in texts]
        ops = [t for t in texts if t.startswith(("aten.", "prims.", "torch.ops."))]
        if sum("aten" in t or "prims" in t for t in ops) > 2:
            yield node.lineno


def test_no_module_outside_the_rules_keeps_a_set_of_ops() -> None:
    kept = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("sharding/ops/"):
            kept |= {name for _ in sets_of_ops(path.read_text())}
    assert kept == FORMS, "make it a fact of ops: fxpar/sharding/op_facts.py"


def test_a_set_of_ops_is_seen() -> None:
    assert list(sets_of_ops("X = {aten.view.default, aten.mm.default, aten.t.default}"))
    assert list(sets_of_ops("X = {aten.mm: 0, aten.bmm: 0, torch.ops.aten.addmm: 1}"))
    assert list(sets_of_ops("X = {'aten.view.default', 'aten.t.default', 'aten.mm'}"))
    assert not list(sets_of_ops("X = {aten.mm.default, aten.bmm.default, other}"))
