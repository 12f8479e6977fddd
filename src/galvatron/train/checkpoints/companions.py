"""What a model's folder holds besides weights and configuration: tokenizer, chat template, generation settings.

A run keeps the files of what it started from, so that an exported model can be talked to, wherever those went.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.train.data.vocabulary import TOKENIZER_FILES, has_tokenizer

__all__ = ["keep_companions", "write_companions"]

_GENERATION = "generation_config.json"
_OTHERS = (_GENERATION, "preprocessor_config.json", "processor_config.json")


def keep_companions(kept: Path, *, tokenizer: Path | None, model: Path | None) -> None:
    """Copy the files of a run's tokenizer and of the model that it starts from; those kept before stay."""
    if kept.is_dir():
        return
    sources = [(tokenizer or model, TOKENIZER_FILES), (model, _OTHERS)]
    draft = kept.with_name(f"{kept.name}.partial")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for folder, names in sources:
            for name in names if folder is not None else ():
                path = Path(folder or "") / name
                if path.is_file():
                    shutil.copyfile(path, draft / name)
        draft.rename(kept)
    except OSError as error:
        raise InvalidInput(f"{kept}: cannot be written ({error.strerror or error})") from error


def write_companions(kept: Path, out: Path, stock: Any) -> str | None:
    """Put them beside exported weights; ``stock``: the model. Returns what is missing, for people."""
    if kept.is_dir():
        for path in sorted(kept.iterdir()):
            if not path.is_file():  # a link to a device would never end
                raise InvalidInput(f"{path}: is no file; expected what a run keeps of its tokenizer, or nothing")
        shutil.copytree(kept, out, dirs_exist_ok=True)
    found = has_tokenizer(out)
    if hasattr(stock, "can_generate") and stock.can_generate() and not (out / _GENERATION).is_file():
        _write_generation(out, stock, found)
    if found or getattr(stock, "main_input_name", "input_ids") != "input_ids":
        return None
    return "no tokenizer is written, because the run had none with files; copy one beside the model"


def _write_generation(out: Path, stock: Any, has_own_tokenizer: bool) -> None:
    """From the configuration; the tokenizer knows best which tokens begin, end and fill."""
    from transformers import AutoTokenizer, GenerationConfig

    content: dict[str, Any] = json.loads(GenerationConfig.from_model_config(stock.config).to_json_string())
    if has_own_tokenizer:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(out), local_files_only=True)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            known = getattr(tokenizer, name, None)
            if known is not None:
                content[name] = known
    content.pop("_from_model_config", None)
    (out / _GENERATION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
