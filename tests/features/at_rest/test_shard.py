"""What ``fxpar.shard`` makes of a module, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import (
    FxparError,
    FxparWarning,
    HintError,
    MeshError,
    OptionError,
    PlanError,
    ShardError,
)
from fxpar.features.at_rest.shard import is_sharded
from fxpar.features.at_rest.sharded_modules import (
    Home,
)
from fxpar.runtime.ranks.groups import HOME
from tests.helpers.spawn import shared_pool
from tests.helpers.training import whole

multiprocess = pytest.mark.multiprocess


class Layer(nn.Linear):
    """Of the user's own class."""

    def twice(self) -> torch.Tensor:
        return self.weight * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layer = Layer(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_parameter("nothing", None)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.words(ids))) * self.scale)


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(mesh: str = "dp=2,tp=2") -> Any:
    return fxpar.shard(made(), mesh=mesh)


def ids() -> torch.Tensor:
    return torch.arange(16)


def compiled(model: Any, mesh: str | None = "dp=2,tp=2") -> Any:
    options = {"codegen": "eager"} | ({"mesh": mesh} if mesh else {})
    return torch.compile(model, backend="fxpar", options=options)


def everywhere(fn: Callable[[], Any], **how: Any) -> None:
    """Run a check on four ranks, or on so many ``ranks``."""
    shared_pool(4).run(fn, **how)


def caught(name: str) -> Exception | None:
    """What a check of this file raises, which all ranks do at the same place."""
    try:
        globals()[name]()
    except Exception as error:
        return error.with_traceback(None)
    return None


def refused(fn: Callable[[], Any], kind: type[FxparError], *words: str, **how: Any):
    """Every rank raises ``kind``; the message has all words and says what to do."""
    for error in shared_pool(4).run(caught, fn.__name__, **how):
        assert isinstance(error, kind), repr(error)
        assert error.fix
        for word in words:
            assert word in str(error), str(error)


class Halves(Layer):
    """Halves its weight in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.weight.view(-1).mul_(0.5)
        return y


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Rescaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return super().forward(x)


class Grouped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_([self.weight, self.bias], 0.5)
        return super().forward(x)


class GroupedByName(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_(self=[self.weight, self.bias], scalar=0.5)
        return super().forward(x)


class GroupedByOverload(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.ops.aten._foreach_mul_.Scalar([self.weight, self.bias], 0.5)
        return super().forward(x)


class Broken(nn.Linear):
    """Its parameters leave a graph and are read by the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        torch._dynamo.graph_break()
        return x @ weight.t() + bias


def written_in_the_forward(cls: type[nn.Linear], param_dtype: str | None) -> None:
    torch._dynamo.reset()
    model = fxpar.shard(nn.Sequential(cls(8, 8)), mesh="dp=2")
    how = {"mesh": "dp=2", "codegen": "eager", "param_dtype": param_dtype}
    torch.compile(model, backend="fxpar", options=how)(torch.ones(4, 8))


def averaged_by_data() -> None:
    """The first of two values that uncompiled code has read is written."""

    class Averaged(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, bias = self.weight, self.bias
            weight.data.mul_(bias.mean())
            return x * self.bias

    fxpar.shard(Averaged(8, 8), mesh="dp=2")(torch.ones(4, 8))


def written_once() -> None:
    """A forward that no longer writes is not refused."""

    class Once(nn.Linear):
        writes = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight
            if self.writes:
                weight.data.mul_(2)
            return x * self.bias

    model = fxpar.shard(Once(8, 8), mesh="dp=2")
    with pytest.raises(ShardError):
        model(torch.ones(4, 8))
    model.writes = False
    model(torch.ones(4, 8))


def moved_across_a_break() -> None:
    """Code between graphs that takes a parameter as its module holds it, a DTensor."""

    class Decays(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for p in self.parameters():
                    p.data = p.data * 0.5 + p.data.norm()
            return super().forward(x)

    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x = Decays(8, 8), torch.ones(4, 8)
    model = fxpar.shard(copy.deepcopy(plain), mesh="dp=2")
    run = compiled(model, "dp=2")
    for _ in range(2):
        torch.testing.assert_close(run(x), plain(x))
        torch.testing.assert_close(model.weight.full_tensor(), plain.weight)


def read_by_data() -> None:
    """A detached copy may be written to."""
    torch._dynamo.reset()

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.weight.data.clone().abs_().max()
            return super().forward(x) / scale

    model = fxpar.shard(nn.Sequential(Scaled(8, 8)), mesh="dp=2")
    how = {"mesh": "dp=2", "codegen": "eager"}
    x = torch.ones(4, 8)
    whole = model(x)
    torch.testing.assert_close(
        torch.compile(model, backend="fxpar", options=how)(x), whole
    )


def read_across_a_break() -> None:
    torch._dynamo.reset()
    model = fxpar.shard(nn.Sequential(Broken(8, 8), nn.Linear(8, 8)), mesh="dp=2")
    how = {"mesh": "dp=2", "codegen": "eager"}
    compiled, x = torch.compile(model, backend="fxpar", options=how), torch.ones(4, 8)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))


def renormalized_in_the_forward() -> None:
    torch._dynamo.reset()
    model = fxpar.shard(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), mesh="dp=2")
    how = {"mesh": "dp=2", "codegen": "eager"}
    torch.compile(model, backend="fxpar", options=how)(torch.arange(4))


@multiprocess
def test_a_parameter_that_the_forward_writes() -> None:
    """It would write to the global value, which is gone after the graph."""
    pool, words = shared_pool(2), "the forward writes to a parameter"
    runs = [
        pool.errors(written_in_the_forward, Halves, None),
        pool.errors(written_in_the_forward, Clamped, None),
        pool.errors(written_in_the_forward, Rescaled, "bfloat16"),
        pool.errors(written_in_the_forward, Grouped, None),
        pool.errors(written_in_the_forward, GroupedByName, None),
        pool.errors(written_in_the_forward, GroupedByOverload, None),
        pool.errors(averaged_by_data),
        pool.errors(renormalized_in_the_forward),
    ]
    for error in (error for errors in runs for error in errors):
        assert isinstance(error, ShardError) and words in str(error), repr(error)
    pool.run(read_by_data)
    pool.run(read_across_a_break)
    pool.run(moved_across_a_break)
    pool.run(written_once)


def penalized(inputs: str) -> dict[str, torch.Tensor]:
    """Gradients of a loss of a model's outputs, and of its weights outside of it."""
    plain, (x, y) = made(), torch.randint(16, (2, 4))
    model, run = copy.deepcopy(plain), plain
    plain.norm = model.norm = nn.Identity()
    if inputs:
        model = fxpar.shard(model, mesh="dp=2")
        options = {"mesh": "dp=2", "codegen": "eager", "inputs": inputs}
        run = torch.compile(model, backend="fxpar", options=options)
        if inputs == "local":
            x, y = (each.chunk(2)[dist.get_rank()] for each in (x, y))
    else:
        model = plain
    loss = nn.functional.cross_entropy(run(x), y)
    loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss = 0.01 * model.layer.weight.abs().sum() - loss + 3 * loss.detach()
    (loss / 2).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@multiprocess
@pytest.mark.parametrize(
    "inputs", [pytest.param("global", marks=pytest.mark.slow), "local"]
)
def test_a_loss_plus_a_penalty_on_weights(inputs: str) -> None:
    want = penalized("")
    for got in shared_pool(2).run(penalized, inputs):
        torch.testing.assert_close(got, want)


def a_parameter_that_gets_another_name() -> tuple[bool, bool]:
    layer: Any = fxpar.shard(nn.Linear(8, 8), mesh="dp=2")
    weight = layer.weight
    del layer._parameters["weight"]  # as torch.nn.utils.prune does
    gone = hasattr(layer, "weight")
    layer.register_parameter("weight", weight)
    return gone, layer.weight is weight


@multiprocess
def test_a_parameter_that_gets_another_name() -> None:
    """It is missing as any attribute is, so that the reason of an error is seen."""
    both = shared_pool(2).run(a_parameter_that_gets_another_name)
    assert both == [(False, True)] * 2


def data_that_are_set() -> list[Any]:
    """What a parameter at rest holds after ``.data = ``: values, parts, DTensors."""
    torch._dynamo.reset()
    model = fxpar.shard(nn.Linear(8, 8), mesh="dp=2")
    how = {"mesh": "dp=2", "codegen": "eager"}
    compiled, x = torch.compile(model, backend="fxpar", options=how), torch.ones(4, 8)
    compiled(x)
    rows = torch.arange(64.0).view(8, 8)
    model.weight.data = rows
    model.bias.data = torch.zeros(8)
    torch.testing.assert_close(compiled(x), x @ rows.t())
    ema = model.weight.detach().clone() * 2
    model.weight.data = ema.data
    torch.testing.assert_close(compiled(x), x @ rows.t() * 2)
    with torch.no_grad():
        model.weight.mul_(0.5)
    assert torch.equal(whole(ema), rows), "it has the memory of what it was set to"
    model.weight.data = model.weight.redistribute(placements=[Replicate()]) + 1
    torch.testing.assert_close(compiled(x), x @ (rows + 1).t())
    with pytest.raises(ShardError, match=r"\[8, 8\], is set to .*\[4, 8\]"):
        model.weight.data = torch.ones(4, 8)
    return [model.weight.to_local().shape, model.weight.placements]


@multiprocess
def test_data_that_are_set() -> None:
    """On torch 2.13 a DTensor goes on with what it held."""
    for shape, placements in shared_pool(2).run(data_that_are_set):
        assert (shape, placements) == ((4, 8), (Shard(0),))


def home_of_model(model: nn.Module) -> Home:
    home: Home = model.__dict__[HOME]
    return home


def calls_that_write(local: bool) -> list[tuple[str, list[str]]]:
    """What eager calls raise, in each mode of gradients, and what is left alone."""
    seen = []
    modes = contextlib.nullcontext, torch.no_grad, torch.inference_mode
    for mode in modes if local else modes[:1]:
        for layer, x in (
            (Halves(8, 8), torch.ones(4, 8)),
            (Rescaled(8, 8), torch.ones(4, 8)),
            (nn.Embedding(8, 4, max_norm=1.0), torch.arange(4)),
            (Clamped(8, 8), torch.ones(4, 8)),
        ):
            model = fxpar.shard(nn.Sequential(layer), mesh="dp=2")
            home_of_model(model).local = local
            errors = []
            for part in (model, model[0], model[0]):
                try:
                    with mode():
                        part(x)
                except ShardError as e:
                    errors.append(str(e))
            seen.append((type(layer).__name__, errors))
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        with mode():
            fxpar.shard(nn.Sequential(spectral), mesh="dp=2")(torch.ones(4, 8))
    return seen


@multiprocess
@pytest.mark.parametrize("local", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_parameter_that_an_eager_forward_writes(local: bool) -> None:
    """At the end of the model's forward; of a part's, when it is called again, or reads
    what it set the data of."""
    for seen in shared_pool(2).run(calls_that_write, local):
        assert len(seen) == (12 if local else 4)
        for name, errors in seen:
            by_data = name in ("Rescaled", "Clamped")
            assert len(errors) == 2 + by_data, (name, errors)
            for error in errors:
                assert f"{name}.weight" in error and __file__ in error, error


def sparse_gradient(local: bool) -> None:
    model = fxpar.shard(nn.Embedding(8, 4, sparse=True), mesh="dp=2")
    home_of_model(model).local = local
    model(torch.arange(4)).sum().backward()


@multiprocess
@pytest.mark.parametrize("local", [False, True])
def test_a_sparse_gradient(local: bool) -> None:
    for error in shared_pool(2).errors(sparse_gradient, local):
        assert isinstance(error, ShardError) and "sparse=False" in str(error)


# What a sharded module is


def a_module_of_the_same_kind() -> None:
    plain, model = made(), made()
    same = fxpar.shard(model, mesh="dp=2,tp=2")
    assert same is model
    assert is_sharded(model) and not is_sharded(plain)
    assert is_sharded(torch.compile(model, backend="fxpar"))
    assert type(model) is not Model and isinstance(model, Model)
    assert isinstance(model.layer, Layer) and isinstance(model.layer, nn.Linear)
    for a, b in zip(plain.modules(), model.modules(), strict=True):
        assert type(a).__name__ == type(b).__name__
        assert type(a).__qualname__ == type(b).__qualname__
        assert type(a).__module__ == type(b).__module__
        assert repr(a) == repr(b)
    for kind in ("named_parameters", "named_buffers", "named_modules"):
        names = [name for name, _ in getattr(plain, kind)()]
        assert [name for name, _ in getattr(model, kind)()] == names
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.nothing is None
    assert type(sharded().layer) is type(sharded("dp=4").layer)


@multiprocess
def test_a_sharded_module_is_still_of_its_class() -> None:
    everywhere(a_module_of_the_same_kind)


def parameters() -> None:
    plain, model = made(), sharded()
    for (name, p), (_, want) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter), name
        assert p.is_leaf and p.requires_grad and p.shape == want.shape
        assert p.stride() == want.stride() and p.dtype == want.dtype
        assert torch.equal(p.full_tensor(), want), name
    assert model.layer.weight.to_local().numel() == 8 * 8 // 4
    assert model.scale.to_local().numel() == 1
    assert model.layer.weight.to_local().untyped_storage().nbytes() == 4 * 8 * 8 // 4
    assert not any(isinstance(b, DTensor) for b in model.buffers())
    assert model.head.weight is model.words.weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))


@multiprocess
def test_parameters_are_parts_of_the_same_values() -> None:
    everywhere(parameters)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight)
        return x @ self.weight


def inside_and_outside() -> None:
    torch.manual_seed(0)
    model = Looks()
    want = model.weight.detach().clone()
    fxpar.shard(model, mesh="dp=2")
    assert isinstance(model.weight, DTensor)
    assert model.weight is model._parameters["weight"]
    model(torch.ones(2, 8)).sum().backward()
    (seen,) = model.seen
    assert not isinstance(seen, DTensor) and torch.equal(seen, want)
    assert isinstance(model.weight, DTensor)
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.placements == model.weight.placements
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((8, 4), 2.0))
    with torch.no_grad():
        model.weight.mul_(2.0)  # as init functions and optimizers do
        nn.init.constant_(model.weight, 3.0)
    assert torch.equal(model(torch.ones(1, 8)), torch.full((1, 4), 24.0))


@multiprocess
def test_an_attribute_is_global_inside_a_forward_and_a_dtensor_outside() -> None:
    everywhere(inside_and_outside, ranks=2)


def modes_and_hooks() -> None:
    plain, model = made(), made()
    told: list[Any] = []
    model.layer.register_forward_hook(lambda m, a, out: told.append(tuple(out.shape)))
    model.layer.register_full_backward_hook(lambda m, gi, go: told.append(len(go)))
    fxpar.shard(model, mesh="dp=2,tp=2")
    model.layer.weight.register_hook(lambda g: told.append(type(g).__name__))
    model.eval(), plain.eval()
    assert not model.layer.training
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), plain(ids()))
    model.train(), plain.train()
    assert told == [(16, 8)]
    out, want = model(ids()), plain(ids())
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    assert told[:2] == [(16, 8), (16, 8)]
    assert sorted(told[2:], key=str) == [1, "DTensor"]
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    model.zero_grad()
    assert model.layer.weight.grad is None
    model.requires_grad_(False)
    assert not model(ids()).requires_grad


@multiprocess
def test_modes_and_hooks() -> None:
    everywhere(modes_and_hooks)


def casts() -> None:
    model = sharded().double()
    assert isinstance(model.layer.weight, DTensor)
    assert model.layer.weight.dtype is torch.float64
    assert model.head.weight is model.words.weight
    torch.testing.assert_close(model(ids()), made().double()(ids()))


def cast_when_compiled() -> None:
    model = sharded()
    compiled(model)(ids()).sum().backward()
    model.double()


@pytest.mark.slow
@multiprocess
def test_casts() -> None:
    everywhere(casts)
    words = "converted after a compiled call", "test_shard.py", "before its first call"
    refused(cast_when_compiled, ShardError, *words)


def copies() -> None:
    model = sharded()
    other = copy.deepcopy(model)
    assert type(other) is type(model) and is_sharded(other)
    assert other.head.weight is other.words.weight is not model.words.weight
    torch.testing.assert_close(other(ids()), model(ids()))
    with torch.no_grad():
        other.layer.weight.zero_()
    assert model.layer.weight.full_tensor().abs().sum() > 0
    other(ids()).sum().backward()
    assert model.layer.weight.grad is None
    # As of a plain model, whose copies have no gradients either.
    gradient = other.layer.weight.grad
    third = copy.deepcopy(other)
    assert isinstance(third.layer.weight, nn.Parameter) and is_sharded(third)
    assert third.head.weight is third.words.weight is not other.words.weight
    assert third.layer.weight.grad is None and other.layer.weight.grad is gradient
    torch.testing.assert_close(third(ids()), other(ids()))
    assert copy.copy(other.layer).weight is other.layer.weight
    for pickled in (
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(model),
    ):
        with pytest.raises(ShardError, match="is pickled") as error:
            pickled()
        assert "state_dict" in error.value.fix
    average = torch.optim.swa_utils.AveragedModel(other)
    average.update_parameters(other)
    torch.testing.assert_close(average(ids()), other(ids()))


@multiprocess
def test_deep_copies() -> None:
    everywhere(copies)


def state() -> None:
    model = sharded()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    saved = model.state_dict()
    assert all(isinstance(saved[name], DTensor) for name, _ in model.named_parameters())
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    fresh = sharded()
    fresh.load_state_dict(read)
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor()), name
    # whole tensors, as from a checkpoint of one device: each rank takes its part
    plain = made(seed=1)
    fresh.load_state_dict(plain.state_dict())
    for (name, p), q in zip(fresh.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor) and torch.equal(p.full_tensor(), q), name
    torch.testing.assert_close(fresh(ids()), plain(ids()))
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(
        fresh.layer.weight.full_tensor(), model.layer.weight.full_tensor()
    )
    assert isinstance(fresh.layer.weight, DTensor)


@multiprocess
def test_state_dicts() -> None:
    everywhere(state)


def full_state() -> None:
    from torch.distributed.checkpoint import state_dict as api

    model, plain = sharded(), made()
    options = api.StateDictOptions(full_state_dict=True)
    saved = api.get_model_state_dict(model, options=options)
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name], value), name
    api.set_model_state_dict(model, made(seed=1).state_dict(), options=options)
    torch.testing.assert_close(model(ids()), made(seed=1)(ids()))


@multiprocess
def test_a_full_state_dict_by_the_stock_api() -> None:
    everywhere(full_state)


def functional() -> None:
    model, plain = sharded(), made()
    other = made(seed=1)
    values = {name: p.detach() for name, p in other.named_parameters()}
    values["head.weight"] = values["words.weight"]
    out = torch.func.functional_call(model, values, (ids(),))
    torch.testing.assert_close(out, torch.func.functional_call(plain, values, (ids(),)))
    assert isinstance(model.layer.weight, DTensor)


@multiprocess
def test_functional_call_takes_plain_tensors() -> None:
    everywhere(functional)


def given_a_device_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fxpar.shard(made(), mesh=mesh)
    assert model.layer.weight.device_mesh == mesh


@multiprocess
def test_a_device_mesh_of_the_user_is_the_parameters_own() -> None:
    everywhere(given_a_device_mesh)


def from_the_environment() -> None:
    model = fxpar.shard(made())
    assert model.layer.weight.device_mesh.mesh_dim_names == ("a", "tp")
    out = compiled(model, mesh=None)(ids())
    torch.testing.assert_close(out, made()(ids()))


@pytest.mark.slow
@multiprocess
def test_the_mesh_of_the_environment() -> None:
    everywhere(from_the_environment, env={"FXPAR_MESH": "a=2,tp=2"})


def on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    fxpar.shard(model, mesh="dp=2,tp=2")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert model.layer.weight.to_local().numel() == 8 * 8 // 4
    assert isinstance(model.layer.weight, DTensor)
    assert model.head.weight is model.words.weight
    model.load_state_dict(made().state_dict())
    torch.testing.assert_close(model(ids()), made()(ids()))


@multiprocess
def test_made_on_meta() -> None:
    everywhere(on_meta)


def ranks_differ() -> list[str]:
    model = made(seed=dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxpar.shard(model, mesh="dp=4")
    for p, want in zip(model.parameters(), made().parameters(), strict=True):
        assert torch.equal(p.full_tensor(), want)
    return [str(w.message) for w in caught if w.category is FxparWarning]


@multiprocess
def test_parameters_that_differ_are_taken_from_rank_0() -> None:
    first, *others = shared_pool(4).run(ranks_differ)
    (text,) = first
    assert "parameters differ between ranks, taken from rank 0" in text
    assert "words.weight" in text and "fix: call torch.manual_seed" in text
    assert others == [[]] * 3  # said once


def test_one_process_changes_nothing() -> None:
    model = made()
    assert fxpar.shard(model) is model
    assert type(model) is Model and not is_sharded(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with fxpar.no_sync(model):
        model(ids()).sum().backward()
    assert model.layer.weight.grad is not None
    torch.optim.SGD(model.parameters(), lr=0.1)


def compiled_before() -> None:
    model = made()
    run = compiled(model, "dp=2")
    assert fxpar.shard(run, mesh="dp=2") is run and is_sharded(model)
    before = len(fxpar.plans())
    torch.testing.assert_close(run(ids()), model(ids()))
    assert len(fxpar.plans()) == before + 1


@multiprocess
def test_a_model_compiled_before_stays_compiled() -> None:
    everywhere(compiled_before, ranks=2)


def code_of_two_classes() -> tuple[list[str], bool]:
    """By which Dynamo names what it compiles, and counts how often it did."""
    first, second = (fxpar.shard(x, mesh="dp=2") for x in (made(), nn.Linear(8, 8)))
    codes = [type(x).forward.__code__ for x in (first, second)]
    return [code.co_qualname for code in codes], codes[0] is codes[1]


@multiprocess
def test_each_sharded_class_has_code_of_its_own() -> None:
    for names, is_one in shared_pool(4).run(code_of_two_classes, ranks=2):
        assert names == ["Model.forward", "Linear.forward"] and not is_one


# What is refused


def a_sample_without_keywords() -> None:
    fxpar.shard(made(), mesh="dp=2", sample=(ids(),))  # type: ignore[arg-type]


@multiprocess
def test_a_sample_that_is_no_call() -> None:
    refused(a_sample_without_keywords, ShardError, "(args, kwargs)", ranks=2)


def after_an_optimizer() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.layer.parameters())
    fxpar.shard(model, mesh="dp=2")
    del optimizer


def an_optimizer_of_another_model() -> None:
    other = made()
    optimizer = torch.optim.AdamW(other.parameters())
    fxpar.shard(made(), mesh="dp=2")
    del optimizer


@multiprocess
def test_an_optimizer_made_before() -> None:
    refused(
        after_an_optimizer, ShardError, "AdamW", "after model = fxpar.shard", ranks=2
    )
    everywhere(an_optimizer_of_another_model, ranks=2)


def twice() -> None:
    fxpar.shard(sharded("dp=2"), mesh="dp=2")


def a_part_first() -> None:
    model = made()
    fxpar.shard(model.layer, mesh="dp=2")
    fxpar.shard(model, mesh="dp=2")


@multiprocess
def test_shard_twice() -> None:
    refused(twice, ShardError, "was called on this model before", "once", ranks=2)
    refused(
        a_part_first,
        ShardError,
        "was called on this model before",
        "whole model",
        ranks=2,
    )


def another_mesh_than_the_environment() -> None:
    fxpar.shard(made(), mesh="tp=2")


def the_mesh_of_the_environment() -> None:
    fxpar.shard(made(), mesh="dp=1,tp=2")


def another_mesh_to_compile() -> None:
    compiled(sharded("dp=1,tp=2"), mesh="dp=2")(ids())


class Checkpointed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def the_mesh_of_what_a_checkpoint_reads() -> None:
    model = fxpar.shard(Checkpointed(8, 8), mesh="tp=2")
    x = torch.ones(4, 8)
    torch.testing.assert_close(compiled(model, None)(x), model(x))


def too_large_a_mesh() -> None:
    fxpar.shard(made(), mesh="dp=8")


@multiprocess
def test_meshes_that_differ() -> None:
    two: dict[str, Any] = {"ranks": 2, "env": {"FXPAR_MESH": "dp=1,tp=2"}}
    words = "tp=2", "FXPAR_MESH is dp=1,tp=2", "unset FXPAR_MESH"
    refused(another_mesh_than_the_environment, MeshError, *words, **two)
    everywhere(the_mesh_of_the_environment, **two)
    everywhere(the_mesh_of_what_a_checkpoint_reads, ranks=2)
    words = "sharded over mesh dp=1,tp=2", "for mesh dp=2", "by FXPAR_MESH"
    refused(another_mesh_to_compile, MeshError, *words, ranks=2)
    words = "dp=8 has 8 ranks", "2 processes run"
    refused(too_large_a_mesh, MeshError, *words, ranks=2)


def hinted(hints: Any) -> Any:
    return fxpar.shard(made(), mesh="dp=2,tp=2", hints=hints)


def hint_without_a_match() -> None:
    hinted({"layer.weigth": ["tp", "_"]})


def hint_that_does_not_divide() -> None:
    """DTensor makes no strided shards that are not alike."""
    model = nn.Linear(6, 3)
    fxpar.shard(model, mesh="dp=2,tp=2", hints={"weight": ["tp+dp", "_"]})


def hint_of_another_axis() -> None:
    hinted({"layer.weight": ["ep", "_"]})


def hint_of_too_many_dims() -> None:
    hinted({"layer.bias": ["tp", "_"]})


def hints_that_fit() -> None:
    model = hinted({"layer.*": ["tp"], "layer.weight": ["_", "tp?"]})
    places = {name: p.placements for name, p in model.named_parameters()}
    assert places["layer.weight"][1] == Shard(1)
    assert places["layer.bias"] == (Replicate(), Shard(0))
    # a tied parameter is hinted by any of its names
    tied = hinted({"head.weight": ["tp", "_"]})
    assert tied.words.weight.placements == (Replicate(), Shard(0))
    closed = hinted({"*.weight": ["_", "_"], "norm.*": ["_"], "words.*": ["_", "_"]})
    assert closed.layer.weight.placements == (Replicate(), Replicate())
    torch.testing.assert_close(closed(ids()), made()(ids()))


@multiprocess
def test_hints() -> None:
    words = "'layer.weigth' matches no parameter", "'layer.weight'"
    refused(hint_without_a_match, HintError, *words)
    words = "on weight", "size 3 does not divide over tp+dp", "the order of the mesh"
    refused(hint_that_does_not_divide, HintError, *words)
    refused(hint_of_another_axis, HintError, "no axis 'ep'", "use one of dp, tp")
    refused(hint_of_too_many_dims, HintError, "layer.bias", "2 entries", "1 dims")
    everywhere(hints_that_fit)


def other_shapes(sharded_too: bool, assign: bool = False) -> str:
    model = sharded()
    torch.manual_seed(0)
    other = Model()
    other.layer = Layer(8, 16)
    if sharded_too:
        fxpar.shard(other, mesh="dp=2,tp=2")
    try:
        model.load_state_dict(other.state_dict(), assign=assign)
    except RuntimeError as error:
        return str(error)
    return ""


@multiprocess
@pytest.mark.parametrize(
    "sharded_too", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_checkpoint_of_other_shapes(sharded_too: bool) -> None:
    for text in shared_pool(4).run(other_shapes, sharded_too):
        assert "layer.weight" in text
        assert "[16, 8]" in text and "[8, 8]" in text


def replaced() -> None:
    model = sharded()
    model.layer.weight = nn.Parameter(torch.zeros(8, 8))


def replaced_by_data() -> None:
    model = sharded()
    model.layer.register_parameter("weight", nn.Parameter(torch.zeros(8, 8)))


def replaced_behind_the_back() -> None:
    model = sharded()
    model.layer._parameters["weight"] = nn.Parameter(torch.zeros(8, 8))
    model(ids())


def replaced_by_a_dtensor() -> None:
    model = sharded()
    own = model.layer.weight
    model.layer.weight = nn.Parameter(
        distribute_tensor(torch.zeros(8, 8), own.device_mesh, own.placements)
    )
    assert model.layer(torch.ones(1, 8)).equal(model.layer.bias.full_tensor()[None])


def removed() -> None:
    model = sharded()
    model.layer.bias = None
    model(ids())
    del model.layer.bias
    assert "layer.bias" not in dict(model.named_parameters())


@pytest.mark.slow
@multiprocess
def test_a_parameter_replaced_afterwards() -> None:
    words = "'weight' of a Layer", "before fxpar.shard", "test_shard.py"
    refused(replaced, ShardError, *words)
    refused(replaced_by_data, ShardError, *words)
    everywhere(replaced_by_a_dtensor)
    everywhere(removed)


class Keeps(nn.Module):
    def __init__(self, how: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        object.__setattr__(self, "kept", how(self.weight))


def keeps_in_a_list() -> None:
    fxpar.shard(Keeps(lambda w: [w]), mesh="dp=2")


def keeps_in_a_dict() -> None:
    fxpar.shard(Keeps(lambda w: {"w": w}), mesh="dp=2")


def keeps_itself() -> None:
    fxpar.shard(Keeps(lambda w: w), mesh="dp=2")


@pytest.mark.slow
@multiprocess
def test_parameters_kept_elsewhere() -> None:
    refused(keeps_in_a_list, ShardError, "Keeps", "'kept'", "self.<name>", ranks=2)
    refused(keeps_in_a_dict, ShardError, "Keeps", "'kept'", ranks=2)
    refused(keeps_itself, ShardError, "Keeps", "'kept'", ranks=2)


def a_refusal_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Keeps(lambda w: [w]))
    before = [type(m) for m in model.modules()]
    for _ in range(2):
        with pytest.raises(ShardError, match="Keeps"):
            fxpar.shard(model, mesh="dp=2")
        assert [type(m) for m in model.modules()] == before
        assert not any(isinstance(p, DTensor) for p in model.parameters())


@multiprocess
def test_a_refusal_changes_nothing() -> None:
    everywhere(a_refusal_changes_nothing, ranks=2)


def lazy() -> None:
    fxpar.shard(nn.Sequential(nn.LazyLinear(8)), mesh="dp=2")


def dtensors() -> None:
    model = made()
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(model.layer.weight.detach(), mesh, [Shard(0)])
    model.layer.weight = nn.Parameter(weight)
    fxpar.shard(model, mesh="dp=2")


@multiprocess
def test_parameters_that_are_not_plain() -> None:
    refused(
        lazy,
        ShardError,
        "0.weight",
        "no shape yet",
        "run the lazy module once",
        ranks=2,
    )
    refused(dtensors, ShardError, "layer.weight is a DTensor", "fully_shard", ranks=2)


def sums_held_back() -> None:
    """Eagerly too gradients add up unreduced, and are reduced outside."""
    model, plain = sharded("dp=2"), made()
    for i in range(3):
        plain(ids() + i - 1 & 15).square().sum().backward()
    for i in range(3):
        with fxpar.no_sync(model) if i < 2 else contextlib.nullcontext():
            model(ids() + i - 1 & 15).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@multiprocess
def test_no_sync_uncompiled() -> None:
    everywhere(sums_held_back, ranks=2)


def unsynced() -> None:
    with fxpar.no_sync(made()):
        pass


def wrong_option() -> None:
    model = sharded("dp=2")
    options = {"codegen": "eager", "mesh": "dp=2", "param_dtype": "bfloat"}
    torch.compile(model, backend="fxpar", options=options)(ids())


@multiprocess
def test_no_sync_and_options() -> None:
    refused(unsynced, ShardError, "no_sync needs", "fxpar.shard(model)", ranks=2)
    refused(wrong_option, OptionError, "param_dtype", "bfloat16", ranks=2)


def planned_after_shard() -> None:
    model = made().eval()
    plans = [fxpar.plan(model, ids(), mesh="tp=2", grad=True)]
    model = fxpar.shard(model, mesh="tp=2")
    plans.append(fxpar.plan(model, ids(), mesh="tp=2", grad=True))
    assert plans[0].to_dict() == plans[1].to_dict()
    with pytest.raises(PlanError, match="no rank has all of parameter"):
        plans[1].simulate(ids())


@multiprocess
def test_a_sharded_model_is_planned_as_it_was_written() -> None:
    everywhere(planned_after_shard, ranks=2)
