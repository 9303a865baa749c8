"""Code that a graph calls by name, edited between two starts or within a process: what
was kept with the old code is not taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxpar import _torch
from fxpar.runtime.caches.known_programs import compile_once
from fxpar.runtime.caches.program_identity import content, fixed_content, name_inputs
from tests.helpers.caches import without_programs
from tests.helpers.spawn import shared_pool

Call = Callable[[torch.Tensor], torch.Tensor]


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def gradient_of_mean(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x / x.numel()


def total(x: torch.Tensor) -> torch.Tensor:
    """What ``mean`` is edited to."""
    return (3.0 * x).square().sum()


def gradient_of_total(x: torch.Tensor) -> torch.Tensor:
    return 18.0 * x


GRADIENTS = {mean: gradient_of_mean, total: gradient_of_total}


def plain(body: Call) -> Call:
    """Code that Dynamo traces."""
    return body


def allowed(body: Call) -> Call:
    """A function that Dynamo does not look into."""

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return body(x)

    return torch._dynamo.allow_in_graph(reduced)


def in_checkpoint(body: Call) -> Call:
    reduced = allowed(body)

    def region(x: torch.Tensor) -> torch.Tensor:
        return reduced(x.sin())

    return lambda x: checkpoint(region, x, use_reentrant=False)


def function(body: Call) -> Call:
    """An autograd Function that Dynamo does not look into."""

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return body(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * GRADIENTS[body](x)

    torch._dynamo.allow_in_graph(Reduced)
    return Reduced.apply


def composite(body: Call) -> Call:
    """An op that is traced through."""
    for library in _LIBRARIES:
        library._destroy()
    library = torch.library.Library("edited_composite", "FRAGMENT")
    library.define("reduced(Tensor x) -> Tensor")
    library.impl("reduced", body, "CompositeImplicitAutograd")
    _LIBRARIES[:] = [library]
    return torch.ops.edited_composite.reduced


_LIBRARIES: list[Any] = []


def custom(body: Call) -> Call:
    """An op whose gradient is written by hand."""

    @torch.library.custom_op("edited::reduced", mutates_args=())
    def reduced(x: torch.Tensor) -> torch.Tensor:
        return body(x)

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * GRADIENTS[body](x)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    reduced.register_fake(lambda x: x.new_empty(()))
    reduced.register_autograd(backward, setup_context=keep)
    return reduced


@pytest.fixture(autouse=True)
def nothing_traced() -> None:
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, reduced: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.reduced = nn.Linear(8, 8), reduced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduced(self.one(x))


def step(
    kind: Callable[[Call], Call], body: Call, inputs: str, mesh: str
) -> list[torch.Tensor]:
    """The loss of a step and its gradients."""
    model = Model(kind(body))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    fed = x.chunk(2)[dist.get_rank()] if inputs == "local" else x
    options = {"mesh": mesh, "inputs": inputs}
    loss = torch.compile(model, backend="fxpar", options=options)(fed)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def starts(
    folders: list[str], kind: Callable[[Call], Call], inputs: str, mesh: str = "dp=2"
) -> list[float]:
    """How far a step is from the same step where nothing is kept: before the code is
    edited, and after."""
    apart = []
    for folder, body in zip(folders, (mean, total), strict=True):
        steps = []
        for each in (folder, folders[0]):
            with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=each):
                torch.compiler.reset()
                steps.append(step(kind, body, inputs, mesh))
        pairs = zip(*steps, strict=True)
        apart.append(max(float((a - b).abs().max()) for a, b in pairs))
    return apart


KINDS = (allowed, in_checkpoint, function, composite, custom)
IN_BRIEF = ((custom, "global"),)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        *IN_BRIEF,
        *(
            pytest.param(kind, inputs, marks=pytest.mark.slow)
            for kind in KINDS
            for inputs in ("global", "local")
            if (kind, inputs) not in IN_BRIEF
        ),
    ],
)
def test_the_next_start_runs_the_new_code(
    tmp_path: Path, kind: Callable[[Call], Call], inputs: str
) -> None:
    folders = [without_programs(tmp_path / name) for name in ("kept", "new")]
    for apart in shared_pool(2).run(starts, folders, kind, inputs, timeout=300.0):
        assert max(apart) < 1e-5


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_rank_runs_the_new_code_too(tmp_path: Path) -> None:
    """Torch's own cache would give the backward that a custom op had before."""
    folders = [without_programs(tmp_path / name) for name in ("kept", "new")]
    (apart,) = shared_pool(2).run(
        starts, folders, custom, "global", "dp=1", ranks=1, timeout=300.0
    )
    assert max(apart) < 1e-5


def traced(fn: Callable[..., Any], *args: torch.Tensor) -> list[Any]:
    """What Dynamo gives a backend: a graph, its inputs and their names."""
    given: list[Any] = []

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        given.extend((gm, name_inputs(gm.graph, examples), examples))
        return gm.forward

    run = torch.compile(lambda *args: fn(*args), backend=backend)
    run(*(args or (torch.ones(4, 4),)))
    return given


@pytest.mark.parametrize("kind", KINDS)
def test_what_calls_code_by_name_has_no_text(kind: Callable[[Call], Call]) -> None:
    assert fixed_content(*traced(kind(mean))) is None


def choosing(policy: CheckpointPolicy) -> Call:
    """A checkpointed region whose code says for each op whether its result is saved."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: policy)

    return lambda x: checkpoint(mean, x, use_reentrant=False, context_fn=contexts)


def test_what_a_checkpoint_saves_has_no_text() -> None:
    """And two regions that differ in it alone are two programs of a process."""
    x = torch.ones(4, 4, requires_grad=True)
    policies = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
    first, second = (traced(choosing(policy), x) for policy in policies)
    assert fixed_content(*first) is None
    assert content(*first) == content(*first) != content(*second)


def with_bodies(x: torch.Tensor) -> torch.Tensor:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2.0 * gradient

    x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    with torch.no_grad():
        y = checkpoint(plain(mean), x, use_reentrant=False)
    with torch.autocast("cpu"):
        z = torch.nn.functional.gelu(x @ x)
    return Twice.apply(x) + y + z + torch.vmap(torch.sin)(x)


@pytest.mark.slow
def test_what_torch_and_bodies_say_has_a_text() -> None:
    text = fixed_content(*traced(with_bodies, torch.ones(4, 4, requires_grad=True)))
    assert text is not None and "cond" in text and "autograd_function_apply" in text


def graph_of(target: Any, *args: Any) -> fx.Graph:
    graph = fx.Graph(nn.Module())
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    graph.output((graph.call_function(target, (x, *args)),))
    return graph


@pytest.mark.parametrize(
    "call",
    [
        (triton_kernel_wrapper_mutation,),
        (torch.ops.aten.sum, plain),
        (torch.ops.aten.sum, mock.Mock()),
        (str.upper.__get__("x"),),
    ],
    ids=["triton", "a function", "an object", "a method"],
)
def test_kernels_and_arguments_of_the_users_have_no_text(call: tuple[Any, ...]) -> None:
    assert not _torch.node_texts.is_complete(graph_of(*call))
    assert _torch.node_texts.is_complete(graph_of(torch.ops.aten.sum, 1, [2.0]))


def test_other_bits_of_an_input_are_another_text() -> None:
    gm, names, _ = given = traced(torch.view_as_real, torch.ones(4, dtype=torch.cfloat))
    conj = [torch.ones(4, dtype=torch.cfloat).conj()]
    assert fixed_content(*given) != fixed_content(gm, names, conj) is not None


def test_functions_of_one_name_are_not_one_program() -> None:
    """Also within a process, where graphs of one text share what was compiled."""
    first, second, again = (traced(allowed(body)) for body in (mean, total, mean))
    assert len({content(*each) for each in (first, second, again)}) == 3
    assert content(*first) == content(*first)
    same = [content(*traced(mean)) for _ in range(2)]
    assert same[0] == same[1]


def text_for_inductor(op: Any) -> Any:
    return compile_once(graph_of(op), "forward", lambda text: text)


def test_what_inductor_reads_of_an_op_is_in_its_key() -> None:
    texts = set()
    for tags in ((), (torch.Tag.needs_exact_strides,)):
        with torch.library._scoped_library("edited_tags", "FRAGMENT") as library:
            library.define("op(Tensor x) -> Tensor", tags=tags)
            texts.add(text_for_inductor(torch.ops.edited_tags.op.default))
            delattr(torch.ops.edited_tags, "op")
    assert len(texts) == 2 and None not in texts


def test_an_op_with_a_lowering_of_the_users_is_not_kept(tmp_path: Path) -> None:
    from torch._inductor.lowering import lowerings

    op = custom(mean)._opoverload
    assert text_for_inductor(op) is not None
    settings: list[bool] = []

    def compiled(*_: Any, **__: Any) -> None:
        settings.append(torch._inductor.config.fx_graph_cache)

    with (
        mock.patch.dict(lowerings, {op: None}),
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", compiled),
    ):
        assert text_for_inductor(op) is None
        for target in (op, torch.ops.aten.relu.default):
            _torch.inductor.compile_inner(
                fx.GraphModule(nn.Module(), graph_of(target)), []
            )
    assert settings == [False, True]
