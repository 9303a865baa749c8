"""Sharded random numbers are slices of the one-device ones, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import fxpar
from fxpar.passes.normalize import random as sharded

CPU = torch.device("cpu")
GLOBAL = [37, 41]  # no multiple of any vector length

# (local size, offset): a corner, rows, columns, the last element, nothing.
SLICES = [
    ([7, 13], [30, 28]),
    ([9, 41], [9, 0]),
    ([37, 3], [0, 17]),
    ([1, 1], [36, 40]),
    ([0, 41], [37, 0]),
]

# Numbers beyond one unit in the last place: none; 0.5 % are off by that one.
RANDN_ULP = 3e-7


@pytest.fixture(autouse=True)
def lowered() -> Iterator[None]:
    sharded.register_lowering()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole() -> tuple[torch.Tensor, ...]:
    """The one-device program."""
    return (
        torch.rand(GLOBAL),
        torch.randn(GLOBAL),
        torch.randint(-5, 1000, GLOBAL),
        torch.randint(0, 2**62 + 5, GLOBAL),
        torch.rand(()),
    )


def drawn(seeds: torch.Tensor, size: list, at: list) -> tuple[torch.Tensor, ...]:
    """A slice of each tensor of the one-device program."""
    ops = torch.ops.fxpar
    return (
        ops.random(size, seeds[0], "rand", GLOBAL, at),
        ops.random(size, seeds[1], "randn", GLOBAL, at),
        ops.randint(-5, 1000, size, seeds[2], GLOBAL, at),
        ops.randint(0, 2**62 + 5, size, seeds[3], GLOBAL, at),
        ops.random([], seeds[4], "rand", [], []),
    )


def cut(x: torch.Tensor, size: list, at: list) -> torch.Tensor:
    if x.dim() == 0:
        return x
    return x[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]


def test_slices_equal_what_inductor_draws_on_one_device() -> None:
    torch.manual_seed(3)
    one_device = torch.compile(whole)()
    after = torch.rand(1)
    torch.manual_seed(3)
    seeds = torch.ops.fxpar.seeds(5, CPU)
    assert torch.equal(torch.rand(1), after), "draws as much from the generator"

    compiled = torch.compile(drawn)
    for size, at in [(GLOBAL, [0, 0]), *SLICES]:
        expected = [cut(x, size, at) for x in one_device]
        for x, y in zip(expected, drawn(seeds, size, at), strict=True):
            exact = x is not expected[1]
            torch.testing.assert_close(
                y, x, rtol=0 if exact else RANDN_ULP, atol=0 if exact else 1e-7
            )
        if size == SLICES[0][0]:  # each compiles anew
            for x, y in zip(expected, compiled(seeds, size, at), strict=True):
                assert torch.equal(x, y)


def test_compiled_dropout_is_the_mask_of_its_seed() -> None:
    torch.manual_seed(0)
    out = torch.compile(lambda x: F.dropout(x, 0.3))(torch.ones(16, 24))
    torch.manual_seed(0)
    seed = torch.ops.fxpar.seeds(1, CPU)[0]
    mask = torch.ops.fxpar.random([8, 6], seed, "rand", [16, 24], [8, 12]) > 0.3
    torch.testing.assert_close(out[8:, 12:18], mask / 0.7)


@pytest.mark.parametrize("mode", ["rand", "randn"])
def test_eager_slices_equal_eager_whole(mode: str) -> None:
    seed, size = torch.tensor(-123456789012345), [5, 6, 7]
    draw = torch.ops.fxpar.random
    x = draw(size, seed, mode, size, [0, 0, 0])
    part = draw([2, 3, 4], seed, mode, size, [3, 1, 2])
    assert torch.equal(part, x[3:, 1:4, 2:6])
    bounds = (0, 1) if mode == "rand" else (-9, 9)
    assert x.min() >= bounds[0] and x.max() < bounds[1] and x.unique().numel() == 210


def test_indices_wrap_at_32_bits() -> None:
    seed, huge = torch.tensor(1), [2**20, 2**14]
    draw = torch.ops.fxpar.random
    beyond = draw([1, 8], seed, "rand", huge, [2**18, 0])
    assert torch.equal(beyond, draw([1, 8], seed, "rand", huge, [0, 0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_have_the_default_dtype(dtype: torch.dtype) -> None:
    def noisy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand(4, 6) @ x, torch.randn(6)

    torch.set_default_dtype(dtype)
    try:
        x = torch.ones(6, 6)
        plan = fxpar.plan(noisy, x, mesh="dp=2", mode="propagate")
        assert [y.dtype for y in plan.simulate(x)] == [dtype, dtype]
    finally:
        torch.set_default_dtype(torch.float32)


def test_fake_results() -> None:
    with torch._subclasses.FakeTensorMode():
        seed = torch.empty((), dtype=torch.int64)
        x, _, n, *_ = drawn(seed.expand(5), [2, 3], [0, 0])
    assert (x.shape, x.dtype) == ((2, 3), torch.float32)
    assert (n.shape, n.dtype) == ((2, 3), torch.int64)
    torch.library.opcheck(
        torch.ops.fxpar.random.default,
        ([2, 3], torch.tensor(1), "rand", [4, 6], [2, 3]),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_modulo_is_unsigned() -> None:
    bits = [0, 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**63 + 12345]
    x = torch.tensor([b - 2**64 if b >> 63 else b for b in bits])
    for n in (1, 7, 2**31 - 1, 2**40 + 3, 2**62 + 5, 2**63 - 1):
        assert sharded._modulo(x, n).tolist() == [b % n for b in bits]


def triton_words(seed: int, counter: int) -> list[int]:
    """Philox 4x32 in Python's integers, as Triton's ``tl.randint4x`` numbers them."""
    words, keys = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            b >> 32 ^ words[1] ^ keys[0],
            b & 0xFFFFFFFF,
            a >> 32 ^ words[3] ^ keys[1],
            a & 0xFFFFFFFF,
        ]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return words


@pytest.mark.parametrize("lanes", [1, 4])
def test_triton_stream(lanes: int) -> None:
    """Also compared once with Triton's interpreter: rand equal, randn to 7e-7."""
    seed = 2**62 + 17
    at = torch.arange(50, 63)
    stream = sharded._Triton(lanes)
    x = stream.draw(sharded._Eager, "rand", at, torch.tensor(seed))
    for i, value in zip(at.tolist(), x, strict=True):
        word = triton_words(seed, i // lanes)[i % lanes]
        folded = word if word < 2**31 else 2**32 - 1 - word
        assert value == torch.tensor(folded).float() * 4.6566127342e-10
    n = stream.draw(sharded._Eager, "randn", torch.arange(4000), torch.tensor(seed))
    assert abs(n.mean()) < 0.05 and abs(n.std() - 1) < 0.05


def test_triton_stream_is_lowered_as_it_runs(monkeypatch) -> None:
    """The lowering for CUDA, put on CPU: neighbours of a slice are no neighbours of
    the whole, so Inductor's own packing of four must not be used."""
    triton = sharded._Triton(4)
    monkeypatch.setattr(sharded, "_stream", lambda device: triton)

    def slices(seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        draw = torch.ops.fxpar.random
        return (
            draw([7, 13], seed, "rand", GLOBAL, [30, 28]),
            draw([7, 13], seed, "randn", GLOBAL, [30, 28]),
        )

    seed = torch.tensor(2**62 + 17)
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    programs = torch._functorch.config.patch(enable_autograd_cache=False)
    with graphs, programs:  # they do not know of the stream; kernels are kept
        rand, randn = torch.compile(slices)(seed)
    expected = slices(seed)
    assert torch.equal(rand, expected[0])
    torch.testing.assert_close(randn, expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_slices_on_cuda() -> None:
    def both(seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        draw = torch.ops.fxpar.random
        return draw([7, 13], seed, "rand", GLOBAL, [30, 28]), torch.rand(
            GLOBAL, device="cuda"
        )

    torch.manual_seed(3)
    seed = torch.ops.fxpar.seeds(1, torch.device("cuda"))[0]
    torch.manual_seed(3)
    part, one_device = torch.compile(both)(seed)
    assert torch.equal(part, one_device[30:, 28:])
    eager = torch.ops.fxpar.random(GLOBAL, seed, "rand", GLOBAL, [0, 0])
    assert torch.equal(eager, one_device)
