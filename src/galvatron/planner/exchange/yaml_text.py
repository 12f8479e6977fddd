"""YAML of mappings, lists and plain values, written without a library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["yaml_text"]


def yaml_text(content: Mapping[str, Any], indent: str = "") -> str:
    """A mapping in block style; lists and values in YAML's flow style, which is JSON's."""
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            items = "".join(f"{indent}  - {json.dumps(item)}\n" for item in value)
            lines.append(f"{indent}{key}:\n{items}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
