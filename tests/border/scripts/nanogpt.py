"""A small GPT: accumulation, clipping, a schedule of rates, evaluation on rank 0."""

import contextlib
import math

import torch
import torch.nn.functional as F
from common import arguments, finish, mean, norm, parallel, part, start
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words: int, width: int, time: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(time, width)
        self.h = nn.ModuleList([Block(width, 4) for _ in range(2)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def main() -> None:
    args = arguments()
    rank, parts = start(args)
    torch.manual_seed(1337)
    raw = GPT(48, 32, 16)
    data = torch.randint(0, 48, (64, 17))
    model = parallel(raw, args)
    decay = [p for p in raw.parameters() if p.dim() >= 2]
    rest = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    losses, norms, evals = [], [], []
    for it in range(3):
        rate = 1e-3 * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * it / 3)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro in range(2):
            at = (2 * it + micro) * 8
            batch = part(data[at : at + 8], rank, parts)
            _, loss = model(batch[:, :-1], batch[:, 1:].contiguous())
            loss = loss / 2
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(raw.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(mean(loss.item() * 2, args))
        if rank == 0:  # the master evaluates
            evals.append(evaluate(model, raw, data[-8:], args))
    finish(args, losses=losses, norms=norms, evals=evals, norm=norm(raw))


@torch.no_grad()
def evaluate(model, raw, batch, args):
    alone = contextlib.nullcontext()
    if args.parallel in ("global", "local"):
        import fxpar

        alone = fxpar.alone()
    raw.eval()
    net = raw if args.parallel == "ddp" else model
    with alone:
        _, loss = net(batch[:, :-1], batch[:, 1:].contiguous())
    raw.train()
    return loss.item()


if __name__ == "__main__":
    main()
