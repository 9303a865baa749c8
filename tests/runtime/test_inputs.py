"""What ranks feed is compared bit for bit, and repaired or refused alike."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fxpar import _torch
from fxpar.errors import FxparWarning, InputMismatchError
from fxpar.runtime.ranks import check_inputs
from fxpar.sharding.mesh import Mesh
from fxpar.sharding.program import Input
from fxpar.sharding.spec import Spec
from tests.helpers.spawn import shared_pool

MESH = Mesh.parse("dp=2,tp=2")

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def sample(dtype: torch.dtype, size: int = 131) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, [size * dtype.itemsize], generator=generator)
    return (x % 2 if dtype is torch.bool else x).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_sees_every_byte_and_its_place(dtype: torch.dtype) -> None:
    x = sample(dtype)
    own = check_inputs.checksum(x)
    assert own == check_inputs.checksum(x.clone())
    assert own == check_inputs.checksum(torch.stack([x, x], dim=1)[:, 1])
    last, swapped = x.clone(), x.clone()
    last.view(torch.uint8)[-1] ^= 1
    at = next(i for i in range(len(x)) if x[i] != x[i + 1])
    swapped[at], swapped[at + 1] = x[at + 1], x[at]
    shorter = x[:-1]
    seen = {check_inputs.checksum(y).item() for y in (x, last, swapped, shorter, x[1:])}
    assert len(seen) == 5


def test_checksum_of_patterns_differs() -> None:
    x = torch.arange(1.0, 65.0, dtype=torch.float64)
    near = [x, -x, x.flip(0), x.roll(1), x + 2**-46, x.view(8, 8).T, x.float()]
    near += [torch.zeros(64), torch.zeros(63), torch.ones(64), -torch.zeros(64)]
    assert len({check_inputs.checksum(y).item() for y in near}) == len(near)
    assert check_inputs.checksum(torch.zeros(0)) == 0
    assert check_inputs.checksum(torch.ones(())) == check_inputs.checksum(
        torch.ones(1, 1)
    )


def test_checksum_goes_by_chunks(monkeypatch) -> None:
    x = sample(torch.float32, 1000)
    whole = check_inputs.checksum(x)
    monkeypatch.setitem(check_inputs._CHUNK, "cpu", 64)
    assert check_inputs.checksum(x) == whole


def test_one_process_has_nothing_to_compare() -> None:
    check_inputs.check_same([("x", "input", torch.ones(2))])


def said(fn, *args) -> str:
    """What a check raises or warns on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fn(*args)
        except InputMismatchError as error:
            return str(error)
    assert all(w.category is FxparWarning for w in caught), caught[0]
    return "\n".join(f"warning {w.message}" for w in caught)


def compare() -> dict[str, object]:
    me = _torch.distributed.default_group().rank()
    dp, tp = divmod(me, 2)
    out: dict[str, object] = {}

    def check(name: str, *fed: tuple) -> None:
        out[name] = said(check_inputs.check_same, list(fed))

    same = ("same", "input", torch.ones(3, dtype=torch.bfloat16))
    bias = nn.Parameter(torch.full([3], float(me)))
    strided = torch.arange(6.0).view(2, 3).T * (me + 1)
    scale = torch.tensor(float(me == 2))
    flags = torch.tensor([me > 1, False])
    kept = nn.Parameter(torch.ones(2, 2))
    version = kept._version
    check(
        "state",
        same,
        ("bias", "parameter", bias),
        ("kept", "parameter", kept),
        ("strided", "buffer", strided),
        ("scale", "buffer", scale),
        ("flags", "buffer", flags),
    )
    out["repaired"] = [t.tolist() for t in (bias, strided, scale, flags)]
    out["kept"] = kept._version == version and bias.requires_grad
    check("again", ("bias", "parameter", bias), ("strided", "buffer", strided))
    check("input", same, ("x", "input", torch.ones(3) * (1 + (me == 3))))
    check("shape", same, ("x", "input", torch.ones(3 + (me == 1))))
    check("dtype", ("x", "input", torch.ones(3).to([torch.float, torch.int][me % 2])))
    check("count", *[same] * (1 + (me == 2)))

    named = [
        Input("weight", "parameter"),
        Input("x", "input"),
        Input("n", "input"),
        Input("part", "parameter", Spec("dp")),
    ]
    args = [torch.ones(1), torch.ones(2) * dp, 3, torch.ones(2) * me]
    out["arguments"] = said(check_inputs.check_arguments, named, args)
    return out


@pytest.mark.multiprocess
def test_compare() -> None:
    results = shared_pool(4).run(compare)
    for rank, result in enumerate(results):
        warned = result["state"]
        if rank == 0:
            assert warned.startswith(
                "warning parameters and buffers differ between ranks, taken from rank "
                "0: bias, strided, scale, flags\n"
            )
        else:
            assert warned == ""
        assert result["repaired"] == results[0]["repaired"]
        assert result["repaired"][2:] == [0.0, [False, False]]
        assert result["kept"]
        assert result["again"] == ""

        text = result["input"]
        assert text.startswith("input x differs between ranks: rank 3 does not feed")
        assert "feed the same batch" in text and "FXPAR_INPUTS=local" in text
        assert "rank 1 from rank 0" in result["shape"]
        assert "-input x: float32[3]\n+input x: float32[4]" in result["shape"]
        assert "drop_last" in result["shape"]
        assert "+input x: int32[3]" in result["dtype"]
        assert "rank 2 from rank 0" in result["count"]
        assert "rank 2 does not feed what rank 0" in result["arguments"]
