"""This module checks before a graph first runs that ranks feed it and ask the same.

In: named tensors of each rank, its options, and the graph that all ranks planned. Out:
nothing if they are equal; else one error on all ranks. Tensors must be equal bit for
bit, as a plain tensor is a global value: they are compared by a 64-bit hash computed on
their device. Parameters and buffers that differ become those of rank 0, with a warning;
of inputs that differ nobody can know which rank is right. Dynamo makes constants of
Python's ints (an attribute, an argument, what a script draws), and the text by which
ranks know a program leaves them out, since sizes are ints too; on the same sizes every
number in the graph must be the same. Never: different decisions on different ranks,
since all read what all wrote; an error for options that change no program (what is
printed, how long ranks wait).
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fxpar import _torch
from fxpar.config import Options, variable_of
from fxpar.errors import InputMismatchError, RankMismatchError, warn
from fxpar.graph.graph_bodies import body_of
from fxpar.runtime.ranks import meeting, worlds
from fxpar.runtime.ranks.groups import Ranks, check_devices
from fxpar.sharding.plan_request import read_auto
from fxpar.sharding.program import Input, user_line

NAMES_SHOWN = 8

# (name, kind, tensor); kind is "parameter", "buffer" or "input".
Fed = tuple[str, str, torch.Tensor]


def check_arguments(inputs: Sequence[Input], args: Sequence[Any]) -> None:
    """Compare across ranks the tensors of the first call of a graph.

    Raises InputMismatchError, RankMismatchError, DeviceError.
    """
    from torch.distributed.tensor import DTensor

    fed = [
        (entry.name, entry.kind, x)
        for entry, x in zip(inputs, args, strict=True)
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        if entry.at_rest is None  # else each rank holds its part
    ]
    for device in {x.device for *_, x in fed if x.device.type == "cuda"}:
        check_devices(device)
    check_same(fed)


# Tensors on the CPU of up to so many bytes are summed as they are; of larger ones the
# sums of so many pieces.
_SMALL, _PIECES = 1 << 15, 1 << 11


def quick_sum(x: torch.Tensor) -> int:
    """Return a sum of the bytes of a CPU tensor, cheap enough for every call. It may
    miss what moves within a small piece of a large tensor."""
    flat = _flat(x)
    words, total = flat.view(torch.uint8), 0
    if len(words) > _SMALL:
        wide = _words(flat)
        rows = len(wide) // _PIECES
        pieces = wide[: rows * _PIECES].view(_PIECES, rows).sum(1, dtype=torch.int64)
        total = _crc(pieces.view(torch.uint8), total)
        words = wide[rows * _PIECES :].view(torch.uint8)
    return _crc(words, total)


def _crc(data: torch.Tensor, start: int) -> int:
    """Return the CRC-32 of a contiguous CPU tensor's bytes, continuing ``start``."""
    count = data.numel()
    if not count:
        return start
    return zlib.crc32((ctypes.c_char * count).from_address(data.data_ptr()), start)


def check_same(fed: Sequence[Fed]) -> None:
    """Raise InputMismatchError on every rank if inputs differ between ranks; take
    parameters and buffers that differ from the first rank, with a warning.

    Raises InputMismatchError as well if names, shapes or dtypes differ, and
    RankMismatchError if a rank does not come. All ranks must call this.
    """
    world = worlds.current()
    if world is None or world.size == 1 or not fed or dist.get_backend() == "fake":
        return
    lines = [
        f"{kind} {name}: {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        for name, kind, x in fed
    ]
    meeting.agree(
        "inputs",
        "\n".join(lines),
        what="the names, shapes or dtypes of inputs",
        fix="give every rank tensors of one shape; for a last batch that is smaller on "
        "some ranks: DataLoader(drop_last=True)",
        error=InputMismatchError,
    )
    share(fed)


def share(fed: Sequence[Fed]) -> None:
    """Do as ``check_same`` for tensors of equal names, shapes and dtypes."""
    wrong = differing([x for *_, x in fed])
    inputs = [i for i in wrong if fed[i][1] == "input"]
    if inputs:
        names = [fed[i][0] for i in inputs]
        raise differ(names, wrong[inputs[0]], fed[inputs[0]][2].dim())
    for i in wrong:
        broadcast(fed[i][2])
    if wrong and meeting.is_leader():
        kinds = sorted({f"{fed[i][1]}s" for i in wrong}, reverse=True)
        warn(
            f"{' and '.join(kinds)} differ between ranks, taken from rank "
            f"{worlds.global_rank(0)}: {listed(fed[i][0] for i in wrong)}",
            fix="call torch.manual_seed before the model is made, or load one "
            "checkpoint",
        )


def differing(
    tensors: Sequence[torch.Tensor], models: Sequence[Sequence[int]] | None = None
) -> dict[int, int]:
    """Return, by the position of each tensor that differs between ranks, the first rank
    whose bytes differ from those of its model: rank 0, or for each tensor a rank for
    each rank. All ranks must call this, with equally many tensors."""
    if not tensors:
        return {}
    device = tensors[0].device
    sums = torch.stack([checksum(x).to(device) for x in tensors]).tolist()
    wrong: dict[int, int] = {}
    columns = zip(*meeting.gather_data("values", sums), strict=True)
    for i, each in enumerate(columns):
        of = models[i] if models else [0] * len(each)
        others = (rank for rank, model in enumerate(of) if each[rank] != each[model])
        if (rank := next(others, None)) is not None:
            wrong[i] = rank
    return wrong


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of the bytes of a tensor and their order, on its device.

    Each 8 bytes (or what the size divides into) are mixed with their position by
    splitmix64's finalizer, then summed. Products wrap.
    """
    flat = _flat(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if flat.numel() == 0 or x.device.type == "meta":
        return total
    words, step = _words(flat), _CHUNK.get(x.device.type, _CHUNK["cuda"])
    for start in range(0, len(words), step):
        part = words[start : start + step].to(torch.int64)
        at = torch.arange(start + 1, start + 1 + len(part), device=x.device)
        mixed = part + at * _signed(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> 30 & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> 27 & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
        total += (mixed ^ (mixed >> 31 & 0x1FFFFFFFF)).sum()
    return total


# Words hashed at once: few enough for the cache of a CPU, many enough for a kernel.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements in order, 1-D and dense in memory."""
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    # One element is contiguous in any stride.
    dense = flat.stride(0) == 1
    return flat if dense else flat.clone(memory_format=torch.contiguous_format)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes viewed as the widest integers that divide them."""
    size, start = flat.numel() * flat.element_size(), flat.storage_offset()
    start *= flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if size % dtype.itemsize == 0 and start % dtype.itemsize == 0:
            return flat.view(torch.uint8).view(dtype)
    return flat.view(torch.uint8)


# Relative difference of values that are equal but for rounding.
_ALLOWED = 1e-3
# Most elements that are compared of a tensor at once.
_ELEMENTS = 1024


def is_drift(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> bool:
    """Return whether tensors differ by more than rounding, by the norm of all their
    differences together. ``pairs``: sketches of each on two ranks."""
    difference = size = 0.0
    for (norm, wave), (other_norm, other_wave) in pairs:
        difference += max((norm - other_norm) ** 2, 2 * (wave - other_wave) ** 2)
        size += max(norm, other_norm) ** 2
    return not math.sqrt(difference) <= _ALLOWED * math.sqrt(size)


def sample(x: torch.Tensor, turn: int) -> torch.Tensor:
    """Return some elements as a view, others at each turn until all had theirs; none of
    a tensor that is not dense in memory."""
    for dim, stride in enumerate(x.stride()):
        x = x if stride else x.narrow(dim, 0, min(x.shape[dim], 1))  # was expanded
    is_dense, expected = not (x.is_conj() or x.is_neg()), 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        is_dense &= size == 1 or stride == expected
        expected *= size
    if not is_dense or expected <= _ELEMENTS:
        return x if is_dense else x.new_empty(0)
    begin = turn % -(-expected // _ELEMENTS) * _ELEMENTS
    count = min(_ELEMENTS, expected - begin)
    return x.as_strided((count,), (1,), x.storage_offset() + begin)


def sketch(x: torch.Tensor) -> torch.Tensor:
    """Return the norm of a tensor and its sum weighted by a sine wave, by which tensors
    are compared up to rounding; float64."""
    x = x.detach().to_dense()
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).double()
    waves = _waves(flat.device)
    if len(flat) > len(waves):
        waves = torch.arange(len(flat), device=flat.device).double().sin()
    return torch.stack((flat.norm(), flat.dot(waves[: len(flat)])))


@functools.cache
def _waves(device: torch.device) -> torch.Tensor:
    return torch.arange(2 * _ELEMENTS, device=device).double().sin()


def on_its_way(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Start to copy numbers from a device, and return a function that waits for
    them."""
    if numbers.device.type == "cpu":
        return numbers.tolist
    host = torch.empty(
        numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
    )
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return read


def broadcast(x: torch.Tensor) -> None:
    """Fill ``x`` in place with what the first rank of the world has, through a device
    the group communicates on."""
    world = worlds.current()
    if world is None or world.size == 1:
        return
    with torch.no_grad():
        device = transport(x.device)
        message = x.detach().to(device).contiguous()
        sent = message.view(-1).view(torch.uint8)
        dist.broadcast(sent, group=world.group, group_src=0)
        if message.data_ptr() != x.data_ptr():
            x.copy_(message)


def transport(device: torch.device) -> torch.device:
    """Return the device where a collective of the default group can use a tensor."""
    served = [part.split(":")[0] for part in dist.get_backend_config().split(",")]
    if device.type in served:
        return device
    if "cuda" in served and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def differ(names: Sequence[str], rank: int, dims: int) -> InputMismatchError:
    """Return the error that every rank raises where ``rank`` and the first rank feed
    different inputs. ``dims``: the number of dims of the first of them."""
    one, other = worlds.global_rank(rank), worlds.global_rank(0)
    what = f"input {listed(names)} differs between ranks: rank {one} does not feed "
    what += f"what rank {other} feeds"
    if (world := worlds.current()) is not None and world.places > 1:
        fact = f"{what}, though both are fed one part of the batch"
        fix = (
            f"give both the same of {world.places} parts: "
            f"DistributedSampler(num_replicas={world.places}, rank={world.place})"
        )
    elif dims == 0:
        fact = f"{what}; a tensor without dims, or a number, is a global value"
        fix = (
            "all_reduce it first, or feed the same value on every rank (Trainer: "
            "average_tokens_across_devices=True, its default)"
        )
    else:
        fact = f"{what}; a plain tensor is a global value, the same on every rank"
        fix = (
            "feed the same batch on every rank (one seed, no DistributedSampler); or, "
            "where each rank feeds its own part of the batch, set FXPAR_INPUTS=local"
        )
    return meeting.as_reported(InputMismatchError(fact, fix=fix))


def listed(names: Iterable[str]) -> str:
    names = list(names)
    hidden = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {hidden} more" if hidden > 0 else ""
    )


_FIX = (
    "a Python number must be equal on all ranks, with FXPAR_INPUTS=local too: "
    "all_reduce a count, draw it from one seed; what differs by sample goes in a "
    "tensor"
)

# Constants of up to so many numbers are written out.
_WRITTEN_OUT = 8


def agree_on_numbers(tag: str, graph: fx.Graph, root: torch.nn.Module) -> None:
    """Return once all ranks came with the same numbers in a graph of the same nodes,
    whose constants ``root`` holds.

    Raises RankMismatchError on all ranks if they differ, or if one does not come.
    """
    text = numbers_text(graph, root)
    what = "numbers of Python in the program"
    meeting.agree(tag, text, what=what, fix=_FIX)


def numbers_text(graph: fx.Graph, root: torch.nn.Module) -> str:
    """Return a line for each node of a graph and its bodies that holds numbers or a
    constant."""
    lines = []
    for node in graph.nodes:
        text, body = "", body_of(node)
        if node.op == "call_function":
            arguments = list(map(_text, (*node.args, *node.kwargs.values())))
            name = getattr(node.target, "__name__", str(node.target))
            if any(x.strip("[., ]") for x in arguments):
                text = f"{name}({', '.join(arguments)})"
        elif body is not None:
            text = numbers_text(body.graph, body)
        elif node.op == "get_attr":
            text = _constant(operator.attrgetter(str(node.target))(root))
        if text:
            line = user_line(node) if body is None else None
            lines.append(text + (f"  # {line}" if line else ""))
    return "\n".join(lines)


def _text(x: Any) -> str:
    """Return the text of an argument; what is no number is a dot."""
    if isinstance(x, (tuple, list)):
        return f"[{', '.join(map(_text, x))}]"
    return repr(x) if isinstance(x, (bool, int, float, complex)) else "."


def _constant(value: Any) -> str:
    """Return the text of a tensor that the graph holds; "" if it is no plain tensor."""
    if type(value) is not torch.Tensor or value.is_meta:
        return ""
    with _torch.aot.as_compiled():
        numbers = f" {value.tolist()}" if value.numel() <= _WRITTEN_OUT else ""
        return f"constant of {int(checksum(value)):x}{numbers}"


def options_text(options: Options, ranks: Ranks) -> str:
    """Return options, mesh and versions, which all ranks must share, as JSON."""
    chooses = read_auto(options.mesh) is not None
    shared = options.shared() | {
        "mesh": str(options.mesh if chooses else ranks.whole.mesh),
        "torch": torch.__version__,
        "fxpar": _torch.version.own_version(),
    }
    return json.dumps(shared, sort_keys=True)


def check_options(text: str, what: str) -> None:
    """Raise RankMismatchError on all ranks, which call this together, if one has
    another ``options_text``. ``what``: what this rank is about to do, in words."""
    own = {"options": json.loads(text), "what": what}
    every = meeting.gather_data("options of fxpar.shard or a first call", own)
    lines = []
    for name in dict.fromkeys(name for each in every for name in each["options"]):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            ranks_of.setdefault(each["options"].get(name), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{x!r} on {meeting.named(r)}" for x, r in ranks_of.items())
            lines.append(f"{variable_of(name) or name} is {', '.join(values)}")
    if not lines:
        return
    doing = {worlds.global_rank(r): each["what"] for r, each in enumerate(every)}
    if len(set(doing.values())) > 1:
        lines += [f"rank {rank} runs {text}" for rank, text in doing.items()]
    raise meeting.as_reported(
        RankMismatchError(
            "options differ between ranks:\n  " + "\n  ".join(lines),
            fix="set the same options and FXPAR_ variables on every rank",
        )
    )
