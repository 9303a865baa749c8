"""Training steps of one Llama as peers and fxpar run them.

In: a ``Case``. Out: a ``Step`` in this process, one of ``case.ranks``. Peers: DDP,
FSDP2, and DTensor tensor parallelism without and with sequence parallelism, each with
torch.compile, the optimizer's step compiled too if asked. fxpar's sides are on the mesh
of the peer they are measured by, and do what its README says: beside DDP one line,
``torch.compile``; else also ``fxpar.shard`` without hints or a sample, or, if asked,
with the peer's layout. Never compares sides of different weights or batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from _common import LLAMAS, llama

AXIS = {"ddp": "dp", "fsdp2": "dp", "tp": "tp", "sp": "tp"}
LOCAL = {"ddp", "fsdp2"}  # peers whose ranks each read a part of the batch
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")
MEGATRON = {
    **{f"*{name}.weight": ("tp", None) for name in COLUMNS},
    **{f"*{name}.weight": (None, "tp") for name in ROWS},
}
# Hints for the layouts of peers at rest. DDP's is whole, FSDP2 has the default's.
LAYOUTS = {
    "tp": MEGATRON,
    "sp": {**MEGATRON, "*embed_tokens.weight": ("tp", None)},
}


@dataclass(frozen=True)
class Case:
    """The model, batch and number of ranks of all sides. ``scale``: a key of
    ``_common.LLAMAS``; ``device``: this rank's; ``codegen``: "inductor", or "eager",
    which compiles no kernels on any side."""

    ranks: int
    layers: int = 2
    batch: int = 8
    length: int = 128
    scale: str = "small"
    device: str = "cpu"
    dtype: str = "float32"
    codegen: str = "inductor"

    @property
    def backend(self) -> str:
        """The backend that peers are compiled with."""
        return "inductor" if self.codegen == "inductor" else "aot_eager"

    @property
    def kind(self) -> str:
        """The type of the device."""
        return self.device.partition(":")[0]

    def model(self) -> Any:
        """Build the model, with equal random weights on all ranks and sides."""
        import torch

        with torch.device(self.device):
            return llama(self.layers, scale=self.scale).to(getattr(torch, self.dtype))

    def ids(self, step: int) -> Any:
        """Return the whole batch of a step."""
        import torch

        generator = torch.Generator().manual_seed(step)
        size, words = (self.batch, self.length), LLAMAS[self.scale]["vocab_size"]
        return torch.randint(words, size, generator=generator).to(self.device)

    def now(self) -> float:
        """Wait for the device, and return the time in seconds."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class Step:
    """A training step that times itself: called with the index of a step, it returns
    the seconds of forward and backward (nan: unknown), of the whole step, and the
    loss."""

    run: Callable[[int], tuple[float, float, Any]]
    model: Any
    optimizer: Any
    # Forward and backward of a step alone; None if they are one program with the
    # update.
    passes: Callable[[int], Any] | None = None

    def __call__(self, index: int) -> tuple[float, float, Any]:
        return self.run(index)


def own_part(ids: Any) -> Any:
    """Return this rank's share of a batch, as a DistributedSampler would deal it."""
    import torch.distributed as dist

    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids).loss


def trainer(
    case: Case, peer: str, model: Any, groups: Iterable[Any], update: bool = False
) -> Step:
    """Make a step that calls the model, then the optimizer. ``groups``: the optimizer's
    parameters; ``update``: whether its step is compiled, too."""
    import torch

    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    advance = optimizer.step
    if update:
        advance = torch.compile(advance, backend=case.backend, dynamic=False)

    def passes(ids: Any) -> Any:
        loss = loss_of(model, ids)
        loss.backward()
        return loss.detach()

    def step(ids: Any) -> tuple[float, Any]:
        loss = passes(ids)
        # A wait for the device would cost this side, but not ``fxpar.train_step``.
        middle = time.perf_counter() if case.kind == "cpu" else math.nan
        advance()
        optimizer.zero_grad()
        return middle, loss

    part = _part(peer)
    return Step(
        _timed(case, peer, step),
        model,
        optimizer,
        lambda index: passes(part(case.ids(index))),
    )


def _part(peer: str) -> Callable[[Any], Any]:
    """Return the function from a batch to the part that a rank is given."""
    return own_part if peer in LOCAL else lambda ids: ids


def _timed(
    case: Case, peer: str, step: Callable[[Any], tuple[float, Any]]
) -> Callable[[int], tuple[float, float, Any]]:
    """Time a step that returns when its backward ended, and its loss; the loss is
    averaged over ranks outside the timed part."""
    import torch.distributed as dist

    part = _part(peer)

    def run(index: int) -> tuple[float, float, Any]:
        ids = part(case.ids(index))
        dist.barrier()
        begun = case.now()
        middle, loss = step(ids)
        end = case.now()
        if peer in LOCAL:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        return middle - begun, end - begun, loss

    return run


def fxpar_side(
    peer: str,
    case: Case,
    options: dict[str, Any],
    *,
    as_peer: bool = False,
    sample: bool = False,
) -> Step:
    """Make a step of fxpar. ``options``: added to the usual ones; ``as_peer``: whether
    parameters at rest have the peer's layout; ``sample``: whether ``fxpar.shard`` is
    given a batch."""
    import torch

    model, options = _laid_out(peer, case, options, as_peer, sample)
    compiled = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    return trainer(case, peer, compiled, [{"params": list(model.parameters())}])


def one_program(peer: str, case: Case, options: dict[str, Any]) -> Step:
    """Make a step of ``fxpar.train_step``."""
    import torch

    import fxpar

    model, options = _laid_out(peer, case, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = fxpar.train_step(model, loss_of, optimizer, options=options)
    return Step(
        _timed(case, peer, lambda ids: (math.nan, whole(ids).detach())),
        model,
        optimizer,
    )


def _laid_out(
    peer: str,
    case: Case,
    options: dict[str, Any],
    as_peer: bool = False,
    sample: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Return the model, its parameters laid out, and all options. Beside DDP
    parameters stay whole, as DDP keeps them and as README's one line does."""
    import fxpar

    model, mesh = case.model(), f"{AXIS[peer]}={case.ranks}"
    hints = LAYOUTS[peer] if as_peer else None
    if peer != "ddp":
        ids = case.ids(0)
        call = ((), {"input_ids": ids, "labels": ids}) if sample else None
        model = fxpar.shard(model, mesh=mesh, sample=call, hints=hints)
    options = {"mesh": mesh, "codegen": case.codegen, **options}
    if peer in LOCAL:
        options["inputs"] = "local"
    return model, options


def state_bytes(step: Step) -> tuple[int, int]:
    """Return bytes of parameters and of the optimizer's state on this rank."""
    import torch

    def size(x: Any) -> int:
        return int((x.to_local() if hasattr(x, "to_local") else x).nbytes)

    held = (
        x
        for state in step.optimizer.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor)
    )
    return sum(map(size, step.model.parameters())), sum(map(size, held))


def disagreement(sides: Mapping[str, Step], indices: Iterable[int]) -> dict[str, float]:
    """Return for each side the largest relative difference of its losses from the first
    side's in some steps; infinite if a loss is nan."""
    worst = dict.fromkeys(sides, 0.0)
    for index in indices:
        losses = {name: float(step(index)[2]) for name, step in sides.items()}
        first, *_ = losses.values()
        for name, loss in losses.items():
            gap = abs(1 - loss / first)
            worst[name] = max(worst[name], math.inf if math.isnan(gap) else gap)
    return worst


def in_turn(
    sides: Mapping[str, Step],
    rounds: int,
    first: int,
    alone: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """Return seconds [round, side, (forward and backward, step)] of the slowest rank,
    where the order of sides swaps from round to round. ``first``: the index of the
    first step; ``alone``: a context in which nothing else runs."""
    import torch
    import torch.distributed as dist

    times = torch.zeros(rounds, len(sides), 2, dtype=torch.float64)
    for k in range(rounds):
        order = list(enumerate(sides.values()))
        with alone():
            dist.barrier()
            for i, step in order if k % 2 == 0 else reversed(order):
                times[k, i, 0], times[k, i, 1], _ = step(first + k)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times


def fsdp2_side(case: Case, compiled: str, update: bool) -> Step:
    """Make a step of FSDP2. ``compiled``: every layer ("layers") or the whole model
    ("whole")."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = case.model()
    mesh = init_device_mesh(case.kind, (case.ranks,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        if compiled == "layers":
            layer.compile(backend=case.backend, dynamic=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    called = model
    if compiled == "whole":
        called = torch.compile(model, backend=case.backend, dynamic=False)
    return trainer(
        case, "fsdp2", called, [{"params": list(model.parameters())}], update
    )


def ddp_side(case: Case, _: str, update: bool) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    compiled = torch.compile(model, backend=case.backend, dynamic=False)
    return trainer(
        case, "ddp", compiled, [{"params": list(model.parameters())}], update
    )


def tp_side(case: Case, _: str, update: bool) -> Step:
    """Make a step in the layout of Hugging Face's own plan for Llama, the inputs of a
    block prepared once: one all-reduce per block in the backward, not one per
    projection."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
    )

    whole = Replicate()
    layer = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(whole,)
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()),
        **dict.fromkeys(["self_attn.o_proj", "mlp.down_proj"], RowwiseParallel()),
    }
    root = {"lm_head": ColwiseParallel(output_layouts=whole)}
    return _dtensor(case, "tp", layer, root, update)


def sp_side(case: Case, _: str, update: bool) -> Step:
    """Make a step of Megatron's sequence parallelism, as torchtitan lays it out:
    between the blocks values are split along the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, split = Replicate(), Shard(1)
    rows = RowwiseParallel(output_layouts=split, use_local_output=False)
    norm = SequenceParallel(use_local_output=False)
    layer = {
        "input_layernorm": norm,
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": split},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": rows,
        "post_attention_layernorm": norm,
        "mlp": PrepareModuleInput(
            input_layouts=(split,), desired_input_layouts=(whole,)
        ),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()),
        "mlp.down_proj": rows,
    }
    root = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=whole, output_layouts=split, use_local_output=False
        ),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    return _dtensor(case, "sp", layer, root, update)


def _dtensor(
    case: Case, peer: str, layer: dict[str, Any], root: dict[str, Any], update: bool
) -> Step:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    model = case.model()
    mesh = init_device_mesh(case.kind, (case.ranks,), mesh_dim_names=("tp",))
    for each in model.model.layers:
        parallelize_module(each, mesh, layer)
    parallelize_module(model, mesh, root)
    compiled = torch.compile(model, backend=case.backend, dynamic=False)
    # Two groups, since the foreach kernels do not mix tensors and DTensors.
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": ps} for ps in (sharded, plain) if ps]
    return trainer(case, peer, compiled, groups, update)


# name -> (case, what is compiled, whether the optimizer's step is, too) -> its step
PEERS: dict[str, Callable[[Case, str, bool], Step]] = {
    "ddp": ddp_side,
    "fsdp2": fsdp2_side,
    "tp": tp_side,
    "sp": sp_side,
}


def _peer(name: str) -> Callable[[Case], Step]:
    return lambda case: PEERS[name](case, "layers", False)


# name -> its step, not compiled yet: peers; fxpar as its README says, on a mesh dp,
# where a rank reads its part of the batch, or tp; fxpar with the layout of a peer;
# ``fxpar.train_step``.
SIDES: dict[str, Callable[[Case], Step]] = {
    **{name: _peer(name) for name in PEERS},
    "fxpar": lambda case: fxpar_side("fsdp2", case, {}),
    "fxpar_tp": lambda case: fxpar_side("tp", case, {}),
    "as_ddp": lambda case: fxpar_side("ddp", case, {}),
    "as_tp": lambda case: fxpar_side("tp", case, {}, as_peer=True),
    "program": lambda case: one_program("fsdp2", case, {}),
    "program_tp": lambda case: one_program("tp", case, {}),
}
