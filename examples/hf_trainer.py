"""Hugging Face's Trainer, with one line of fxpar before it.

    FXPAR_MESH="dp=2" FXPAR_INPUTS=local \
        torchrun --nproc-per-node 2 examples/hf_trainer.py

prints

    losses fall: True
    trained: LlamaForCausalLM

The Trainer gives every rank its own part of the data, so inputs are local. Losses and
gradients are those that it has with DistributedDataParallel.
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    vocab_size=32,
)
model = LlamaForCausalLM(config)
model.compile(backend="fxpar")  # the line
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
arguments = TrainingArguments(
    "out",
    use_cpu=True,
    per_device_train_batch_size=2,
    num_train_epochs=2,
    learning_rate=0.05,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    eval_strategy="epoch",
    save_strategy="no",
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
trainer.remove_callback(PrinterCallback)
# Not wrapped in DDP, whose all-reduce would come on top of fxpar's.
trainer.accelerator.prepare_model(model, evaluation_mode=True)
trainer.train()

if os.environ.get("RANK", "0") == "0":
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    losses = [row["eval_loss"] for row in rows]
    print("losses fall:", losses == sorted(losses, reverse=True))
    print("trained:", type(trainer.model_wrapped).__name__)
