"""Few tokens are cut out of a sequence that ranks hold in parts, or are generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from tests.helpers.device import put
from tests.helpers.spawn import ranks_of

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("propagated"),
]


class Cuts(nn.Module):
    """Cuts a few tokens out of what runs over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.wide(x))
        both = torch.stack([hidden, hidden.cummax(1)[0]], 1).sum(1)
        last = nn.functional.cross_entropy(self.out(both[:, -1]), labels)
        return last + self.out(both[:, 0]).square().mean() + both[:, 3:5].mean()


def cut(options: dict[str, Any] | None) -> Any:
    """The loss, the gradients and what the plan sends."""
    torch.manual_seed(0)
    model = put(Cuts().double())
    x = put(torch.randn(4, 24, 16).double())
    labels = put(torch.tensor([3, 1, 4, 1]))
    run: Any = model
    if options is not None:
        torch._dynamo.reset()
        run = torch.compile(model, backend="fxpar", options=options)
    loss = run(x, labels)
    loss.backward()
    sent = [] if options is None else [c.bytes for c in fxpar.plans()[-1].collectives]
    return loss.detach(), [p.grad for p in model.parameters()], sent


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_few_tokens_are_cut_out(codegen: str) -> None:
    options = {"mesh": "sp=2", "plan": "propagate", "codegen": codegen}
    want = cut(None)
    for *got, sent in ranks_of("sp=2").run(cut, options, timeout=900.0):
        torch.testing.assert_close(got, [*want[:2]], rtol=1e-9, atol=1e-9)
        # All tokens of what is cut are 4 * 24 * 32 numbers.
        assert sent and max(sent) <= 4 * 24 * 32 * 8


# Generation, one token after the other


def attend_to_split_cache(module: Any, q: Any, k: Any, v: Any, *args: Any, **how: Any):
    """Keys and values stay split along the sequence, where queries are few."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if q.shape[2] == 1:
        k, v = (fxpar.constrain(x, None, None, "cp", None) for x in (k, v))
    return sdpa_attention_forward(module, q, k, v, *args, **how)


def generated(options: dict[str, Any] | None, cache: str) -> Any:
    """Tokens, and how keys lie in the attentions of each plan."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    torch._dynamo.reset()
    AttentionInterface.register("split_cache", attend_to_split_cache)
    AttentionMaskInterface.register("split_cache", sdpa_mask)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double().eval()
    model.set_attn_implementation("split_cache" if options else "sdpa")
    model.generation_config.disable_compile = True
    before = len(fxpar.plans())
    if options is not None:
        model.forward = torch.compile(model.forward, backend="fxpar", options=options)
    ids = torch.randint(64, (2, 49), generator=torch.Generator().manual_seed(0))
    how = {"cache_implementation": cache} if cache != "dynamic" else {}
    asked = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    out = model.generate(ids, do_sample=False, **asked, **how)
    keys = [
        [str(node.operands[1]) for node in plan.nodes if "attention" in node.name]
        for plan in fxpar.plans()[before:]
    ]
    return out, keys


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_are_generated_as_on_one_device(cache: str) -> None:
    want, _ = generated(None, cache)
    options = {"mesh": "cp=2", "plan": "propagate", "codegen": "eager"}
    for got, keys in ranks_of("cp=2").run(generated, options, cache, timeout=300.0):
        assert torch.equal(got, want)
        if cache == "static":  # of 56 rows
            assert keys[-1] == ["[_, _, cp, _]"] * 2
