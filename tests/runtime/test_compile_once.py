"""A graph that is one text on several ranks: compiled by one, taken over by the others;
what they are told when that fails; which graphs are one text."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx

import fxpar
from fxpar import _torch, cache_files, compilation
from fxpar.errors import RankMismatchError
from fxpar.graph.graph_bodies import all_nodes
from fxpar.passes.order.outline_layers import INVOKE
from fxpar.runtime.caches.known_programs import compile_once
from fxpar.runtime.caches.plan_store import lines_of
from fxpar.runtime.ranks import meeting, presence
from fxpar.runtime.steps.binding import bind
from tests.helpers.spawn import shared_pool

aten = torch.ops.aten


def graph(width: int = 4) -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.empty(width, device="meta")
    made.output((made.call_function(aten.relu.default, (x,)),))
    return made


def caught(fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except RankMismatchError as error:
        return str(error)
    return ""


def in_turns(
    widths: list[int], at_once: bool = False
) -> tuple[float, float, str | None]:
    """When the compiling of this rank began and ended, and what it was given.
    ``at_once``: it ends only after all ranks have begun."""
    meeting.agree("start", "")
    times: list[float] = []
    given: list[str | None] = []

    def compiles(text: str | None) -> None:
        given.append(text)
        times.append(time.monotonic())
        dist.barrier() if at_once else time.sleep(0.2)
        times.append(time.monotonic())

    compile_once(graph(widths[dist.get_rank()]), "in_turns", compiles)
    return times[0], times[1], given[0]


@pytest.mark.multiprocess
def test_one_rank_compiles_before_the_others_take_over() -> None:
    pool = shared_pool(4)
    times = sorted(pool.run(in_turns, [4, 4, 4, 4]))
    (_, first_end, text), *others = times
    assert all(begin >= first_end for begin, *_ in others)
    assert text and {each[2] for each in others} == {text}
    # Graphs that are not equal are nobody's to wait for.
    pool.run(in_turns, [4, 5, 6, 7], True)


@pytest.mark.multiprocess
def test_without_caches_every_rank_compiles_by_itself() -> None:
    env = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with_caches = "torch._inductor.config.force_disable_caches"
    for begin, _, text in shared_pool(4).run(disabled, with_caches, ranks=2, env=env):
        assert text is None and begin


def test_a_rank_works_while_its_compiler_does() -> None:
    """Its own process is idle meanwhile, whichever way it compiles."""
    other = graph()
    other.get_attr("table")  # no text
    states: list[str] = []
    for each in (graph(), other):
        compile_once(each, "it", lambda _: states.append(presence._DOING[-1].state))
    assert states == ["works", "works"] and not presence._DOING


def disabled(_: str) -> tuple[float, float, str | None]:
    from torch._inductor import config

    with config.patch(force_disable_caches=True):
        return in_turns([4, 4])


def one_fails(again: bool) -> tuple[str, str]:
    """What is said where the rank that comes first fails; of graphs after that."""
    meeting.agree("start", "")

    def fails(_: str | None) -> None:
        time.sleep(0.3)
        raise RankMismatchError("no compiler here")

    said = caught(compile_once, graph(), f"one_fails {again}", fails)
    return said, caught(compile_once, graph(), f"next {again}", lambda _: None)


@pytest.mark.multiprocess
def test_a_rank_that_fails_to_compile_says_so() -> None:
    pool = shared_pool(2)
    pool.renew()
    for again in (False, True):
        said, after = zip(*pool.run(one_fails, again), strict=True)
        assert after == ("", "")
        own, told = sorted(said, key=len)
        assert own.startswith("no compiler here")
        assert "failed to compile one_fails" in told and "no compiler here" in told


def one_hangs() -> str:
    """The rank that comes first begins to compile, and waits for the other."""
    meeting.agree("start", "")

    def hangs(_: str | None) -> None:
        meeting.gather("elsewhere", "", 30.0)

    return caught(compile_once, graph(), "one_hangs", hangs)


@pytest.mark.multiprocess
def test_a_rank_that_hangs_while_it_compiles_is_named() -> None:
    pool = shared_pool(2)
    for said in pool.run(one_hangs):
        assert "one_hangs" in said and "ranks wait for one another" in said
    pool.renew()


def by_folders(folders: list[str]) -> tuple[float, float]:
    """When the compiling of this rank began and ended."""
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folders[dist.get_rank()]):
        begin, end, _ = in_turns([4, 4])
        return begin, end


@pytest.mark.multiprocess
@pytest.mark.parametrize("names", ["aa", "ab"])
def test_one_rank_of_each_folder_compiles(tmp_path: Path, names: str) -> None:
    pool = shared_pool(2)
    pool.renew()
    folders = [str(tmp_path / name) for name in names]
    (first, ended), (second, _) = sorted(pool.run(by_folders, folders))
    assert (second < ended) == (names == "ab")


def test_a_folder_has_one_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a"))
    mark = cache_files.folder_mark()
    assert cache_files.folder_mark() == mark
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "b"))
    assert cache_files.folder_mark() != mark
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    assert cache_files.folder_mark() != cache_files.folder_mark()


def test_keys_need_no_reading_behind_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keys of torch's caches say of its installation a rank reads before it waits
    for the one that compiles."""
    from torch._inductor import codecache

    codecache.CacheBase.get_system.cache_clear()
    compilation._load_inductor()

    def late(*_: Any) -> None:
        raise AssertionError("is read late")

    monkeypatch.setattr(codecache, "triton_key", late, raising=False)  # not 2.11
    monkeypatch.setattr(codecache, "build_code_hash", late)
    assert codecache.CacheBase.get_system()["hash"]
    assert codecache.torch_key()


def test_the_rank_is_no_part_of_the_key() -> None:
    from torch._inductor import codecache, config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class OfRank(CustomGraphPass):
        rank = 0

        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> str:
            return f"rank {self.rank}"

    def key(text: str | None, rank: int, cpp: int = 0) -> str:
        made, of_rank = fx.GraphModule(torch.nn.Module(), graph()), OfRank()
        of_rank.rank = rank
        with (
            config.patch({"joint_custom_pre_pass": of_rank, "cpp.threads": cpp}),
            _torch.inductor._keyed_by(text),
        ):
            return codecache.compiled_fx_graph_hash(made, [], {}, [])[0]

    assert key("text", 0) == key("text", 1)
    assert len({key("text", 0), key("other", 0), key("text", 0, 2)}) == 3
    assert key(None, 0) != key(None, 1)


def with_body(constant: float) -> fx.Graph:
    """A graph that calls a body."""
    body = fx.Graph()
    args = (body.placeholder("x"), constant)
    body.output((body.call_function(aten.add.Tensor, args),))
    root = torch.nn.Module()
    root.add_module("layer0", fx.GraphModule(torch.nn.Module(), body))
    outer = fx.Graph(root)
    x = outer.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    call = outer.call_function(INVOKE, (outer.get_attr("layer0"), "layer0", x))
    outer.output((call,))
    return outer


def test_bodies_are_part_of_the_text() -> None:
    def text(graph: fx.Graph) -> str | None:
        return compile_once(graph, "forward", lambda text: text)

    assert text(with_body(2.0)) == text(with_body(2.0)) is not None
    assert text(with_body(2.0)) != text(with_body(3.0))
    of_tensor = with_body(2.0)
    del of_tensor.owning_module.layer0
    of_tensor.owning_module.layer0 = torch.ones(4)
    assert text(of_tensor) is None


def compiled_anew() -> list[int]:
    """How often this rank found what Inductor made of two graphs, and how often not."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.manual_seed(0)
    options = {"mesh": "dp=2", "plan": "propagate", "inputs": "local"}
    model = torch.nn.Linear(4, 4)
    step = torch.compile(model, backend="fxpar", options=options, dynamic=False)
    step(torch.ones(2, 4)).relu().sum().backward()
    found = counters["inductor"]
    return [found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_rank_lowers_a_graph_for_all(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    every = shared_pool(2).run(compiled_anew, env=env)
    assert [sum(each) for each in zip(*every, strict=True)] == [2, 2]


def bound(plan: Any, rank: int, late: bool) -> fx.Graph:
    result = plan.result
    nodes = result.local.find_nodes(op="placeholder")
    mode = _torch.fake.fake_mode_of([node.meta["val"] for node in nodes])
    return bind(
        result.local, plan.mesh, rank, "+".join, mode, inductor=True, at_run_time=late
    )


def lookup(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> Any:
    picked = torch.nn.functional.embedding(ids, table) @ weight
    return torch.relu(picked).sum(0)


def test_graphs_of_all_ranks_are_one_text() -> None:
    ids, table = torch.randint(64, (8, 4)), torch.randn(64, 8)
    hints = {"ids": ("dp", None), "table": ("tp", None), "weight": (None, "tp")}
    args = (ids, table, torch.randn(8, 8))
    plan = fxpar.plan(lookup, *args, mesh="dp=2,tp=2", hints=hints, mode="propagate")
    texts = {"\n".join(lines_of(bound(plan, rank, True))) for rank in range(4)}
    assert len(texts) == 1
    names = {str(node.target) for node in all_nodes(bound(plan, 0, True))}
    assert "fxpar.own_offset.default" in names
    # Folded in, the ranks' coordinates make a text of each.
    texts = {"\n".join(lines_of(bound(plan, rank, False))) for rank in range(4)}
    assert len(texts) > 1
