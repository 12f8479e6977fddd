"""A stock Hugging Face model trained under a plan, in a few lines.

galvatron plan bert-tiny --cluster cpu-4 --batch 16 --sequence-length 64 --output plan.json
torchrun --nproc-per-node 4 examples/train_bert.py plan.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig

import galvatron


def batches(config: PreTrainedConfig, rows: int, length: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens, of which every seventh is to be predicted; the same batches on every rank."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
        labels = torch.where(torch.arange(length) % 7 == 0, ids, -100)
        yield {"input_ids": ids, "labels": labels}


def main() -> None:
    plan = galvatron.Plan.load(sys.argv[1])
    assert plan.model.config is not None
    config = AutoConfig.for_model(**plan.model.config)
    with torch.device("meta"):  # no rank needs the whole model
        stock = AutoModelForMaskedLM.from_config(config)

    model = galvatron.parallelize(stock, plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    length = plan.model.training.sequence_length or config.max_position_embeddings
    for step, batch in enumerate(model.local_batches(batches(config, plan.batch, length, steps=10))):
        loss = model.forward_backward(batch)
        norm = model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if model.rank == 0:
            print(f"step {step}  loss {loss:.4f}  gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
