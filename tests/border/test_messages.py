"""What messages say: figures that can be read, names that exist, advice that fits."""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.config import Options
from fxpar.errors import FxparWarning, OptionError, PlanError, ScheduleError
from fxpar.fusion.apply_schedule import Unexpected
from fxpar.fusion.choose_schedule import failed
from fxpar.sharding.cost.hardware_table import lookup
from fxpar.sharding.op_table import parse_rule
from fxpar.sharding.ops.unknown_ops import example
from fxpar.sharding.search.run_search import SearchOptions
from fxpar.units import sizes_as_text
from tests.helpers.spawn import shared_pool


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="fxpar", options={"codegen": "eager"} | options)


# Memory


def too_small(memory: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a search says that has so many bytes."""

    def asked(*_: Any) -> SearchOptions:
        return SearchOptions(lookup("h100"), 5.0, memory)

    monkeypatch.setattr("fxpar.planning.plan_mode", asked)
    layers = nn.Linear(64, 64), nn.Linear(64, 64)
    with pytest.raises(PlanError) as error:
        fxpar.plan(nn.Sequential(*layers), torch.randn(8, 64), mesh="dp=2", grad=True)
    return str(error.value)


@pytest.mark.parametrize(("memory", "shown"), [(100, "100 bytes"), (5000, "5 kB")])
def test_memory_that_is_too_small_is_shown_in_units_that_show_it(
    memory: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = too_small(memory, monkeypatch)
    assert f"no plan fits in {shown} a rank" in text
    needed, *largest = re.findall(r"([\d.]+) kB", text.partition("needs")[2])
    assert float(needed) > 40 and all(float(size) > 1 for size in largest)


def test_sizes_that_would_read_alike_are_told_apart() -> None:
    assert sizes_as_text(3e9, 1e6) == ["3 GB", "1 MB"]
    assert sizes_as_text(1e9, 1e9 + 1) == ["1,000,000,000 bytes", "1,000,000,001 bytes"]


# Options


@pytest.mark.parametrize("how", ["plan", "compile"])
def test_a_dump_that_cannot_be_written_is_our_error(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXPAR_DUMP", str(tmp_path / "file"))
    with pytest.raises(OptionError, match="FXPAR_DUMP cannot be written: .*file") as e:
        if how == "plan":
            fxpar.plan(torch.relu, torch.randn(4), mesh="dp=2")
        else:
            compiled(torch.relu)(torch.randn(4))
    assert "directory" in e.value.fix


def dump_to(path: str) -> None:
    torch.manual_seed(0)
    os.environ["FXPAR_DUMP"] = path
    compiled(torch.relu)(torch.randn(4, 2))


def test_one_rank_that_cannot_write_its_dump_stops_all(tmp_path: Path) -> None:
    """Rank 1's folder is a file; rank 0 is told, and does not wait."""
    (tmp_path / "rank1").touch()
    pool = shared_pool(2)
    first, second = pool.errors(dump_to, str(tmp_path), env={"FXPAR_MESH": "dp=2"})
    assert "FXPAR_DUMP cannot be written" in str(second)
    assert "rank 1" in str(first) and "FXPAR_DUMP cannot be written" in str(first)


@pytest.mark.parametrize(
    ("name", "value", "is_logged"),
    [
        ("FXPAR_DEBUG", "0", False),
        ("FXPAR_DEBUG", "1", True),
        ("TORCH_LOGS", "x", True),
    ],
)
def test_a_failure_to_trace_is_not_logged_before_it_is_raised(
    name: str, value: str, is_logged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            fxpar.plan(lambda x: x @ x, torch.ones(8, 4), mesh="dp=2")
    finally:
        log.removeHandler(handler)
    assert bool(records) == is_logged
    log.error("other errors", exc_info=ValueError())  # are logged outside
    assert not log.filters


@pytest.mark.parametrize("value", ["serch", "nonsense"])
def test_a_bad_plan_names_search(value: str) -> None:
    with pytest.raises(OptionError, match="FXPAR_PLAN") as error:
        Options.read({}, {"FXPAR_PLAN": value})
    assert "use search, propagate, replicate or" in error.value.fix
    with pytest.raises(PlanError, match="takes search, propagate"):
        fxpar.plan(torch.relu, torch.randn(4), mesh="dp=2", mode=value)


# Advice on ops without a rule


@torch.library.custom_op("border_messages::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ w, x.sum(-1)


@project.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[0])


def test_advice_on_a_rule_fits_the_op_and_works_as_it_stands() -> None:
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fxpar.plan(project, x, w, mesh="dp=2", mode="propagate")
    text = next(str(w.message) for w in seen if w.category is FxparWarning)
    name, rule = re.search(r'fxpar\.rule\("(.*)", "(.*)"\)', text).groups()
    assert name == "border_messages::project"
    assert rule == "a! b!, b! c! -> a! c!, a!"
    from fxpar.sharding import ops as rules

    specs = [("dp", None), None]
    options: Any = {"mesh": "dp=2", "in_specs": specs, "mode": "propagate"}
    try:
        for given, split in ((rule, None), (rule.replace("a!", "a"), "dp")):
            fxpar.rule(name, given)
            plan = fxpar.plan(project, x, w, **options)
            torch.testing.assert_close(plan.simulate(x, w), project(x, w))
            assert plan.spec(plan.nodes[0].name + ".0") == fxpar.Spec(split, None)
    finally:
        rules._USER.pop(name)


@pytest.mark.parametrize(
    ("operands", "results", "rule"),
    [
        ([(4, 8, 16), (16,)], [(4, 8, 16)], "a! b! c!, c! -> a! b! c!"),
        ([(4, 3, 1)], [(4, 1)], "a! b! _ -> a! _"),
        ([(6, 5)], [(2, 3, 5)], "a! b! -> c! d! b!"),
        ([(8, 8)], [(8, 8), (8,)], "a! b! -> a! b!, a!"),
        ([(4, 0)], [(4, 0)], "a! b! -> a! b!"),
        ([()], [(3,)], None),
        ([(5,)], [()], None),
        ([], [(4,)], None),
    ],
)
def test_an_example_fits_its_shapes(operands: Any, results: Any, rule: Any) -> None:
    assert example(operands, results) == rule
    if rule:
        parse_rule(rule).with_sizes([*operands, *results])


# A schedule is looked for


def generate() -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Tokens of one device and of a compiled static cache, and what was warned of."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import StaticCache

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    start = torch.randint(0, 64, (2, 5))

    @torch.no_grad()
    def decode(model: Any) -> list[list[int]]:
        cache = StaticCache(config=config, max_cache_len=12)
        tokens, step, at = [start], start, torch.arange(5)
        for _ in range(4):
            out = model(step, past_key_values=cache, cache_position=at, use_cache=True)
            step, at = out.logits[:, -1:].argmax(-1), at[-1:] + 1
            tokens.append(step)
        return torch.cat(tokens, 1).tolist()

    want = decode(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = decode(compiled(model))
    ours = [str(w.message) for w in seen if issubclass(w.category, FxparWarning)]
    return want, got, ours


@pytest.mark.slow
def test_a_static_cache_decodes_with_a_schedule() -> None:
    """Its length is counted in place, and handed back: a graph that schedules take."""
    env = {"FXPAR_MESH": "tp=2", "FXPAR_SCHEDULE": "auto", "FXPAR_HARDWARE": "h100"}
    for want, got, seen in shared_pool(2).run(generate, env=env):
        assert got == want
        assert not any("schedule" in text for text in seen)


def test_a_graph_no_schedule_takes_is_not_ours_to_mend() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        failed(ScheduleError("copy_ writes to its operand", where="model.py:3"))
        failed(Unexpected("verb: KeyError"))
        failed(KeyError("x"))
    limit, ours, bug = (str(w.message) for w in seen)
    assert "copy_ writes" in limit and "at: model.py:3" in limit
    assert "report it" not in limit and "report it" in ours and "report it" in bug
