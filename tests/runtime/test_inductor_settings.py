"""``mode=`` and settings of Inductor: they are what it compiles with."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import OptionError
from tests.helpers.caches import without_programs
from tests.helpers.spawn import shared_pool

pytestmark = pytest.mark.multiprocess
MESH = {"FXPAR_MESH": "dp=2"}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Caches that all cases share, and no other test."""
    folder = without_programs(tmp_path_factory.mktemp("caches"))
    return {"TORCHINDUCTOR_CACHE_DIR": folder}


def settings_seen(how: dict[str, Any], step: bool) -> list[tuple[bool, bool, bool]]:
    """The settings that each graph is compiled under."""
    from torch._inductor import compile_fx, config

    torch._dynamo.reset()
    torch.manual_seed(0)
    seen, compiles = [], compile_fx._compile_fx_inner

    def compile_and_note(*args: Any, **kwargs: Any) -> Any:
        triton = config.triton
        seen.append((config.max_autotune, triton.cudagraphs, config.epilogue_fusion))
        return compiles(*args, **kwargs)

    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), torch.randn(4, 8)
    with mock.patch.object(compile_fx, "_compile_fx_inner", compile_and_note):
        if step:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = fxpar.train_step(model, lambda m, x: m(x).mean(), optimizer, **how)
            run(x)
        else:
            result = torch.compile(model, backend="fxpar", **how)(x)
            result.sum().backward()
            torch.testing.assert_close(result, model(x))
    return seen


CASES = [
    ({"mode": "max-autotune-no-cudagraphs"}, (True, False, True)),
    ({"mode": "reduce-overhead"}, (False, True, True)),
    ({"mode": "default"}, (False, False, True)),
    ({"options": {"inductor": {"epilogue_fusion": False}}}, (False, False, False)),
    ({"options": {"inductor": "max-autotune"}}, (True, True, True)),
]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("how", "want"), CASES)
def test_inductor_compiles_as_it_is_asked(
    caches: dict[str, str], how: Any, want: Any, ranks: int
) -> None:
    """Rank 0 compiles for all. What was compiled otherwise is not taken for it: each
    case compiles the same program anew."""
    env = caches | (MESH if ranks > 1 else {})
    first, *_ = shared_pool(2).run(settings_seen, how, False, ranks=ranks, env=env)
    assert set(first) == {want}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_compiles_as_it_is_asked(caches: dict[str, str], ranks: int) -> None:
    how, want = CASES[-1]
    env = caches | (MESH if ranks > 1 else {})
    first, *_ = shared_pool(2).run(settings_seen, how, True, ranks=ranks, env=env)
    assert set(first) == {want}


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"mode": "lite"}, "fxpar needs fallback_by_default=False"),
        ({"mode": "max-autotun"}, "did you mean 'max-autotune'"),
        ({"options": {"inductor": {"max_autotun": True}}}, "mean 'max_autotune'"),
    ],
)
def test_what_cannot_be_is_refused(how: Any, word: str) -> None:
    for error in shared_pool(2).errors(settings_seen, how, False, env=MESH):
        assert isinstance(error, OptionError) and word in str(error)
