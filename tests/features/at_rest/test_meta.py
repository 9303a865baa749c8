"""Models made on the meta device: only the parts of a rank ever get memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

import fxpar
from tests.helpers.models import NAMES, build
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess

# Shapes that lie split over both axes, over one, on dim 1, or whole; of more and fewer
# numbers than normal_ makes at a time, and of parts that begin between two of these.
SHAPES = ((16, 8), (8, 12), (3, 4), (36, 5), (20,), (4,), (3,), (4, 4, 3, 3), (2, 2))
SHAPES += ((400, 33), (100, 7, 4), (6, 8))

FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda w: nn.init.normal_(w, 0.0, 0.02),
    "uniform_": nn.init.uniform_,
    "xavier": lambda w: w.dim() > 1 and nn.init.xavier_normal_(w),
    "kaiming": lambda w: w.dim() > 1 and nn.init.kaiming_uniform_(w),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.03),
    "generator": lambda w: w.normal_(generator=torch.Generator().manual_seed(3)),
    "data": lambda w: w.data.normal_(),
    "bernoulli_": lambda w: w.bernoulli_(0.3),
    "noise": lambda w: w.copy_(torch.randn_like(w) + torch.randint_like(w, 9)),
}
QUICK_FILLS = ("trunc_normal_", "generator", "noise")


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for key, x in state.items()
    }


def state_of(model: nn.Module) -> dict[str, Any]:
    """Parameters by all their names, and buffers, those that are not saved as well."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers())}


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(shape)))


def on_meta(make: Callable[[], nn.Module], mesh: str, **how: Any) -> nn.Module:
    """The recipe."""
    with torch.device("meta"):
        model = make()
    model = fxpar.shard(model, mesh=mesh, **how)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and p.device_mesh.device_type == "cpu", name
        assert p.to_local().device.type == "cpu", name
    return model


def fill(how: str, dtype: torch.dtype, model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.zeros_(p)
        with torch.no_grad():
            FILLS[how](p)
    return whole(state_of(model))


def filled(how: str, dtype: torch.dtype, mesh: str, chunk: int) -> dict:
    from fxpar.features.at_rest import dtensor_ops

    before, dtensor_ops.CHUNK = dtensor_ops.CHUNK, chunk
    try:
        return fill(how, dtype, on_meta(lambda: Flat().to(dtype), mesh))
    finally:
        dtensor_ops.CHUNK = before


@pytest.mark.parametrize(
    ("dtype", "mesh", "chunk"),
    [
        pytest.param(torch.float32, "dp=4", 1 << 22, marks=pytest.mark.slow),
        (torch.float32, "dp=2,tp=2", 32),
        pytest.param(torch.bfloat16, "dp=2,tp=2", 1 << 22, marks=pytest.mark.slow),
        pytest.param(torch.float64, "dp=4", 100, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=() if how in QUICK_FILLS else pytest.mark.slow)
        for how in FILLS
    ],
)
def test_random_values_are_those_of_one_device(
    how: str, dtype: torch.dtype, mesh: str, chunk: int
) -> None:
    want = fill(how, dtype, Flat().to(dtype))
    for got in shared_pool(4).run(filled, how, dtype, mesh, chunk):
        for key, x in want.items():
            assert torch.equal(got[key], x), (key, SHAPES[int(key[1:])])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5)
        nn.init.constant_(module.bias, 0.1)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def applied(mesh: str) -> tuple[dict, dict, dict]:
    model = on_meta(Net, mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    torch.manual_seed(0)
    model.apply(initialize)
    locals_ = {name: p.to_local().detach() for name, p in model.named_parameters()}
    split = {
        name: any(not placement.is_replicate() for placement in p.placements)
        for name, p in model.named_parameters()
    }
    return whole(model.state_dict()), locals_, split


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_init_functions_fill_the_parts(mesh: str) -> None:
    results = shared_pool(4).run(applied, mesh)
    for values, locals_, split in results:
        assert split == results[0][2]
        assert split["0.weight"] and split["0.bias"] and not split["2.bias"]
        for name, x in values.items():
            assert not x.isnan().any(), name
            assert locals_[name].numel() == x.numel() // (4 if split[name] else 1)
            assert torch.equal(x, results[0][0][name]), name  # ranks hold one value


@pytest.mark.parametrize(
    "mesh", [pytest.param("dp=4", marks=pytest.mark.slow), "dp=2,tp=2"]
)
def test_init_functions_draw_other_numbers_on_each_rank(mesh: str) -> None:
    results = shared_pool(4).run(applied, mesh)
    parts = [locals_["0.weight"] for _, locals_, _ in results]
    assert not any(torch.equal(a, b) for a, b in zip(parts, parts[1:], strict=False))
    plain = Net()
    torch.manual_seed(0)
    plain.apply(initialize)
    for key, x in plain.state_dict().items():
        assert torch.equal(results[0][0][key], x), key


def hugging_face(name: str, mesh: str | None) -> dict[str, torch.Tensor]:
    """Filled by the model's own init functions, buffers too."""

    def make() -> nn.Module:
        return build(name)[0]

    if mesh is None:
        model = make()
        for x in state_of(model).values():
            with torch.no_grad():
                x.fill_(7)
        for module in model.modules():
            module._is_hf_initialized = False
    else:
        model = on_meta(make, mesh)
    torch.manual_seed(0)
    model.init_weights()  # and ties what is tied
    return whole(state_of(model))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_hugging_face_init(name: str) -> None:
    """BERT's padding row apart: DTensor writes of one row go to a copy."""
    want = hugging_face(name, None)
    for got in shared_pool(4).run(hugging_face, name, "dp=2,tp=2"):
        assert list(got) == list(want)
        for key, x in want.items():
            if "word_embeddings" in key:
                got[key][0] = x[0]
            assert torch.equal(got[key], x), key


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=64,
        use_cache=False,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


class Recorded(HuggingFaceStorageReader):
    """Notes how many elements of each tensor are copied from its file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read: dict[str, int] = {}

    def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
        reader = self

        class Slices:
            def get_slice(self, name: str) -> Any:
                found = f.get_slice(name)

                class Slice:
                    def __getitem__(self, where: Any) -> torch.Tensor:
                        x = found[where]
                        reader.read[name] = reader.read.get(name, 0) + x.numel()
                        return x

                return Slice()

        super()._process_read_request(Slices(), req, planner)


def read(path: str, tied: bool, mesh: str) -> tuple[dict, dict, dict]:
    """The recipe of docs/howto/checkpoints.md."""
    model = on_meta(lambda: llama(tied), mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    model.init_weights()  # buffers; and ties, so that one name of each is enough
    reader = Recorded(path)
    held = reader.read_metadata().state_dict_metadata
    state = {key: x for key, x in model.state_dict().items() if key in held}
    dcp.load(state, storage_reader=reader)
    parts = {name: p.to_local().numel() for name, p in model.named_parameters()}
    return whole(state_of(model)), reader.read, parts


QUICK_FILES = [("1", True, "dp=2,tp=2"), ("several", False, "dp=4")]


@pytest.mark.parametrize(
    ("files", "tied", "mesh"),
    [
        pytest.param(*case, marks=() if case in QUICK_FILES else pytest.mark.slow)
        for case in itertools.product(
            ("1", "several"), (True, False), ("dp=4", "dp=2,tp=2")
        )
    ],
)
def test_hugging_face_files_are_read_by_part(
    tmp_path: Path, tied: bool, files: str, mesh: str
) -> None:
    torch.manual_seed(3)
    plain = llama(tied)
    plain.save_pretrained(tmp_path, max_shard_size="1GB" if files == "1" else "20KB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files != "1")
    want = state_of(plain)
    for got, sizes, parts in shared_pool(4).run(read, str(tmp_path), tied, mesh):
        assert list(got) == list(want)
        for key, x in want.items():
            assert torch.equal(got[key], x), key
        assert sizes == parts  # no rank reads more than it holds
        assert sum(parts.values()) * 4 == sum(p.numel() for p in plain.parameters())


def anonymous() -> int:
    """Bytes of memory of this process that no file backs, swapped out or not."""
    status = Path("/proc/self/status").read_text()
    amounts = (status.split(name)[1].split()[0] for name in ("RssAnon:", "VmSwap:"))
    return sum(map(int, amounts)) * 1024


SIDE = 4096


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.columns = nn.Parameter(torch.zeros(1, SIDE * SIDE))


def read_wide(path: str) -> tuple[int, int]:
    """Memory that reading takes at its highest, beside the parts; and equal values.

    It is the least of several readings: other threads of the process take memory too,
    and a whole tensor would be in every one.
    """
    model = on_meta(Wide, "dp=4")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # now the parts have memory
    highest = 0

    class Reader(HuggingFaceStorageReader):
        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            nonlocal highest
            super()._process_read_request(f, req, planner)
            highest = max(highest, anonymous())

    rises = []
    for _ in range(3):
        highest = before = anonymous()
        dcp.load(model.state_dict(), storage_reader=Reader(path))
        rises.append(max(highest, anonymous()) - before)
    parts = [p.to_local() for p in model.parameters()]
    sums = [int(part.sum(dtype=torch.float64)) for part in parts]
    assert [part.numel() for part in parts] == [SIDE * SIDE // 4] * 2
    return min(rises), sum(sums)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_no_rank_reads_whole_tensors_into_memory(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole = 4 * SIDE * SIDE
    values = torch.arange(SIDE * SIDE, dtype=torch.float32) % 1000
    save_file(
        {"rows": values.view(SIDE, SIDE), "columns": values.view(1, -1) * 2},
        tmp_path / "model.safetensors",
    )
    results = shared_pool(4).run(read_wide, str(tmp_path))
    assert sum(s for _, s in results) == 3 * int(values.sum(dtype=torch.float64))
    assert max(memory for memory, _ in results) < whole / 8


def read_missing(path: str, partial: bool) -> bool:
    model = on_meta(lambda: llama(tied=True), "dp=4")
    state = model.state_dict()
    dcp.load(
        state,
        storage_reader=HuggingFaceStorageReader(path),
        planner=DefaultLoadPlanner(allow_partial_load=partial),
    )
    return model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_a_tied_name_that_the_file_lacks(tmp_path: Path) -> None:
    llama(tied=True).save_pretrained(tmp_path)
    for error in shared_pool(4).errors(read_missing, str(tmp_path), False):
        assert "lm_head.weight" in str(error)
    assert all(shared_pool(4).run(read_missing, str(tmp_path), True))


def rows_then_columns() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def sampled(mesh: str) -> list[list[str]]:
    """A layout planned without memory, and that of the same model with it."""
    sample = ((torch.ones(8, 8),), {})
    model = on_meta(rows_then_columns, mesh, sample=sample)
    torch.manual_seed(0)
    there = fxpar.shard(rows_then_columns(), mesh=mesh, sample=sample)
    model.load_state_dict(there.state_dict())
    assert torch.equal(model(*sample[0]), there(*sample[0]))
    return [[str(p.placements) for p in m.parameters()] for m in (model, there)]


def test_sample_on_meta() -> None:
    for on_meta_, there in shared_pool(2).run(sampled, "tp=2"):
        assert on_meta_ == there
        assert len(set(on_meta_)) > 2  # tensor parallel: rows, columns, vectors
