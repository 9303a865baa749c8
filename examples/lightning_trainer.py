"""PyTorch Lightning, with a strategy that compiles instead of wrapping.

    FXPAR_MESH="dp=2" FXPAR_INPUTS=local \
        torchrun --nproc-per-node 2 examples/lightning_trainer.py

prints

    losses fall: True
    gradients are equal on both ranks: True
"""

import os

import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy


class FxparStrategy(DDPStrategy):
    """Processes, samplers and checkpoints of DDP; fxpar averages the gradients."""

    def configure_ddp(self) -> None:
        for part in self.lightning_module.children():
            part.forward = torch.compile(part.forward, backend="fxpar")


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        self.losses: list[float] = []
        self.equal = True

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).square().mean()
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.equal &= len(self.all_gather(norm).unique()) == 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
model, rows = Lit(), torch.randn(8, 8).repeat(2, 1)
data = torch.utils.data.DataLoader(list(rows), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=FxparStrategy(), max_epochs=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, data)

if os.environ["RANK"] == "0":
    print("losses fall:", model.losses == sorted(model.losses, reverse=True))
    print("gradients are equal on both ranks:", model.equal)
