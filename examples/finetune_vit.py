"""A stock ViT fine-tuned on a folder of class folders with images.

galvatron plan FOLDER --cluster cluster.toml --batch 256 --output plan.json     # FOLDER: a saved Hugging Face ViT
torchrun --nproc-per-node 8 examples/finetune_vit.py plan.json FOLDER IMAGES OUT

The same in one command: galvatron train plan.json --weights FOLDER --data IMAGES --output runs/vit
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import galvatron
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import export_model
from galvatron.train.data import Loader, open_data

STEPS = 200


def main() -> None:
    plan = galvatron.Plan.load(sys.argv[1])
    folder, images, out = map(Path, sys.argv[2:5])
    assert plan.model.config is not None

    data = open_data(images, plan.model.config, plan.model.training, model_folder=folder)
    model = galvatron.parallelize(None, plan, weights=folder)
    optimizer = model.optimizer(torch.optim.AdamW, lr=5e-5, weight_decay=0.05, decay_vectors=False)
    checkpoints = Checkpoints(out / "checkpoints")
    loader = Loader(data.train, batch=plan.batch, workers=2, reads=model.rows_read())
    for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
        loss = model.forward_backward(batch)
        norm = model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if model.rank == 0:
            print(f"step {step}  loss {loss:.4f}  gradient norm {norm:.3f}")
        if step % 50 == 0:
            checkpoints.save(model, optimizer, {"data": loader.position.to_json()}, step=step)
    checkpoints.finish()
    loader.close()
    export_model(model, out / "model")  # AutoModelForImageClassification.from_pretrained loads it


if __name__ == "__main__":
    main()
