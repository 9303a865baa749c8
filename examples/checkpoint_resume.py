"""Train with everything sharded, save, and resume on another mesh.

    FXPAR_MESH="fsdp=2" torchrun --nproc-per-node 2 examples/checkpoint_resume.py
    FXPAR_MESH="tp=2" FXPAR_PLAN=propagate \
        torchrun --nproc-per-node 2 examples/checkpoint_resume.py

prints

    fsdp=2: steps 0 to 3, a rank holds [16, 16] of [32, 16]
    tp=2: steps 3 to 6, a rank holds [16, 16] of [32, 16]
    losses fall: True

The first run finds no checkpoint and begins; the second resumes. ``fxpar.shard`` is the
line that FSDP2's ``fully_shard`` would be.
"""

import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fxpar

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
)
model = fxpar.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
folder = Path("checkpoint")
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "losses": []}
if folder.exists():
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )

compiled, losses = torch.compile(model, backend="fxpar"), state["losses"]
begin, x = len(losses), torch.ones(4, 16)
for _ in range(3):
    loss = (compiled(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "losses": losses}
dcp.save(state, checkpoint_id=folder)

if os.environ["RANK"] == "0":
    weight = model[0].weight
    held = f"a rank holds {list(weight.to_local().shape)} of {list(weight.shape)}"
    print(f"{os.environ['FXPAR_MESH']}: steps {begin} to {len(losses)}, {held}")
    if begin:
        print("losses fall:", losses == sorted(losses, reverse=True))
