"""What is wrong in torch itself: what fxpar does about it, and a test that fails once
it is mended there, so that ours can go."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._decomp import decomposition_table
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor import config as inductor_config
from torch._inductor import dependencies, pattern_matcher
from torch._inductor.scheduler import SchedulerNode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar import _torch
from fxpar._torch import aot, decompositions
from tests.helpers.spawn import Pool, shared_pool
from tests.helpers.training import whole
from tests.helpers.wrapper import code_of

MENDED_2_14 = pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="torch 2.14 is mended"
)


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Inside, no graph that was compiled is taken from a cache; kernels are."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


class Counted(nn.Module):
    """Reads a copy of a buffer, then updates the buffer in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("buf", torch.eye(4) * 2)
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = {
            "clone": lambda b: b.clone().detach(),
            "view": lambda b: b.view(16).clone().view(4, 4),
            "repeat": lambda b: b.repeat(1, 1),
        }
        y = self.linear(x) @ copies[self.how](self.buf)
        self.buf.mul_(3.0)
        return y


def gradients(how: str, **compiler: Any) -> tuple[torch.Tensor, ...]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Counted(how), torch.randn(4, 4, requires_grad=True)
    call = torch.compile(model, **compiler) if compiler else model
    call(x).square().sum().backward()
    return x.grad, model.linear.weight.grad, model.buf.clone()


def ours(how: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    options = {"codegen": "eager"}
    return gradients(how), gradients(how, backend="fxpar", options=options)


@pytest.mark.parametrize("how", ["clone", "view", "repeat"])
def test_a_copy_of_a_buffer_that_is_updated_stays_a_copy(how: str) -> None:
    for want, got in shared_pool(2).run(ours, how, env={"FXPAR_MESH": "dp=2"}):
        torch.testing.assert_close(got, want)


def normed(**compiler: Any) -> list[torch.Tensor]:
    """Gradients behind the spectral norm of a hook, which writes to its vectors."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    last = nn.utils.spectral_norm(nn.Linear(16, 4))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), last).double()
    call = torch.compile(model, **compiler) if compiler else model
    call(torch.randn(8, 8).double()).square().mean().backward()
    return [p.grad for p in model.parameters()]


def normed_here() -> list[torch.Tensor]:
    return normed(backend="fxpar", options={"codegen": "eager"})


def test_what_is_computed_of_a_buffer_that_is_updated_is_saved() -> None:
    want = normed()
    for got in shared_pool(2).run(normed_here, env={"FXPAR_MESH": "dp=2"}):
        torch.testing.assert_close(got, want)


class Scaled(torch.autograd.Function):
    """Computes in its forward what its backward alone needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward((variance + 1e-3).rsqrt())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class Renormed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 6)
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        result = Scaled.apply(y, self.variance)
        with torch.no_grad():
            self.variance.lerp_(y.var(0), 0.5)
        return result


def renormed(**compiler: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Renormed().double()
    call = torch.compile(model, **compiler) if compiler else model
    call(torch.randn(8, 8).double()).square().mean().backward()
    return [p.grad for p in model.parameters()]


def renormed_here(codegen: str) -> list[torch.Tensor]:
    return renormed(backend="fxpar", options={"codegen": codegen})


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_the_backward_alone_reads_of_a_buffer_is_computed_before(
    codegen: str,
) -> None:
    want = renormed()
    for got in shared_pool(2).run(renormed_here, codegen, env={"FXPAR_MESH": "dp=2"}):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_partitioner_computes_it_in_the_backward(backend: str) -> None:
    """If this fails, torch is mended, and ``fxpar::kept_for_backward`` can go."""
    want, got = renormed(), renormed(backend=backend)
    assert any(not torch.allclose(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("of", [lambda **how: gradients("clone", **how), normed])
def test_inductor_reads_the_buffer_again(of: Any) -> None:
    """If this fails, torch is mended: ``keep_read``, or a half of it, ``fxpar::kept``
    and the sentence in docs/limits.md can go; copies are mended in 2.15."""
    if of is not normed and torch.__version__ >= "2.15":
        pytest.skip("torch 2.15 is mended")
    want, got = of(), of(backend="inductor")
    assert any(not torch.allclose(x, y) for x, y in zip(got, want, strict=True))
    torch.testing.assert_close(of(backend="aot_eager"), want)


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y.detach(), y[:, :2]


def detached(at_rest: bool, **compiler: Any) -> list[Any]:
    """Which results have a gradient, and those of parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Halved(8, 6).double()
    model = fxpar.shard(model) if at_rest else model
    call = torch.compile(model, **compiler) if compiler else model
    whole_result, half = call(torch.randn(8, 8).double())
    half.square().mean().backward()
    grads = [p.grad if p.grad is None else whole(p.grad) for p in model.parameters()]
    return [whole_result.requires_grad, half.requires_grad, *grads]


def detached_here(at_rest: bool) -> list[Any]:
    return detached(at_rest, backend="fxpar", options={"codegen": "eager"})


@pytest.mark.parametrize("at_rest", [False, True])
def test_a_view_beside_its_detached_base_has_a_gradient(at_rest: bool) -> None:
    want = detached(False)
    how = {"env": {"FXPAR_MESH": "dp=2"}}
    for got in shared_pool(2).run(detached_here, at_rest, **how):
        assert got[:2] == want[:2] == [False, True]
        torch.testing.assert_close(got[2:], want[2:])


def detached_input() -> list[bool]:
    """The negative twin: which results show the memory of an input."""
    torch._dynamo.reset()
    x = torch.ones(8, 8, requires_grad=True)
    call = torch.compile(
        lambda x: (x.detach(), x[:, :2], x * 2),
        backend="fxpar",
        options={"codegen": "eager"},
    )
    return [y.data_ptr() == x.data_ptr() for y in call(x)]


def test_a_detached_input_is_not_copied() -> None:
    for got in shared_pool(2).run(detached_input, env={"FXPAR_MESH": "dp=2"}):
        assert got == [True, True, False]


@pytest.mark.slow
def test_aotautograd_loses_the_gradient_of_a_view() -> None:
    """If this fails, torch is mended, and ``copy_detached_results`` can go."""
    assert detached(False, backend="inductor")[2:] == [None, None]


class Checkpointed(nn.Module):
    """Attention, which draws random numbers for all that torch knows, made again in the
    backward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 24)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.rows(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attend, x, use_reentrant=False).square().sum()


def attended(mesh: str) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(4, 2, 6, 8, dtype=torch.float64)
    call = model
    if mesh:
        model = fxpar.shard(model, mesh=mesh)
        options = {"mesh": mesh, "codegen": "eager"}
        call = torch.compile(model, backend="fxpar", options=options)
    call(x).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_random_states_are_saved_beside_the_mesh_of_parameters_at_rest() -> None:
    for got in shared_pool(2).run(attended, "dp=2"):
        torch.testing.assert_close(got, attended(""), rtol=1e-9, atol=1e-11)


def unordered() -> str:
    with mock.patch.object(aot, "_objects_of_generators", contextlib.nullcontext):
        try:
            attended("dp=2")
        except AssertionError as error:
            return str(error)
    return ""


@MENDED_2_14
@pytest.mark.slow
def test_torch_puts_random_states_behind_the_mesh() -> None:
    """``_objects_of_generators`` can go with the last torch before 2.14."""
    for error in shared_pool(2).run(unordered):
        assert "expected all tensors_saved_with_vc_check" in error


def summand() -> float:
    """``item()`` of a sum whose summands are 1 on each of two ranks, by torch alone."""
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with mock.patch.dict(handlers):
        handlers.pop(torch.ops.aten._local_scalar_dense.default, None)
        return x.item()


@pytest.mark.multiprocess
def test_torch_gives_a_summand_as_the_item() -> None:
    """If this fails, torch is mended (its issue 166638): ``reduce_before_item`` can
    go."""
    assert shared_pool(2).run(summand) == [1.0, 1.0]


@MENDED_2_14
def test_torch_takes_padding_for_class_0() -> None:
    """Ours of ``multilabel_margin_loss`` can go with the last torch before 2.14."""
    op = torch.ops.aten.multilabel_margin_loss_forward.default
    x, target = torch.tensor([0.1, 0.9, 0.3, 0.4]), torch.tensor([3, -1, 0, 0])
    want = sum((1 - 0.4 + value) / 4 for value in (0.1, 0.9, 0.3))
    ours, theirs = (
        float(table[op](x, target, 1)[0])
        for table in (decompositions.TABLE, decomposition_table)
    )
    assert ours == pytest.approx(want) and theirs > want + 0.1


def dropped_in_a_body(backend: str) -> bool:
    """Whether gradients of a body that draws have the numbers of its forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x * 2.0), torch.sin, (x,))

    x = torch.ones(8, 8, requires_grad=True)
    with compiled_anew():
        y = torch.compile(branches, backend=backend, fullgraph=True)(x)
        y.sum().backward()
    return torch.equal(y != 0, x.grad != 0)


@pytest.mark.slow
def test_one_rank_drops_in_a_backward_what_its_forward_dropped() -> None:
    assert dropped_in_a_body("fxpar")


@pytest.mark.slow
def test_torch_drops_otherwise_in_the_backward_of_a_body() -> None:
    """If this fails, torch is mended: one rank needs no ``calls_rewritten``."""
    assert not dropped_in_a_body("inductor")


def laid_out(x: torch.Tensor, placement: Placement | None = None) -> DTensor:
    return distribute_tensor(x, init_device_mesh("cpu", (2,)), [placement or Shard(0)])


def raises(fn: Any, *args: Any) -> bool:
    try:
        fn(*args)
    except Exception:
        return True
    return False


def lose_nan() -> bool:
    """Whether a maximum loses a NaN of the first rank or of the last."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for place in (0, 1):
        summand = torch.tensor([math.nan if dist.get_rank() == place else 1.0])
        x = DTensor.from_local(summand, mesh, [Partial("max")])
        found.append(bool(x.full_tensor().isnan()))
    return not all(found)


def refuse_penalties() -> bool:
    x, w = torch.ones(3, requires_grad=True), laid_out(torch.ones(4)).requires_grad_()
    return raises((x.square().sum() + w.square().sum()).backward)


def refuse_empty_parts() -> bool:
    """Whether a rank without elements raises, or norms of splits are not complete."""
    x = laid_out(torch.ones(1, 4))
    is_partial = torch.linalg.vector_norm(x).placements[0].is_partial()
    return is_partial or raises(torch._foreach_norm, [x], math.inf)


def keep_old_data() -> bool:
    p = nn.Parameter(laid_out(torch.ones(4)))
    p.data = laid_out(torch.zeros(4))
    return bool(p.full_tensor().any())


def count_separately() -> bool:
    x = laid_out(torch.ones(4))
    before = x.to_local()._version
    x.add_(1)
    return x.to_local()._version == before


def take_groups_for_one() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    other = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    return mesh == other and mesh.get_group() is not other.get_group()


def refuse_masks() -> bool:
    x = laid_out(torch.zeros(4, 4), Shard(1))
    mask = laid_out(torch.eye(4) > 0, Replicate())
    return raises(x.index_put_, (mask,), laid_out(torch.tensor(1.0), Replicate()))


# What DTensors do, by what fxpar changes.
OF_DTENSORS = {
    "dtensor.keep_nan_in_extremes": lose_nan,
    "dtensor.combine_with_plain_numbers": refuse_penalties,
    "dtensor.reduce_norms": refuse_empty_parts,
    "dtensor.on_set_data": keep_old_data,
    "dtensor.count_writes": count_separately,
    "distributed.forget_meshes": take_groups_for_one,
    "dtensor.serve_aliases, its row of index_put_": refuse_masks,
}


def faults_of_dtensors() -> dict[str, bool]:
    return {ours: fault() for ours, fault in OF_DTENSORS.items()}


@pytest.fixture(scope="module")
def faults() -> dict[str, bool]:
    """The faults of torch in ranks where fxpar has changed nothing yet."""
    with Pool(2) as pool:
        ranks = pool.run(faults_of_dtensors)
    return {ours: any(rank[ours] for rank in ranks) for ours in OF_DTENSORS}


@pytest.mark.multiprocess
@pytest.mark.parametrize("ours", OF_DTENSORS)
def test_dtensors_alone_do_otherwise(ours: str, faults: dict[str, bool]) -> None:
    """If one fails, torch is mended: what is named can go."""
    assert faults[ours]


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_a_cross_entropy_on_meta_has_no_gradient() -> None:
    """If this fails, torch is mended: ``as_fake`` can leave tensors on meta there."""
    with FakeTensorMode():
        x = torch.empty(4, 8, device="meta", requires_grad=True)
        target = torch.empty(4, device="meta", dtype=torch.int64)
    joint = aot_export_joint_simple(
        lambda *args: (F.cross_entropy(*args),), (x, target), trace_joint=True
    )
    _, *gradients = joint.graph.output_node().args[0]
    assert gradients == [None, None]


def test_views_of_zeros_without_memory_are_no_fakes() -> None:
    """If this fails, torch is mended: ``_zeros`` of ``_torch.decompositions`` can
    go."""
    with FakeTensorMode():
        zeros = torch._efficientzerotensor((4, 2))
        assert isinstance(zeros, FakeTensor)
        assert not isinstance(zeros.view(8), FakeTensor)


def test_results_of_a_region_that_is_used_again_are_leaves() -> None:
    """If this fails, torch is mended: ``_no_leaves`` can go."""
    pytest.importorskip("torch._dynamo.variables.invoke_subgraph")
    layer = torch.compiler.nested_compile_region(lambda x, w: (x * w).sin())

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, w), w).add_(1)

    x, w = (torch.ones(3, requires_grad=True) for _ in range(2))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="leaf Variable that requires grad"):
        torch.compile(fn, backend="aot_eager", fullgraph=True)(x, w)


@MENDED_2_14
def test_inductor_forgets_writes_where_it_loops_anew() -> None:
    """``_read_after_writes`` can go with the last torch before 2.14."""
    read = dependencies.MemoryDep("before", sympy.Integer(0), (), ())
    node: Any = object.__new__(SchedulerNode)
    node.read_writes = dependencies.ReadWrites(
        OrderedSet([read]), OrderedSet(), OrderedSet()
    )
    node.mutation_renames = {"before": "after"}
    node._compute_attrs = lambda **_: None
    node.set_read_writes = mock.Mock()
    node.recompute_size_and_body()
    node.set_read_writes.assert_not_called()


def decayed(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return x * (1 - 0.9**count)


def powers_in_loops(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many powers stand in a loop of the C++ that Inductor writes."""
    gm = make_fx(
        lambda *xs: (decayed(*xs),),
        tracing_mode="fake",
        decomposition_table=_torch.inductor.decompositions(),
    )(torch.randn(256, 512), torch.tensor(3.0))
    _, _, loops = code_of(gm.graph, monkeypatch).partition("for(")
    assert loops
    return loops.count("std::pow(")


def test_a_number_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert powers_in_loops(monkeypatch) == 0


def test_inductor_computes_a_number_for_each_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If this fails, torch is mended, and ``_compute_scalars_once`` can go."""
    monkeypatch.setattr(_torch.inductor, "_compute_scalars_once", lambda gm: None)
    assert powers_in_loops(monkeypatch) > 0


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x, x @ y, alpha=0.5)


def lost_by(backend: str) -> float:
    """How far a compiled sum with a scale is from that of eager code."""
    torch._dynamo.reset()
    operands = [torch.ones(4, 4), torch.ones(4, 4)]
    with compiled_anew():
        got = torch.compile(scaled, backend=backend)(*operands)
    return float((got - scaled(*operands)).abs().max())


def test_sums_keep_their_scales() -> None:
    assert lost_by("fxpar") == 0.0


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 is mended")
def test_inductor_loses_the_scale_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, torch is mended, and ``keep_scales`` can go."""
    kind: Any = pattern_matcher._TargetArgsExpr
    _torch.inductor.keep_scales()
    monkeypatch.setattr(kind, "_match", kind._match.__wrapped__)
    assert lost_by("inductor") == 2.0
