"""Shallow copies of configurations: the first blocks only, so many that every kind is among them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["shallow_config"]

_LAYERS, _MOST_LAYERS = 4, 12
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_dense_layers")
"""How many blocks before the first one with experts: one of them shows as much as three."""


def shallow_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with few blocks. Raises nothing itself: what cannot be built shallow shows then."""
    shallow = copy.deepcopy(config)
    _cut(shallow)
    return shallow


def _cut(config: Any) -> None:
    """Keep the first blocks, so many that each kind is among them; lists of one entry a block are cut likewise."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for value in fields.values():
        if isinstance(value, PreTrainedConfig):
            _cut(value)
    if isinstance(fields.get("depths"), list | tuple):
        config.depths = type(fields["depths"])(min(own, 2) for own in fields["depths"])
    for name in _FIRST_DENSE:
        if isinstance(fields.get(name), int) and fields[name] > 1:
            setattr(config, name, 1)
    if isinstance(fields.get("num_kv_shared_layers"), int):
        config.num_kv_shared_layers = min(fields["num_kv_shared_layers"], _LAYERS // 2)
    counts = {name: value for name, value in fields.items() if _counts_layers(name, value)}
    for name, count in counts.items():
        lists = {key: own for key, own in fields.items() if isinstance(own, list | tuple) and len(own) == count}
        kept = min(count, _blocks_to_keep(fields, lists))
        setattr(config, name, kept)
        _cut_differences(config, kept)
        if name == "depth":
            _move_indexes(config, fields, count, kept)
        for key, own in lists.items():
            if name.startswith("num_hidden") or key.startswith(("layer", "mlp", "attention", "block")):
                setattr(config, key, type(own)(own[:kept]))


def _cut_differences(config: Any, kept: int) -> None:
    """What single blocks have otherwise than the others (Gemma 4's heads), by their index."""
    differences = config.to_dict().get("per_layer_config")
    if isinstance(differences, dict):
        config.per_layer_config = {index: own for index, own in differences.items() if int(index) < kept}


def _move_indexes(config: Any, fields: Mapping[str, Any], count: int, kept: int) -> None:
    """Blocks of a vision tower that are special (full attention among windows) are at most half of those kept."""
    for key, own in fields.items():
        if key.endswith("_indexes") and isinstance(own, list | tuple):
            setattr(config, key, type(own)(sorted({index * kept // count for index in own})[: kept // 2]))


def _counts_layers(name: str, value: Any) -> bool:
    ends = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
    return isinstance(value, int) and not isinstance(value, bool) and value > _LAYERS and name.endswith(ends)


def _blocks_to_keep(fields: Mapping[str, Any], lists: Mapping[str, Any]) -> int:
    kept = _LAYERS
    for name, value in fields.items():
        if isinstance(value, int) and name.endswith(("_period", "_pattern", "_interval", "_every_n_layers")):
            kept = max(kept, value)
    for own in lists.values():
        kinds = set(map(str, own))
        if 1 < len(kinds) <= _LAYERS:
            kept = max(kept, *(_place(own, kind) + 1 for kind in kinds))
    return min(kept, _MOST_LAYERS)


def _place(kinds: Sequence[Any], kind: str) -> int:
    """Where a kind is; of blocks that share weights with each other, where the second is."""
    places = [at for at, each in enumerate(kinds) if str(each) == kind]
    return places[min(1, len(places) - 1)] if kind == "hybrid" else places[0]
