"""A run of PyTorch Lightning's ``Trainer``, with ``DDPStrategy`` or with fxpar in its
place. Imported by the ranks that run it: the library takes seconds to import."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.libraries import torchrun

Fitted = tuple[list[float], dict[str, torch.Tensor], float]


class FxparStrategy(DDPStrategy):
    """Ranks and samplers as for DDP; fxpar in place of its wrapper."""

    def configure_ddp(self) -> None:
        options = {"codegen": "eager", "inputs": "local"}
        for part in self.lightning_module.children():
            part.forward = torch.compile(part.forward, backend="fxpar", options=options)


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.norms: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.norms.append(float(norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator)
    y = torch.randint(0, 4, (24,), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=2)


def fit(
    ours: bool, folder: str, resume: bool = False, precision: str = "32-true"
) -> Fitted:
    """Gradient norms of each step, the parameters, and the loss of the validation."""
    with torchrun():
        model = Lit()
        how: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": torch.distributed.get_world_size(),
            "strategy": FxparStrategy() if ours else DDPStrategy(),
            "precision": precision,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "default_root_dir": folder,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        path = f"{folder}/saved.ckpt" if resume else None
        trainer = lightning.Trainer(max_epochs=2, enable_checkpointing=False, **how)
        trainer.fit(model, data(), data(), ckpt_path=path)
        if not resume:
            trainer.save_checkpoint(f"{folder}/saved.ckpt")
        state = {k: v.clone() for k, v in model.state_dict().items()}
        return model.norms, state, float(trainer.callback_metrics.get("val_loss", 0.0))
