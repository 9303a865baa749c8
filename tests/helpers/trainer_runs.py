"""Runs of Hugging Face's ``Trainer``, with fxpar and without. Imported where they run:
the library takes seconds to import."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainingArguments

from tests.helpers.libraries import EVALUATED, fxpar_options, llama, rows, torchrun


class SameBatches(Trainer):
    """Every rank reads every batch: the one-device script, started N times."""

    def get_train_dataloader(self) -> DataLoader:
        order = torch.Generator().manual_seed(self.args.seed)
        return self.loader(RandomSampler(self.train_dataset, generator=order))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return self.loader(range(len(self.eval_dataset)), self.eval_dataset)

    def loader(self, order: Any, data: Any = None) -> DataLoader:
        size, collate = self.args.train_batch_size, self.data_collator
        return DataLoader(
            data or self.train_dataset, size, sampler=order, collate_fn=collate
        )


def trainer(folder: str, kind: type[Trainer] = Trainer, **more: Any) -> Trainer:
    settings = {"num_train_epochs": 1, "save_strategy": "no"} | more
    data = {
        "train_dataset": rows(settings.pop("count", 16)),
        "eval_dataset": rows(8, seed=1),
    }
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=settings.pop("batch", 2),
        per_device_eval_batch_size=settings.pop("eval_batch", 2),
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    return kind(model=llama(), args=arguments, **data)


def said(trained: Trainer) -> list[tuple[str, float]]:
    """What was logged that does not depend on the time."""
    names = ("loss", "grad_norm", "eval_loss")
    return [
        (k, v)
        for row in trained.state.log_history
        for k, v in row.items()
        if k in names
    ]


def log_of(
    how: str | None, settings: dict[str, Any], folder: str
) -> tuple[list[tuple[str, float]], str]:
    """A run's log, and what the model was wrapped in. ``how``: inputs of fxpar, with
    "bare" where accelerate is told to leave its wrapper out; None is without fxpar."""
    with torchrun():
        kind = SameBatches if how and how.startswith("global") else Trainer
        run = trainer(folder, kind, **settings)
        if how:
            run.model.compile(**fxpar_options(how.split()[0]))
        if how and how.endswith("bare"):
            run.accelerator.prepare_model(run.model, evaluation_mode=True)
        run.train()
        return said(run), type(run.model_wrapped).__name__


def resumed(folder: str) -> tuple[list, list, list, str]:
    """Logs of a whole run and of one that goes on from its second checkpoint, the
    parameters each ends with, and which checkpoint was the best."""
    saving = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    settings = {"metric_for_best_model": "eval_loss"} | EVALUATED | saving
    logs, parameters, best = [], [], ""
    for name in ("whole", "resumed"):
        with torchrun():
            run = trainer(f"{folder}/whole", **settings)
            run.model.compile(**fxpar_options("local"))
            again = f"{folder}/whole/checkpoint-2" if name == "resumed" else None
            run.train(resume_from_checkpoint=again)
            logs.append(said(run))
            parameters.append([p.detach().clone() for p in run.model.parameters()])
            best = run.state.best_model_checkpoint
    return logs[0], logs[1], parameters, best
