"""A user's own model file."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import Experts, ModelSpec, Precision, TensorParallel, Training
from galvatron.core.units import MIB
from galvatron.families import load_model

GOOD = """
name = "mine"

[[layers]]
name = "embedding"
parameters = 1_000_000
forward_flops = 0
activation_bytes = 4096
boundary_bytes = "1MiB"

[[layers]]
name = "block"
count = 3
parameters = 2_000_000
replicated_parameters = 4_000
forward_flops = 4.5e9
activation_bytes = "64MiB"
boundary_bytes = "1MiB"
transient_bytes = "3MiB"
tensor_parallel = { heads = 16, kv_heads = 4, sequence_length = 128 }

[[layers]]
name = "head"
parameters = 1_000_000
tied_parameters = 1_000_000
forward_flops = 2_000_000
split_activation_bytes = "6MiB"
replicated_activation_bytes = "2MiB"
boundary_bytes = "1MiB"
tensor_parallel = { forward_collectives = 0, backward_collectives = 1, message_bytes = "2MiB" }
"""


def read(folder: Path, text: str, training: Training | None = None) -> ModelSpec:
    path = folder / "mine.toml"
    path.write_text(text)
    return load_model(path, training or Training())


def test_figures_arrive(tmp_path: Path) -> None:
    model = read(tmp_path, GOOD)
    assert (model.name, model.family, len(model.layers)) == ("mine", "custom", 5)
    assert model.parameters == 1_000_000 + 3 * 2_000_000
    embedding, block, head = model.kinds
    assert embedding.tensor_parallel is None
    assert embedding.replicated_activation_bytes == 4096
    assert embedding.replicated_parameters == 1_000_000
    assert block.forward_flops == 4_500_000_000
    # 4 tensors of the boundary's size stay whole: block input, residual sum, norm outputs.
    assert (block.split_activation_bytes, block.replicated_activation_bytes) == (60 * MIB, 4 * MIB)
    assert block.tensor_parallel == TensorParallel(
        divides=(16, 4), forward_collectives=2, backward_collectives=2, message_bytes=MIB, sequence_divides=(128,)
    )
    assert (head.split_activation_bytes, head.replicated_activation_bytes) == (6 * MIB, 2 * MIB)
    assert head.tensor_parallel == TensorParallel(forward_collectives=0, backward_collectives=1, message_bytes=2 * MIB)


def test_bf16_halves_sizes_only(tmp_path: Path) -> None:
    wide = read(tmp_path, GOOD).kinds[1]
    narrow = read(tmp_path, GOOD, Training(precision=Precision.BF16)).kinds[1]
    assert narrow.activation_bytes == wide.activation_bytes // 2
    assert narrow.boundary_bytes == wide.boundary_bytes // 2
    assert narrow.transient_bytes == wide.transient_bytes // 2
    assert narrow.forward_flops == wide.forward_flops
    assert narrow.parameters == wide.parameters


EXPERTS = """
[layers.experts]
count = 8
parameters = 1_600_000
forward_flops = 3e9
activation_bytes = "32MiB"
replicated_activation_bytes = "2MiB"
dispatch_bytes = "2MiB"
divides = [64]
imbalance = 1.5
"""


def test_experts_of_a_layer(tmp_path: Path) -> None:
    place = GOOD.index('\n[[layers]]\nname = "head"')
    text = GOOD[:place] + EXPERTS + GOOD[place:]
    embedding, block, _ = read(tmp_path, text).kinds
    assert embedding.experts is None
    assert block.experts == Experts(
        count=8,
        parameters=1_600_000,
        forward_flops=3 * 10**9,
        activation_bytes=32 * MIB,
        replicated_activation_bytes=2 * MIB,
        dispatch_bytes=2 * MIB,
        divides=(64,),
        imbalance=1.5,
    )
    half = read(tmp_path, text, Training(precision=Precision.BF16)).kinds[1].experts
    assert half is not None
    assert (half.activation_bytes, half.dispatch_bytes, half.parameters) == (16 * MIB, MIB, 1_600_000)
    unsplit = text.replace("tensor_parallel = { heads = 16, kv_heads = 4, sequence_length = 128 }\n", "")
    block = read(tmp_path, unsplit).kinds[1]
    assert (block.split_activation_bytes, block.replicated_activation_bytes) == (32 * MIB, 32 * MIB)
    for old, new, message in (
        ("count = 8", "count = 0", r"layers\[1\]\.experts\.count is 0"),
        ("imbalance = 1.5", "imbalance = 0.5", r"layers\[1\]\.experts\.imbalance is 0\.5"),
        (
            "parameters = 1_600_000",
            "parameters = 3e6",
            r"layer 'block': experts\.parameters is 3000000; expected from 0",
        ),
        ("dispatch_bytes", "dispatched_bytes", r"dispatched_bytes is not .*did you mean 'dispatch_bytes'"),
    ):
        with pytest.raises(InvalidInput, match=message):
            read(tmp_path, text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("parameters = 2_000_000\n", "parameters = -5\n", r"layers\[1\]\.parameters is -5; expected a whole number"),
        ("parameters = 2_000_000\n", "parameters = nan\n", r"layers\[1\]\.parameters is nan; expected a whole number"),
        ("parameters = 2_000_000\n", "parameters = 1.5\n", r"layers\[1\]\.parameters is 1\.5; expected a whole number"),
        ("parameters = 2_000_000\n", "parameters = true\n", r"layers\[1\]\.parameters is True; expected a whole"),
        ("parameters = 2_000_000\n", "", r"layers\[1\]\.parameters is missing"),
        (
            "parameters = 2_000_000\n",
            "paramters = 2\nparameters = 3\n",
            r"paramters is not .*did you mean 'parameters'",
        ),
        ("forward_flops = 4.5e9", "forward_flops = inf", r"layers\[1\]\.forward_flops is inf"),
        ('"64MiB"', '"64 parsecs"', r"layers\[1\]\.activation_bytes is '64 parsecs'; expected a size"),
        ('"64MiB"', "-1", r"layers\[1\]\.activation_bytes is -1; expected a size"),
        ('"64MiB"', "[]", r"layers\[1\]\.activation_bytes is a list of 0; expected a size"),
        ('"64MiB"', '"1e40"', r"layers\[1\]\.activation_bytes is '1e40'; expected a size of at most"),
        ("count = 3", "count = 0", r"layers\[1\]\.count is 0; expected greater than or equal to 1"),
        ("count = 3", "count = 1_000_000", r"layers\[1\]\.count is 1000000; expected less than or equal to 2048"),
        ("count = 3", "count = 2.5", r"layers\[1\]\.count is 2\.5; expected a valid integer"),
        ("heads = 16", "heads = 0", r"layers\[1\]\.tensor_parallel\.heads is 0"),
        ("sequence_length = 128", "sequence_length = 0", r"layers\[1\]\.tensor_parallel\.sequence_length is 0"),
        ("heads = 16", "head = 16", r"tensor_parallel\.head is not a known key; did you mean 'heads'"),
        ("replicated_parameters = 4_000", "replicated_parameters = 9e9", r"layers\[1\].*replicated_parameters \(9000"),
        ('activation_bytes = "64MiB"', "", r"layers\[1\] .*either activation_bytes, or split_activation_bytes"),
        ('split_activation_bytes = "6MiB"', "activation_bytes = 1", r"layers\[2\] .*in it, not both"),
        ('name = "mine"', "", "name is missing"),
        ('name = "mine"', 'name = ""', "name is ''"),
        ('name = "mine"', "name = 7", "name is 7; expected a valid string"),
        ('name = "block"', 'name = "head"', "two different layers are both named 'head'"),
        ('name = "mine"', "name = ", "is not TOML"),
    ],
)
def test_errors_name_field_value_and_remedy(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, GOOD.replace(old, new, 1))


def test_every_error_is_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("count = 3", "count = 0").replace("heads = 16", "heads = -1")
    with pytest.raises(InvalidInput) as caught:
        read(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 2


def test_empty_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="layers is missing"):
        read(tmp_path, 'name = "mine"')
    with pytest.raises(InvalidInput, match="at least 1 item"):
        read(tmp_path, 'name = "mine"\nlayers = []')
    with pytest.raises(InvalidInput, match="no such file"):
        load_model(tmp_path / "absent.toml", Training())
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="is not UTF-8 text; expected a model in TOML"):
        load_model(tmp_path / "bytes.toml", Training())
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_model(tmp_path / "folder.toml", Training())


def test_figures_are_for_one_length(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="sequence length 64 was given"):
        read(tmp_path, GOOD, Training(sequence_length=64))
