"""The models of today: each configuration builds, with Hugging Face's own classes, a model of the published size."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from longer import longer

from galvatron.core.spec import Training
from galvatron.families import configured_names, load_model
from galvatron.families.build import read_config
from galvatron.families.huggingface import UnknownArchitecture

# In millions, as their authors say (model cards and papers); tied embeddings count once.
_PUBLISHED = {
    "deepseek-v3": 671_026,
    "dinov2-base": 86.6 + 1.5,
    "dinov2-large": 304.4 + 2.0,
    "dinov2-giant": 1136.5 + 3.1,
    "gemma2-2b": 2614,
    "gemma2-9b": 9242,
    "gemma2-27b": 27_227,
    "gemma3-1b": 999.9,
    "gemma3-4b": 3880,
    "gemma3-12b": 11_766,
    "gemma3-27b": 27_009,
    "gpt-oss-20b": 20_915,
    "gpt-oss-120b": 116_829,
    "llama3.1-8b": 8030,
    "llama3.1-70b": 70_554,
    "llama3.1-405b": 405_853,
    "llama3.2-1b": 1236,
    "llama3.2-3b": 3213,
    "mistral-7b": 7248,
    "mixtral-8x7b": 46_703,
    "modernbert-base": 149.6,
    "modernbert-large": 395.8,
    "olmo2-1b": 1485,
    "olmo2-7b": 7299,
    "olmo2-13b": 13_716,
    "phi4": 14_660,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-3b": 3086,
    "qwen2.5-7b": 7616,
    "qwen2.5-14b": 14_770,
    "qwen2.5-32b": 32_764,
    "qwen2.5-72b": 72_706,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-14b": 14_768,
    "qwen3-30b-a3b": 30_532,
    "qwen3-32b": 32_762,
    "whisper-large-v3": 1543.5,
}
_SHORT = {"dinov2-base", "gpt-oss-20b", "llama3.2-1b", "modernbert-base", "olmo2-1b", "phi4", "qwen2.5-0.5b"}


def test_all_are_here() -> None:
    assert set(configured_names()) == set(_PUBLISHED)


@pytest.mark.parametrize("name", [own if own in _SHORT else longer(own) for own in _PUBLISHED])
@pytest.mark.filterwarnings("ignore")
def test_the_size_is_the_published_one(name: str) -> None:
    try:
        content = load_model(name, Training()).config
    except UnknownArchitecture as unknown:
        content = unknown.content
    assert content is not None
    config = read_config(content)
    stock = getattr(transformers, content["architectures"][0])
    with torch.device("meta"):
        model = stock(config)
    found = sum(own.numel() for own in model.parameters()) / 1e6
    assert found == pytest.approx(_PUBLISHED[name], rel=0.002)
    unread = [key for key in content if not hasattr(config, key) and "rope" not in key]
    assert not unread, "fields that transformers does not know"
    if "rope_theta" in content:  # which transformers 5 keeps elsewhere
        assert f'"rope_theta": {content["rope_theta"]}' in json.dumps(config.rope_parameters)
    assert json.loads(json.dumps(content)) == content


def test_counted_ones_are_those_of_a_family() -> None:
    spec = load_model("llama3.1-8b", Training())
    assert spec.family == "llama"
    assert spec.training.sequence_length == 8192, "of 131,072 that it can take"
    assert round(spec.parameters / 1e9, 2) == 8.03
