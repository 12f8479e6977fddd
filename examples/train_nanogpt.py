"""A module of your own, written as nanoGPT is, under the best plan for four processes.

    torchrun --nproc-per-node 4 examples/train_nanogpt.py

The five lines are at the end of the file: describe, plan, parallelize, optimizer, forward_backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import galvatron


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 64


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (own.view(rows, tokens, self.n_head, width // self.n_head).transpose(1, 2) for own in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(rows, tokens, width))
        made: Tensor = x + self.mlp(self.ln_2(x))
        return made


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        wte: nn.Module = self.transformer["wte"]
        wte.weight = self.lm_head.weight  # tied

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss


def batch_of(step: int, rows: int, config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Numbers that count up, each row from another one: the next token follows from the last."""
    first = torch.randint(config.vocab_size, (rows, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(config.block_size + 1)) % config.vocab_size
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    config = GPTConfig()
    model = GPT(config)
    example = batch_of(0, 2, config)
    spec = galvatron.describe(model, example)
    plan = galvatron.plan(spec, "cpu-4", batch=16)  # or your own cluster: docs/clusters.md
    parallel = galvatron.parallelize(model, plan, example=example)
    optimizer = parallel.optimizer(lr=3e-3)
    for step in range(60):
        loss = parallel.forward_backward(batch_of(step, plan.batch, config))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and parallel.rank == 0:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
