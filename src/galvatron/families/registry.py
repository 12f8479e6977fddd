"""Which adapter cuts a model: by its stock class, else the generic one."""

from __future__ import annotations

from torch import nn

from galvatron.families.bert.adapter import Bert
from galvatron.families.generic.adapter import Generic, Loss
from galvatron.families.gpt2.adapter import Gpt2
from galvatron.families.layer import Batch, CutModel
from galvatron.families.llama.adapter import Llama
from galvatron.families.swin.adapter import Swin
from galvatron.families.t5.adapter import T5
from galvatron.families.vit.adapter import Vit

__all__ = ["FAMILIES", "cut"]

FAMILIES: dict[str, type[CutModel]] = {
    "BertForMaskedLM": Bert,
    "GPT2LMHeadModel": Gpt2,
    "LlamaForCausalLM": Llama,
    "SwinForImageClassification": Swin,
    "T5ForConditionalGeneration": T5,
    "ViTForImageClassification": Vit,
}
"""Stock class in ``transformers`` to its adapter."""


def cut(model: nn.Module, batch: Batch | None = None, loss: Loss | None = None) -> CutModel:
    """The model as layers, which hold the model's own modules.

    For a model of no family: ``batch`` is an example of what it takes (Hugging Face's models need none), ``loss`` makes
    of its output and the batch the loss, summed over the targets (default: cross-entropy of the logits).
    """
    kind = type(model)
    family = FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.") else None
    if family is None or loss is not None:
        return Generic(model, batch, loss)
    return family(model)
