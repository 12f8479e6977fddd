"""What people do to a model in memory, and what ranks then say of it or train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from oracle import Case, stock_model
from small_models import config
from torch import Tensor, nn

import galvatron
from galvatron.core.errors import GalvatronError
from galvatron.core.spec import Training

__all__ = ["DROPPING", "TP", "Halved", "changed", "losses_of", "refusal", "squares", "trained"]

TP = Case(config=config("llama", vocab_size=64), stages=[["tp2"] * 4], batch=4, steps=1, dtype=torch.float32)
DROPPING = replace(
    TP,
    config=config("gpt2", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.1),
    training=Training(dropout=True),
)


def changed(case: Case, change: str | None) -> Any:
    model: Any = stock_model(case)
    blocks: Any = model.transformer.h if hasattr(model, "transformer") else getattr(model, "model", None)
    blocks = getattr(blocks, "layers", blocks)
    match change:
        case "checkpointing":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        case "compiled layers":
            blocks[0] = torch.compile(blocks[0])
            blocks[1].compile()
        case "compiled":
            model = torch.compile(model)
        case "head bias":
            model.lm_head.bias = nn.Parameter(torch.ones(64))
        case "loss":
            model.loss_function = lambda logits, labels, **_: logits.mean()
        case "forward":
            model.forward = lambda **inputs: None
        case "other projection":
            blocks[0].mlp.gate_proj = nn.Sequential(blocks[0].mlp.gate_proj)
        case "split hook":
            blocks[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
        case "parameter hook":
            model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)
        case "shared weight":
            blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
        case "shared module":
            blocks[1].self_attn = blocks[0].self_attn
        case "shared inside":
            blocks[0].mlp.up_proj.weight = blocks[0].mlp.gate_proj.weight
        case "head of another class":
            model.lm_head.__class__ = Halved
        case "several modules as head":
            model.lm_head = nn.Sequential(model.lm_head)
        case "method" | "method of the head":
            projection = blocks[0].mlp.up_proj if change == "method" else model.lm_head
            projection.forward = MethodType(halved, projection)
        case "closure":
            old = blocks[0].mlp.up_proj.forward
            blocks[0].mlp.up_proj.forward = lambda hidden: 0.5 * old(hidden)
        case "largest norm":
            model.model.embed_tokens.max_norm = 0.3
        case "frequency":
            model.model.embed_tokens.scale_grad_by_freq = True
        case "backbone hook" | "root hook":
            (model if change == "root hook" else model.model).register_forward_hook(lambda *_: None)
        case "backbone method" | "root method":
            own = model if change == "root method" else model.model
            own.forward = MethodType(lambda self, *args, **named: type(self).forward(self, *args, **named), own)
        case "backbone class":
            model.model.__class__ = type("Own", (type(model.model),), {})
        case "region hook":
            blocks[0].mlp.register_full_backward_hook(lambda *_: None)
        case "activation":
            blocks[0].mlp.act_fn = nn.Softmax(-1)
        case "other activation":
            blocks[0].mlp.act_fn = nn.GELU()
        case "last norm":
            model.model.norm.__class__ = type("Own", (type(model.model.norm),), {})
        case "hook on an activation":
            blocks[0].mlp.act_fn.register_forward_hook(lambda *_: None)
        case "norm":
            blocks[0].input_layernorm.__class__ = type("Own", (type(blocks[0].input_layernorm),), {})
            blocks[0].register_forward_hook(lambda *_: None)
        case "outputs":
            model(input_ids=torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True, output_attentions=True)
        case "table of one stack":
            model.encoder.embed_tokens = nn.Embedding(67, 32)
        case "hook on the common table":
            model.shared.register_forward_hook(lambda *_: None)
        case "configuration":
            model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        case "evaluation":
            model.eval()
        case "part in evaluation":
            model.transformer.eval()
    return model


def halved(module: Any, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, module.weight) * 0.5


class Halved(nn.Linear):
    forward = halved  # type: ignore[assignment]


def refusal(case: Case, plan: galvatron.Plan, change: str) -> str:
    """On a rank: what is said to the model."""
    own = squares if change == "given loss" else None
    try:
        galvatron.parallelize(changed(case, change), plan, device="cpu", loss=own)
    except GalvatronError as error:
        return str(error)
    return ""


def squares(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = output.logits
    return logits.square().mean((1, 2)).sum() * batch["labels"].shape[1]


def losses_of(case: Case, plan: galvatron.Plan, given: list[dict[str, Tensor]], change: str | None) -> list[float]:
    """On a rank: of some steps, and of one more in training mode."""
    return trained(galvatron.parallelize(changed(case, change), plan, dtype=case.dtype, device="cpu"), given)


def trained(model: Any, given: list[dict[str, Tensor]], *, turns: bool = True) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(given):
        if turns and number == len(given) - 1:
            model.train()
        if isinstance(model, nn.Module):
            losses.append(model(**batch).loss)
            losses[-1].backward()
        else:
            losses.append(model.forward_backward(batch))
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss.detach()) for loss in losses]
