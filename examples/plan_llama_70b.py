"""Plan a training step of Llama 3 70B, without devices and without its weights.

    python -m fxpar plan examples/plan_llama_70b.py:example --mesh auto:8x8 ...

The model is on the meta device in bfloat16, and each layer is a region of activation
checkpointing. Nothing is downloaded.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, BATCH, LENGTH = 80, 64, 4096


def build(layers: int = LAYERS) -> LlamaForCausalLM:
    """Build the model on the meta device, where it takes no memory."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable()  # each layer is a region
    return model.train()


def example() -> tuple:
    """Return a model and the arguments of a call, to be planned."""
    ids = torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta")
    return build(), (), {"input_ids": ids, "labels": ids}
