"""What a user would write today, and fxpar's side: training steps of one small Llama.

Every function makes a ``Step`` in this process, one of ``count`` ranks. Peers: DDP,
FSDP2, and DTensor tensor parallelism without and with sequence parallelism, each with
torch.compile, the optimizer's step compiled too if asked. fxpar's side has the same
layout at rest as the peer it stands beside.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from _common import llama

LAYERS, BATCH, LENGTH = 2, 8, 128
AXIS = {"ddp": "dp", "fsdp2": "dp", "tp": "tp", "sp": "tp"}
LOCAL = {"ddp", "fsdp2"}  # each rank reads its part of the batch
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")
MEGATRON = {
    **{f"*{name}.weight": ("tp", None) for name in COLUMNS},
    **{f"*{name}.weight": (None, "tp") for name in ROWS},
}
HINTS = {
    "fsdp2": None,
    "tp": MEGATRON,
    "sp": {**MEGATRON, "*embed_tokens.weight": ("tp", None)},
}

# (seconds of forward and backward, if known, of the whole step, loss)
Step = Callable[[int], tuple[float, float, Any]]


def batch(step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randint(2048, (BATCH, LENGTH), generator=generator)


def own_part(ids: Any) -> Any:
    """This rank's share of a batch, as a DistributedSampler would deal it."""
    import torch.distributed as dist

    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids).loss


def trainer(
    model: Any, groups: Iterable[Any], part: Callable[[Any], Any], backend: str = ""
) -> Step:
    """A training step that times itself. ``groups``: the optimizer's parameters;
    ``backend``: what its step is compiled by."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    update = optimizer.step
    if backend:
        update = torch.compile(update, backend=backend, dynamic=False)

    def step(index: int) -> tuple[float, float, Any]:
        ids = part(batch(index))
        dist.barrier()
        begun = time.perf_counter()
        loss = loss_of(model, ids)
        loss.backward()
        middle = time.perf_counter()
        update()
        optimizer.zero_grad()
        end = time.perf_counter()
        return middle - begun, end - begun, loss.detach()

    return step


def averaged(step: Step) -> Step:
    """A step whose loss is the mean over ranks; outside the timed part."""
    import torch.distributed as dist

    def mean(index: int) -> tuple[float, float, Any]:
        *times, loss = step(index)
        dist.all_reduce(loss)
        return *times, loss / dist.get_world_size()

    return mean


def fxpar_side(peer: str, count: int, codegen: str, options: dict[str, Any]) -> Step:
    """In the layout of ``peer``; ``options``: more of them."""
    import torch

    model, options, part = _laid_out(peer, count, codegen, options)
    compiled = torch.compile(model, backend="fxpar", dynamic=False, options=options)
    step = trainer(compiled, [{"params": list(model.parameters())}], part)
    return averaged(step) if peer in LOCAL else step


def one_program(peer: str, count: int, codegen: str, options: dict[str, Any]) -> Step:
    """The same by ``fxpar.train_step``."""
    import torch
    import torch.distributed as dist

    import fxpar

    model, options, part = _laid_out(peer, count, codegen, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    whole = fxpar.train_step(model, loss_of, optimizer, options=options)

    def step(index: int) -> tuple[float, float, Any]:
        ids = part(batch(index))
        dist.barrier()
        begun = time.perf_counter()
        loss = whole(ids)
        return math.nan, time.perf_counter() - begun, loss

    return averaged(step) if peer in LOCAL else step


def _laid_out(
    peer: str, count: int, codegen: str, options: dict[str, Any]
) -> tuple[Any, dict[str, Any], Callable[[Any], Any]]:
    """The model, all options, and what of a batch a rank is given."""
    import fxpar

    model = llama(LAYERS)
    mesh = f"{AXIS[peer]}={count}"
    if peer in HINTS:
        model = fxpar.shard(model, mesh=mesh, hints=HINTS[peer])
    options = {"mesh": mesh, "codegen": codegen, **options}
    if peer in LOCAL:
        options["inputs"] = "local"
    return model, options, own_part if peer in LOCAL else lambda ids: ids


def fsdp2_side(count: int, backend: str, compiled: str, update: str) -> Step:
    """``compiled``: every layer ("layers") or the whole model ("whole"); ``update``:
    what the optimizer's step is compiled by, if anything."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = llama(LAYERS)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        if compiled == "layers":
            layer.compile(backend=backend, dynamic=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    called = model
    if compiled == "whole":
        called = torch.compile(model, backend=backend, dynamic=False)
    groups = [{"params": list(model.parameters())}]
    return averaged(trainer(called, groups, own_part, update))


def ddp_side(count: int, backend: str, _: str, update: str) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(llama(LAYERS), gradient_as_bucket_view=True)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    groups = [{"params": list(model.parameters())}]
    return averaged(trainer(compiled, groups, own_part, update))


def tp_side(count: int, backend: str, _: str, update: str) -> Step:
    """The layout of Hugging Face's own plan for Llama, inputs of a block prepared once:
    one all-reduce per block in the backward, not one per projection."""
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
    return _dtensor(count, backend, layer, root, update)


def sp_side(count: int, backend: str, _: str, update: str) -> Step:
    """Megatron's sequence parallelism, as torchtitan lays it out: between the blocks
    values lie split along the sequence."""
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
    return _dtensor(count, backend, layer, root, update)


def _dtensor(
    count: int,
    backend: str,
    layer: dict[str, Any],
    root: dict[str, Any],
    update: str,
) -> Step:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    model = llama(LAYERS)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))
    for each in model.model.layers:
        parallelize_module(each, mesh, layer)
    parallelize_module(model, mesh, root)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    # Apart, since the foreach kernels do not mix tensors and DTensors.
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": ps} for ps in (sharded, plain) if ps]
    return trainer(compiled, groups, lambda ids: ids, update)


# name -> (ranks, backend of torch.compile, what is compiled, backend of the optimizer's
# step) -> its step
PEERS: dict[str, Callable[[int, str, str, str], Step]] = {
    "ddp": ddp_side,
    "fsdp2": fsdp2_side,
    "tp": tp_side,
    "sp": sp_side,
}
