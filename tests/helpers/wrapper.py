"""Memory of collectives in the wrapper that Inductor writes for a graph.

``code_of(graph)`` is that wrapper. ``hazards(code)`` follows its buffers line by line.
From the start of a collective to its wait its operand must not be freed, reused or
written, and its result must not be read, written, freed or reused by anything else; and
each must be waited for. What a generated kernel writes is read off its C++ signature.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import fx

from fxpar import _torch

_SIGNATURE = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\]", re.M)
_CALL = re.compile(r"^(?:(\w+) = )?([\w.]+)\((.*)\)$")
_ALIAS = re.compile(r"^(\w+) = (?:reinterpret_tensor\()?(\w+)(?:, .*\))?(\[\d+\])?$")
_OPERANDS = re.compile(r"^\w+_args = \[(.*)\]$")  # of a call of a body
_BODY_CALL = re.compile(r"^(\w+) = (\w+)\(\2_args\)$")
_NAME = re.compile(r"\b(?!torch\b)[a-z]\w*\b")

# Collectives that write their operand, or a tensor they are given.
_IN_PLACE = ("all_reduce_", "broadcast_", "all_reduce_coalesced_", "irecv")
_LAUNCHES = {
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "isend",
    *_IN_PLACE,
}


@dataclass
class _Memory:
    """``home``: the memory a name stands for. ``operands``, ``results``: memory of
    collectives under way, by the one it belongs to."""

    home: dict[str, int] = field(default_factory=dict)
    names: dict[int, set[str]] = field(default_factory=dict)
    operands: dict[int, list[str]] = field(default_factory=dict)
    results: dict[int, str] = field(default_factory=dict)
    reads: dict[str, list[int]] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    found: list[str] = field(default_factory=list)
    # What calls of bodies gave: tuples of tensors with memory of their own.
    given: set[str] = field(default_factory=set)

    def of(self, name: str) -> int:
        if name not in self.home:
            self.bind(name, len(self.names))
        return self.home[name]

    def bind(self, name: str, memory: int) -> None:
        self.home[name] = memory
        self.names.setdefault(memory, set()).add(name)

    def used(self, name: str, how: str, line: str) -> None:
        """``how``: "read", "written", "freed" or "reused"."""
        memory = self.of(name)
        if memory in self.results:
            of = self.results[memory]
            self.found.append(f"the result of {of} is {how} before its wait: {line}")
        elif how != "read" and self.operands.get(memory):
            of = ", ".join(self.operands[memory])
            self.found.append(f"the operand of {of} is {how} before its wait: {line}")


def code_of(
    graph: fx.Graph,
    monkeypatch: pytest.MonkeyPatch,
    root: torch.nn.Module | None = None,
) -> str:
    """The wrapper that Inductor writes for a graph, which nobody runs. ``root`` holds
    its bodies."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []

    def stop(code: str) -> None:
        codes.append(code)
        raise RuntimeError("kernels need not be compiled")

    monkeypatch.setattr(GraphLowering, "save_output_code", stop)
    graph.set_codegen(fx.graph.CodeGen())
    inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    stopped = pytest.raises(Exception, match="need not be compiled")
    with config.patch({"fx_graph_cache": False, "compile_threads": 1}), stopped:
        module = fx.GraphModule(root or torch.nn.Module(), graph)
        _torch.inductor.compile_inner(module, inputs)
    (code,) = codes
    return code


@contextlib.contextmanager
def fake_group(size: int) -> Iterator[str]:
    """Name of a process group of ``size`` that does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def hazards(code: str) -> list[str]:
    """What a wrapper does to memory of collectives under way; empty if nothing."""
    writes = {
        name: ["const" not in x for x in types.split(", ")]
        for name, types in _SIGNATURE.findall(code)
    }
    memory = _Memory()
    for line in _lines(code):
        _follow(memory, line, writes)
    return memory.found + [f"nothing waits for {of}" for of in memory.reads]


def launches(code: str) -> int:
    """Collectives that a wrapper starts."""
    return sum(_kind(line) in _LAUNCHES for line in _lines(code))


def _lines(code: str) -> list[str]:
    """Statements of the wrapper's body; a reuse is marked."""
    body = code.split("def call(self, args):", 1)[-1].split("\nrunner = ", 1)[0]
    out = []
    for text in body.splitlines():
        line = text.strip()
        if line.startswith(("#", "assert", "with ", "return", "'''", '"""')):
            continue
        statement, _, comment = line.partition("#")
        out.append(statement.strip() + (" #reuse" if "reuse" in comment else ""))
    return [line for line in out if line]


def _kind(line: str) -> str:
    match = re.search(r"torch\.ops\.\w+\.(\w+)\.\w+\(", line)
    return match[1] if match else ""


def _follow(memory: _Memory, line: str, writes: dict[str, list[bool]]) -> None:
    kind = _kind(line)
    statement = line.split(";")[0].removesuffix(" #reuse").strip()
    call = _CALL.match(statement)
    if line.startswith("del "):
        for name in line[4:].split(", "):
            _free(memory, name, line)
    elif kind in _LAUNCHES and call:
        _launch(memory, kind, call[1], call[3])
    elif kind.startswith("wait_"):
        _wait(memory, _names(statement.split("(", 1)[1])[0], line)
    elif operands := _OPERANDS.match(statement):
        for name in _names(operands[1]):
            memory.used(name, "read", line)
    elif body := _BODY_CALL.match(statement):
        memory.given.add(body[1])
    elif (alias := _ALIAS.match(statement)) and alias[2] in memory.given:
        memory.bind(alias[1], len(memory.names))
    elif alias:
        if line.endswith("#reuse"):
            memory.used(alias[2], "reused", line)
        home = memory.of(alias[2])
        if alias[3] and home not in memory.results:  # one of several that an op gives
            home = len(memory.names)
        memory.bind(alias[1], home)
        if "del " in line:
            memory.names[memory.of(alias[1])].discard(alias[2])
    elif call and call[2].startswith("empty_strided"):
        memory.bind(call[1], len(memory.names))
    elif call:
        _run(memory, call, writes, line)


def _run(
    memory: _Memory, call: re.Match, writes: dict[str, list[bool]], line: str
) -> None:
    """A kernel, or an op that gives a tensor of its own."""
    target, arguments = call[2], re.sub(r"'[^']*'", "", call[3])
    kwargs = re.search(r"\bout=(\w+)", arguments)
    if kwargs:
        memory.used(kwargs[1], "written", line)
        arguments = arguments.replace(kwargs[0], "")
    names = [name for name in _NAME.findall(arguments) if name in memory.home]
    if target in writes:
        given = _split(call[3])
        for text, written in zip(given, writes[target], strict=False):
            for name in _NAME.findall(text):
                if name in memory.home:
                    memory.used(name, "written" if written else "read", line)
    elif target.endswith("region_.default"):
        for name in _names(_split(call[3])[1]):
            memory.used(name, "written", line)
        for name in _names(_split(call[3])[0]):
            memory.used(name, "read", line)
    else:
        in_place = re.search(r"_\.\w+$", target) is not None
        for i, name in enumerate(names):
            memory.used(name, "written" if in_place and i == 0 else "read", line)
    if call[1]:
        memory.bind(call[1], len(memory.names))


def _names(text: str) -> list[str]:
    return [name for name in _NAME.findall(text) if name != "reinterpret_tensor"]


def _split(arguments: str) -> list[str]:
    """Arguments of a call, at commas outside brackets."""
    out, depth, at = [], 0, 0
    for i, letter in enumerate(arguments):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            out.append(arguments[at:i])
            at = i + 1
    return [*out, arguments[at:]]


def _launch(memory: _Memory, kind: str, made: str | None, arguments: str) -> None:
    plain = re.sub(r"'[^']*'", "", arguments)
    out = re.search(r"\bout=(\w+)", plain)
    read = _names(_split(plain)[0])
    for name in read:
        memory.used(name, "read", f"{kind}({arguments})")
    if kind in _IN_PLACE or out:
        target = out[1] if out else read[0]
        result = memory.of(target)
        if memory.operands.get(result):
            memory.used(target, "written", f"{kind}({arguments})")
        read = read if out else []
        if made:
            memory.bind(made, result)
    else:
        assert made is not None
        result = len(memory.names)
        memory.bind(made, result)
    label = f"{kind} {made or target}"
    memory.results[result] = label
    memory.reads[label] = [memory.of(name) for name in read]
    for name in read:
        memory.operands.setdefault(memory.of(name), []).append(label)


def _wait(memory: _Memory, name: str, line: str) -> None:
    home = memory.of(name)
    label = memory.results.pop(home, None)
    if label is None:
        if home not in memory.waited:  # two that are alike may be launched as one
            memory.found.append(f"waits for nothing: {line}")
        return
    memory.waited.add(home)
    for operand in memory.reads.pop(label):
        memory.operands[operand].remove(label)


def _free(memory: _Memory, name: str, line: str) -> None:
    at = memory.of(name)
    memory.names[at].discard(name)
    if not memory.names[at]:
        memory.used(name, "freed", line)
