"""Matmuls with their collectives, run: on processes that share memory, beside float64
(``gemm_run_cases``); in which order streams are filled; and who decides."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fxpar import _torch
from fxpar.errors import DeviceError
from fxpar.fusion import fused_matmul
from fxpar.fusion.kernels import matmul_run
from fxpar.fusion.kernels.matmul_kernel import DTYPES, KINDS, Epilogue, KernelLaunch
from fxpar.graph.custom_ops import JOINED
from fxpar.sharding.cost import hardware_table
from tests.helpers.kernels import gemm_run_cases as cases
from tests.helpers.kernels.ahead import TYPES, _usage
from tests.helpers.kernels.compare_kernels import apart
from tests.helpers.kernels.shared_memory import virtual

triton = pytest.importorskip("triton")

F32 = 1e-6  # relative to the largest number of a result

SOUND = (
    (1, ["gather small", "scatter small"]),
    (2, ["gather biases", "scatter bf16"]),
    (4, ["gather op 1", "scatter op 1"]),
)
# How it is broken, and which case shows it; more than one of each in the slow ones.
WRONG = (("early_flags", 2, "gather small"), ("no_meeting", 2, "scatter small"))
MORE_WRONG = (
    ("wrong_order", 3, "gather small"),
    ("no_wait", 2, "scatter small"),
    ("one_half", 2, "gather small"),
    ("no_meeting", 2, "gather small"),
    ("one_half", 2, "scatter small"),
    ("wrong_order", 4, "gather three"),
    ("no_wait", 3, "scatter"),
)


def check(names: Iterable[str], ranks: int, mode: str = "sound") -> list[cases.RankRun]:
    """Numbers of cases in all rounds, one after the other in the same workspace."""
    runs = cases.run_cases(names, ranks, mode)
    signals = any(run.signals for run in runs)
    assert mode == "lost" or not signals, "signals are not lowered again"
    for name in names:
        case = cases.compared(name, runs)
        if "bf16" in name:  # rounded to the nearest, once
            assert case.ulps <= 0.5, name
        else:
            assert case.error <= F32, name
    return runs


@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(*case, marks=() if case[0] == 2 else pytest.mark.slow)
        for case in SOUND
    ],
)
def test_ranks_give_what_one_process_computes(ranks: int, names: list[str]) -> None:
    check(names, ranks)


@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "ranks", "name"),
    [*WRONG, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_WRONG)],
)
def test_broken_ones_are_caught(mode: str, ranks: int, name: str) -> None:
    """Flags ahead of their chunks, chunks in another order than their flags, chunks
    that are sent before they are made, no meeting, no second half."""
    with pytest.raises(AssertionError):
        check([name], ranks, mode)


@pytest.mark.interpreted
@pytest.mark.multiprocess
def test_a_lost_rank_is_not_waited_for_for_ever() -> None:
    """Both calls of both ranks that are left say which one it was, and in what."""
    heard = [x for run in check(["scatter small"], 3, "lost") for x in run.said]
    assert len(heard) == 4
    for text in heard:
        assert text.startswith("rank 2 of the group sent no signal inside the sca")


@pytest.mark.interpreted
@pytest.mark.multiprocess
def test_a_copy_that_fails_ends_its_matmul() -> None:
    """The other rank has what it needs."""
    runs = check(["gather small"], 2, "failing")
    assert [run.said for run in runs] == [[], ["Failing"]]


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_cases(ranks: int) -> None:
    check(cases.CASES, ranks)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "mode", ["late_call", "late_copies", "late_matmul", "late_end"]
)
def test_late_ranks(mode: str) -> None:
    check(["gather three", "gather bf16", "scatter", "scatter bf16"], 3, mode)


# Streams, without a GPU.


def filled(kind: str, log: list[str], broken: str = "") -> list[str]:
    """What streams are given, in order, by a rank of three; ``broken``: what raises."""
    at = ["here"]

    def note(what: str) -> None:
        log.append(f"{at[0]}: {what}")
        if what == broken:
            raise RuntimeError(broken)

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            log.append(f"{self.name}: wait for {other.name}")

    @contextmanager
    def within(stream: Any) -> Any:
        at[0] = stream.name
        try:
            yield
        finally:
            at[0] = "here"

    def noted(name: str) -> Any:
        return lambda: note(name)

    def copies(up: Any, wait: Any) -> None:
        for chunk in (1, 2):
            if kind == "scatter":
                wait(chunk)
            note(f"copy {chunk}")
            if kind == "gather":
                up(chunk)

    provider = SimpleNamespace(
        device=torch.device("cuda", 0), second=lambda: Stream("second"), overlap=None
    )
    flagged = lambda name, _, chunk: noted(f"{name} {chunk}")  # noqa: E731
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda _: Stream("here")),
        mock.patch.object(torch.cuda, "stream", within),
        mock.patch.object(_torch.distributed, "write_on_stream", lambda *_: False),
        mock.patch.object(matmul_run, "_flag", flagged),
    ):
        matmul_run._overlap_copies(
            provider,  # type: ignore[arg-type]
            noted("meet"),
            copies,
            noted("multiply"),
            torch.zeros(3),
            waits=kind == "gather",
        )
    return log


def test_what_a_kernel_waits_for_is_launched_before_it() -> None:
    """Also where all streams share one queue."""
    assert filled("gather", []) == [
        "second: wait for here",
        "second: meet",
        "second: copy 1",
        "second: raise_flag 1",
        "second: copy 2",
        "second: raise_flag 2",
        "here: multiply",
        "here: wait for second",
    ]
    assert filled("scatter", []) == [
        "second: wait for here",
        "here: multiply",
        "second: await_flag 1",
        "second: copy 1",
        "second: await_flag 2",
        "second: copy 2",
        "second: meet",
        "here: wait for second",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["meet", "copy 2", "multiply"])
def test_streams_join_whatever_fails(kind: str, broken: str) -> None:
    """What a failed call allocated is not given away while the second stream writes;
    and no kernel that waits for flags is launched if these do not come."""
    log: list[str] = []
    with pytest.raises(RuntimeError, match=broken):
        filled(kind, log, broken)
    assert log[-1] == "here: wait for second"
    assert kind == "scatter" or broken == "multiply" or "here: multiply" not in log


def test_all_is_loaded_and_there_before_the_first_launch() -> None:
    """Nothing is allocated or compiled between launches."""
    (provider,) = virtual(1, torch.device("cpu"), programs=4)
    x, w = torch.zeros(32, 16), torch.zeros(16, 8)
    starts = (
        matmul_run.prepared_gather(provider, x, [w]),
        matmul_run.prepared_scatter(provider, x, w),
    )
    for start in starts:
        with (
            mock.patch.object(matmul_run, "_load") as load,
            mock.patch.object(matmul_run.run_kernels, "empty") as empty,
            mock.patch.object(matmul_run, "_overlap_copies") as together,
            mock.patch.object(KernelLaunch, "__call__"),
        ):
            start()
        assert together.call_count == 1
        assert not load.called and not empty.called


# Compiled ahead.


@pytest.mark.parametrize("name", ["meet", "raise_flag", "await_flag", "add_up"])
def test_small_kernels_compile(name: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fxpar.fusion.kernels import matmul_signals

    function = getattr(matmul_signals, name)
    signs, constants, order = {
        "meet": (
            {"signals_ptr": "*i64", "rank": "i32"},
            {"RANKS": 8, "REGION": 77},
            {"release.sys.cas", "acquire.sys.cas"},
        ),
        "raise_flag": (
            {"flags_ptr": "*i32", "chunk": "i32"},
            {},
            {"sys.release.exch"},
        ),
        "await_flag": (
            {"flags_ptr": "*i32", "chunk": "i32"},
            {},
            {"acquire.sys.cas", "sys.relaxed.exch"},
        ),
        "add_up": (
            dict.fromkeys(("slots_ptr", "own_ptr", "out_ptr"), f"*{TYPES['bfloat16']}")
            | {"rank": "i32"},
            {"COUNT": 1 << 20, "RANKS": 8, "DIVISOR": 1, "BLOCK": matmul_run._BLOCK},
            set[str](),
        ),
    }[name]
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signs) - 1)}
    source = ASTSource(
        function, signs | dict.fromkeys(constants, "constexpr"), constants, aligned
    )
    warps = 4 if name == "add_up" else 1
    made: Any = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    ptx = made.asm["ptx"]
    found = {".".join(x.split(".")[2:5]) for x in ptx.split() if x.startswith("atom.")}
    assert found == order, found
    assert "STACK:0" in _usage(made.asm["cubin"])
    if name == "add_up":
        assert ptx.count(".v4.b32") >= 8


# On a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_one_gpu_play_ranks(kind: str) -> None:
    ranks, rows, n, k = 2, 256, 512, 256
    device = torch.device("cuda", 0)
    playing = virtual(ranks, device, programs=8)
    streams = [torch.cuda.Stream(device) for _ in range(ranks)]
    for provider in playing:
        provider.reserve(ranks * rows * max(n, k) * 2)
    for turn in range(3):
        torch.manual_seed(turn)
        mine = rows * (ranks if kind == "scatter" else 1)
        xs = [torch.randn(mine, k, device=device).bfloat16() for _ in range(ranks)]
        ws = [torch.randn(k, n, device=device).bfloat16() for _ in range(ranks)]
        starts: list[Any] = []
        for provider, x, w in zip(playing, xs, ws, strict=True):
            if kind == "gather":
                starts.append(matmul_run.prepared_gather(provider, x, [w]))
            else:
                starts.append(matmul_run.prepared_scatter(provider, x, w))
        torch.cuda.synchronize(device)
        got = []
        for stream, start in zip(streams, starts, strict=True):
            with torch.cuda.stream(stream):
                got.append(start())
        torch.cuda.synchronize(device)
        if kind == "gather":
            whole = torch.cat(xs)
            want = [whole.float() @ w.float() for w in ws]
            assert all(torch.equal(a, whole) for a, _ in got)
            got = [products[0] for _, products in got]
        else:
            pairs = zip(xs, ws, strict=True)
            total = sum((x.float() @ w.float()).bfloat16().float() for x, w in pairs)
            want = list(total.chunk(ranks))  # type: ignore[attr-defined]
        for a, b in zip(got, want, strict=True):
            assert apart(a.cpu(), b.cpu()) <= 2**-7, turn


# Which way.


def test_grids_leave_room_for_what_they_wait_for() -> None:
    for kind, dtype in itertools.product(KINDS, DTYPES):
        given = kind, 8192, 4096, 1024, 8, dtype
        made = matmul_run._cached_gemm(
            *given, programs=116, b_stride=(4096, 1), epilogue=Epilogue(), signals=True
        )
        assert made.programs <= 116


@pytest.mark.parametrize("devices", ["h100 h100", "h100 h200", "h100 ?"])
def test_ranks_agree_on_what_they_run_on(monkeypatch: Any, devices: str) -> None:
    names, here = devices.split(), threading.local()
    store = torch.distributed.HashStore()

    class Group:
        pass

    groups = [Group(), Group()]

    def detect() -> Any:
        if names[here.rank] == "?":
            raise DeviceError("unknown", fix="none")
        return hardware_table.lookup(names[here.rank])

    monkeypatch.setattr(
        _torch.distributed, "group_store", lambda _: (store, here.rank, 2)
    )
    monkeypatch.setattr(_torch.distributed, "group_named", lambda _: groups[here.rank])
    monkeypatch.setattr(hardware_table, "detect", detect)

    def ask(rank: int) -> str:
        here.rank = rank
        return fused_matmul._hardware_of("g")

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ask, range(2), timeout=60))
    want = names[0] if names[0] == names[1] else ""
    assert found == [want, want]
    with ThreadPoolExecutor(1) as pool:  # kept: nobody is asked again
        assert pool.submit(ask, 0).result(timeout=60) == want


def test_on_cpu_the_parts_run() -> None:
    """Unless Triton is an interpreter and memory is shared."""
    assert set(JOINED) == {"gather", "scatter"}
    x, w = torch.zeros(4096, 64), torch.zeros(64, 64)
    assert JOINED["gather"](x, [w], 0, 2, "g") is None
    assert JOINED["scatter"](x, w, "sum", 0, 2, "g") is None
    with mock.patch.object(fused_matmul.run_kernels, "has_kernels", lambda _: True):
        assert JOINED["gather"](x, [w], 0, 2, "g") is None
