"""What programs do besides one training step: each through real ranks."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.errors import FxparWarning
from fxpar.sharding.plan import Plan
from tests.helpers.spawn import ranks_of, shared_pool

pytestmark = pytest.mark.usefixtures("propagated")

WIDTH = 16
MESHES = [
    "dp=2,tp=2",
    *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("dp=4", "tp=4")),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def made(kind: Callable[[], nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def sample(size: int = 8, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(size))


def compiled(fn: Any, **options: Any) -> Any:
    """Op by op, on two ranks unless the options name a mesh. Options that are None are
    as if not given."""
    chosen = {"codegen": "eager", "mesh": "dp=2"} | options
    return torch.compile(fn, backend="fxpar", options=chosen)


def near(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def identical(a: Any, b: Any) -> bool:
    """Bit for bit, in tensors within lists and dicts."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def on_ranks(fn: Callable[..., Any], *args: Any, mesh: str = "dp=2", **how: Any) -> Any:
    """What ``fn`` returns on all ranks of a mesh: it must be the same, bit for bit."""
    first, *others = ranks_of(mesh).run(fn, *args, **how)
    assert all(identical(first, other) for other in others)
    return first


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def step(model: nn.Module, program: Callable[..., Any], x: torch.Tensor) -> Any:
    """Output and gradients of one forward and backward."""
    out = program(x)
    out.square().mean().backward()
    return out.detach(), gradients(model)


# Kinds of calls


def inference() -> list[Any]:
    """Without gradients twice, by one plan, then with them."""
    model, x, before = made(), sample(), len(fxpar.plans())
    program = compiled(model)
    with torch.no_grad():
        quiet = program(x)
    with torch.inference_mode():
        quieter = program(x).clone()
    out, grads = step(model, program, x)
    plans = [plan.gradients for plan in fxpar.plans()[before:]]
    return [quiet, quieter.tolist(), out, grads, [bool(g) for g in plans]]


@pytest.mark.multiprocess
def test_inference_and_training_of_one_model() -> None:
    quiet, quieter, out, grads, backward = on_ranks(inference)
    model = made()
    want, wanted = step(model, model, sample())
    near([quiet, torch.tensor(quieter), out, grads], [want, want, want, wanted])
    assert backward == [False, True]


def several_graphs() -> list[Any]:
    first, second = made(), made()
    one, two = compiled(first), compiled(second, mesh="tp=2")
    h = one(sample())
    out = two(torch.relu(h))
    out.square().mean().backward()
    return [out.detach(), gradients(first), gradients(second)]


@pytest.mark.multiprocess
def test_two_compiled_models_in_one_step() -> None:
    first, second = made(), made()
    out = second(torch.relu(first(sample())))
    out.square().mean().backward()
    near(on_ranks(several_graphs), [out.detach(), gradients(first), gradients(second)])


class Broken(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        torch._dynamo.graph_break()
        return self.down(F.gelu(h))


def broken() -> list[Any]:
    model = made(Broken)
    before = len(fxpar.plans())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, grads = step(model, compiled(model), sample())
    texts = [str(w.message) for w in caught if w.category is FxparWarning]
    return [out, grads, len(fxpar.plans()) - before, texts]


@pytest.mark.multiprocess
def test_graph_break() -> None:
    model = made()
    want = list(step(model, model, sample()))
    for rank, (out, grads, count, texts) in enumerate(shared_pool(2).run(broken)):
        near([out, grads], want)
        assert count == 2
        said = [text for text in texts if "graph break" in text]
        assert len(said) == (rank == 0)
        if rank == 0:
            line = Broken.forward.__code__.co_firstlineno + 2
            assert f"test_features.py:{line}" in said[0]


def sizes(batches: list[int]) -> list[Any]:
    model = made()
    program = compiled(model)
    return [step(model, program, sample(size)) for size in batches]


@pytest.mark.multiprocess
def test_shapes_that_change() -> None:
    batches = [8, 16, 8, 3, 1]  # the last ones do not divide
    model = made()
    want = [step(model, model, sample(size)) for size in batches]
    near(on_ranks(sizes, batches), want)


def reset() -> list[Any]:
    model, out = made(), []
    for mesh in ("dp=2", "tp=2"):
        out.append(step(model, compiled(model, mesh=mesh), sample())[0])
        torch._dynamo.reset()
    return out


@pytest.mark.multiprocess
def test_reset() -> None:
    near(on_ranks(reset), [made()(sample()).detach()] * 2)


# Precision and memory


def half(mesh: str | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = made()
    program = compiled(model, mesh=mesh)
    with torch.autocast("cpu", torch.bfloat16):
        out = program(sample())
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    return out.detach(), gradients(model)


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", MESHES)
def test_autocast(mesh: str) -> None:
    out, grads = on_ranks(half, mesh, mesh=mesh)
    want, wanted = half(None)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-3)
    assert {x.dtype for x in grads.values()} == {torch.float32}
    torch.testing.assert_close(grads, wanted, rtol=3e-2, atol=3e-4)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, F.dropout(x, 0.25), use_reentrant=False)
        return x


def checkpointed(mesh: str | None) -> Any:
    model = made(Checkpointed)
    program = compiled(model, mesh=mesh)
    torch.manual_seed(4)
    return step(model, program, sample())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mesh", ["dp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)]
)
def test_activation_checkpointing(mesh: str) -> None:
    near(on_ranks(checkpointed, mesh, mesh=mesh), checkpointed(None))


# Meshes


def device_mesh() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = made()
    out, grads = step(model, compiled(model, mesh=mesh), sample())
    return [out, grads, str(fxpar.plans()[-1].mesh)]


@pytest.mark.multiprocess
def test_device_mesh_of_the_user() -> None:
    out, grads, mesh = on_ranks(device_mesh, mesh="dp=2,tp=2")
    model = made()
    near((out, grads), step(model, model, sample()))
    assert mesh == "data=2,model=2"


def dtensors() -> list[Any]:
    from torch.distributed.tensor import DTensor

    program = compiled(made(), outputs="dtensor", mesh="dp=2,tp=2")
    with torch.no_grad():
        out = program(sample())
    assert isinstance(out, DTensor)
    names = out.device_mesh.mesh_dim_names
    return [out.full_tensor(), list(out.shape), names, str(out.placements[0])]


@pytest.mark.multiprocess
def test_outputs_as_dtensors() -> None:
    out, shape, names, batch = on_ranks(dtensors, mesh="dp=2,tp=2")
    near(out, made()(sample()).detach())
    assert (shape, names, batch) == ([8, WIDTH], ("dp", "tp"), "S(0)")


def trained_with_dtensors() -> Any:
    model = made()
    out = compiled(model, outputs="dtensor")(sample())
    out.full_tensor().square().mean().backward()
    return gradients(model)


@pytest.mark.multiprocess
def test_gradients_through_dtensors() -> None:
    model = made()
    near(on_ranks(trained_with_dtensors), step(model, model, sample())[1])


def default_mesh() -> str:
    compiled(made(), mesh=None)(sample())
    return str(fxpar.plans()[-1].mesh)


@pytest.mark.multiprocess
def test_mesh_by_default_and_from_the_environment() -> None:
    def named(mesh: str) -> str:
        return on_ranks(default_mesh, env={"FXPAR_MESH": mesh})

    assert named("") == "dp=2"
    assert named("x=1,y=2") == "x=1,y=2"


def test_one_process_is_plain_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxpar import _torch

    given = []

    def compile_fx(gm: Any, examples: Any, **more: Any) -> Any:
        given.append(more)
        return gm.forward

    monkeypatch.setattr(_torch.aot, "compile_fx", compile_fx)
    before = len(fxpar.plans())
    program = torch.compile(made(), backend="fxpar")
    near(program(sample()), made()(sample()))
    assert given == [{"inductor_settings": {}}] and len(fxpar.plans()) == before


def gathered_bools(codegen: str) -> list[torch.Tensor]:
    program = compiled(lambda x: (x > 0, (x > 0).sum(-1)), codegen=codegen, mesh="dp=2")
    return list(program(sample()))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_bools_are_gathered_as_they_are(codegen: str) -> None:
    bools, count = on_ranks(gathered_bools, codegen)
    assert bools.dtype == torch.bool and count.dtype == torch.int64
    assert torch.equal(bools, sample() > 0)
    assert torch.equal(count, (sample() > 0).sum(-1))


# State


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).flatten(1)


def normed(mesh: str | None, plain: bool = False) -> Any:
    model = made(Normed)
    program = model if plain else compiled(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(4):
        x = sample(8, 3 * 6 * 6).view(8, 3, 6, 6) * (k + 1) + k
        program(x).square().sin().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    running = dict(model.named_buffers())
    model.eval()
    with torch.no_grad():
        return running, program(x)


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", MESHES)
def test_batch_norm_statistics(mesh: str) -> None:
    running, out = on_ranks(normed, mesh, mesh=mesh)
    want, wanted = normed(None, plain=True)
    assert running["norm.num_batches_tracked"] == 4
    near(running, want)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout(x, 0.3) + 1.0, 0.5)


def masks(mesh: str | None) -> list[torch.Tensor]:
    program = compiled(dropped, mesh=mesh)
    torch.manual_seed(9)
    return [program(torch.ones(8, 32)) for _ in range(2)]


@pytest.fixture(scope="module")
def masks_of_one_device() -> list[torch.Tensor]:
    """What plain Inductor draws."""
    program = torch.compile(dropped, backend="inductor")
    torch.manual_seed(9)
    return [program(torch.ones(8, 32)) for _ in range(2)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mesh", [*MESHES, pytest.param("a=2,b=2", marks=pytest.mark.slow)]
)
def test_dropout_masks(mesh: str, masks_of_one_device: list[torch.Tensor]) -> None:
    first, second = masks_of_one_device
    assert not torch.equal(first, second) and 0.2 < (first == 0).float().mean() < 0.8
    for got, want in zip(
        on_ranks(masks, mesh, mesh=mesh), masks_of_one_device, strict=True
    ):
        assert torch.equal(got, want)


# Files


def dumped(folder: str) -> tuple[str, torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Results of a call, and of its stages run from the files this rank wrote."""
    model, x = made(), sample()
    with torch.no_grad():
        out = compiled(model, mesh="tp=2", dump=folder)(x)
    given = {str(list(t.shape)): t for t in [*model.parameters(), x]}
    again = {}
    (graph,) = (Path(folder) / f"rank{dist.get_rank()}").iterdir()
    for path in sorted(graph.glob("*.py")):
        stage = load(path)
        if "local" not in path.name:  # it does not know its rank
            text = path.with_suffix(".txt").read_text()
            inputs = re.findall(r": f32(\[.*?\])[^=]* = input$", text, re.MULTILINE)
            assert len(inputs) == len(given)
            with torch.no_grad():
                again[path.stem] = stage.forward(None, *(given[s] for s in inputs))[0]
    return fxpar.plans()[-1].hash, out, again


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STAGES = ("traced", "normalized", "planned", "resharded", "local", "bound")


@pytest.mark.multiprocess
def test_dump_can_be_read_and_run(tmp_path: Path) -> None:
    digest, out, again = on_ranks(dumped, str(tmp_path))
    names = [f"{n}_{stage}" for n, stage in enumerate(STAGES)]
    assert list(again) == [name for name in names if name != "4_local"]
    want = made()(sample()).detach()
    for value in (out, *again.values()):
        near(value, want)
    first, *others = [next((tmp_path / f"rank{r}").iterdir()) for r in range(2)]
    assert Plan.load(first / "plan.json").hash == digest
    assert (first / "plan.txt").read_text().startswith(f"plan {digest} for mesh")
    text = (first / "4_local.txt").read_text()
    assert "all_reduce" in text and "test_features.py" in text
    for other in others:
        assert other.name == first.name
        for name in names[:-1]:  # the same on every rank, until it is bound
            same = (other / f"{name}.txt").read_text()
            assert same == (first / f"{name}.txt").read_text()
