"""Measured layer times: the presets fit the models they are for, and wrong files are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import galvatron
import galvatron.core.files
from galvatron.core.errors import InvalidInput
from galvatron.core.files.profiles import dump_profile, load_profile, profile_names
from galvatron.core.spec import LayerMemory, LayerTime, ModelProfile, Training
from galvatron.families import load_model

PRESETS = Path(galvatron.core.files.__file__).parent / "presets" / "profiles"
VALID = """\
name = "mine"
source = "a stopwatch"

[[layers]]
layer = "encoder"
forward = "2.39ms"

[[layers]]
layer = "decoder"
forward = "4ms"
backward_ratio = 2.5
"""


def write(folder: Path, content: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("titan-rtx-bert-huge", "bert-huge-32"),
        ("titan-rtx-vit-huge", "vit-huge-32"),
        ("titan-rtx-t5-large", "t5-large-32"),
        ("titan-rtx-swin-huge", "swin-huge-32"),
    ],
)
def test_a_preset_times_layers_its_model_has(name: str, model: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source
    kinds = {kind.name: kind for kind in load_model(model, Training()).kinds}
    for time in profile.times:
        # Between a third and all of the card's peak of 16.3 TFLOP/s: neither a wrong unit nor a wrong layer would be.
        assert 16.3e12 / 3 < kinds[time.layer].forward_flops / time.forward_s < 16.3e12


def test_every_preset_is_tested_above() -> None:
    assert profile_names() == ("titan-rtx-bert-huge", "titan-rtx-swin-huge", "titan-rtx-t5-large", "titan-rtx-vit-huge")


def test_presets_are_right_though_they_are_read_unchecked() -> None:
    for name in profile_names():
        assert load_profile(PRESETS / f"{name}.toml") == load_profile(name)


def test_times_are_read(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, VALID))
    assert (profile.name, profile.source) == ("mine", "a stopwatch")
    decoder = profile.time_of("decoder")
    assert decoder is not None
    assert (decoder.forward_s, decoder.backward_ratio) == (4e-3, 2.5)
    encoder = profile.time_of("encoder")
    assert encoder is not None
    assert (encoder.forward_s, encoder.backward_ratio) == (2.39 * 1e-3, 2.0)
    assert profile.time_of("head") is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"4ms"', '"0ms"', "layers[1].forward is '0ms'; expected a time from 1ns"),
        ('"4ms"', "-1", "layers[1].forward is -1"),
        ('"4ms"', "nan", "layers[1].forward is nan"),
        ('"4ms"', '"4MB"', "layers[1].forward is '4MB'"),
        ("= 2.5", "= 0", "layers[1].backward_ratio is 0; expected greater than or equal to 0.01"),
        ("= 2.5", "= inf", "layers[1].backward_ratio is inf"),
        ("backward_ratio", "backward", "layers[1].backward is not a known key; did you mean 'backward_ratio'?"),
        ('"decoder"', '"encoder"', "layers[1].layer is 'encoder' again; expected each layer once"),
        ('layer = "decoder"\n', "", "layers[1].layer is missing"),
        ('name = "mine"', "name = 5", "name is 5"),
        ("[[layers]]", "[[layer]]", "layers is missing; expected [[layers]] tables"),
        (VALID, 'name = "a"\nlayers = []', "layers is a list of 0; expected at least 1 item"),
        (VALID, "= =", "is not TOML"),
    ],
)
def test_an_error_names_file_field_and_remedy(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in VALID
    path = write(tmp_path, VALID.replace(old, new))
    with pytest.raises(InvalidInput) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_an_unknown_name_gets_suggestions() -> None:
    with pytest.raises(InvalidInput, match="unknown profile 'titan-rtx-bert'; did you mean titan-rtx-bert-huge"):
        load_profile("titan-rtx-bert")


@pytest.mark.parametrize("name", profile_names())
def test_presets_read_back_equal(tmp_path: Path, name: str) -> None:
    profile = load_profile(name)
    assert load_profile(write(tmp_path, dump_profile(profile))) == profile


layer_times = st.builds(
    LayerTime,
    layer=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=100),
    forward_s=st.floats(1e-9, 1000),
    backward_ratio=st.floats(0.1, 100),
    forward_fixed_s=st.none() | st.floats(0, 1000),
    backward_fixed_s=st.none() | st.floats(0, 1000),
    forward_least_s=st.floats(0, 1000),
    backward_least_s=st.floats(0, 1000),
    tp=st.integers(1, 64),
    sequence_parallel=st.booleans(),
)
memories = st.builds(
    LayerMemory,
    layer=st.sampled_from(["encoder", "head"]),
    activation_bytes=st.integers(0, 2**40),
    transient_bytes=st.integers(0, 2**40),
    tp=st.integers(1, 64),
    sequence_parallel=st.booleans(),
)


def way(one: LayerTime | LayerMemory) -> tuple[str, int, bool]:
    return one.layer, one.tp, one.sequence_parallel


@given(
    st.lists(layer_times, min_size=1, max_size=5, unique_by=way),
    st.lists(memories, max_size=3, unique_by=way),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_whatever_is_written_reads_back_equal(
    tmp_path: Path, times: list[LayerTime], memory: list[LayerMemory]
) -> None:
    profile = ModelProfile(name="measured", times=tuple(times), memory=tuple(memory))
    assert load_profile(write(tmp_path, dump_profile(profile))) == profile


def test_what_no_file_may_say_is_not_written() -> None:
    profile = load_profile("titan-rtx-bert-huge")
    with pytest.raises(InvalidInput, match=r"profile 'titan-rtx-bert-huge': layers\[0\]\.forward"):
        dump_profile(replace(profile, times=(replace(profile.times[0], forward_s=0.0),)))


def _with(tmp_path: Path, **figures: int) -> Path:
    """A profile of the encoder that somebody wrote."""
    lines = [f"{name} = {value}" for name, value in figures.items()]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(['name = "mine"', "[[layers]]", 'layer = "encoder"', 'forward = "2ms"', *lines]))
    return file


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"parameters": 7_087_872}, ""),
        ({"parameters": 7_087_872, "flops": 8_100_000_000}, ""),
        ({"parameters": 7_087_873}, "measured with 'encoder' of 7,087,873 parameters; that of bert-base has 7,087,872"),
        ({"flops": 3_900_000_000}, "'encoder' of 3,900,000,000 operations a sample; that of bert-base has 8,05"),
    ],
)
def test_a_profile_of_another_layer_is_refused(tmp_path: Path, figures: dict[str, int], said: str) -> None:
    file = str(_with(tmp_path, **figures))
    if not said:
        assert galvatron.plan("bert-base", "titan-rtx-8", batch=8, profile=file).profile is not None
        return
    with pytest.raises(InvalidInput, match=re.escape(said)):
        galvatron.plan("bert-base", "titan-rtx-8", batch=8, profile=file)


def test_the_paper_s_profiles_are_of_its_models_alone() -> None:
    """ViT-Huge's encoder has as many parameters as BERT-Huge's, but fewer tokens."""
    for other in ("bert-base", "bert-huge-32"):
        with pytest.raises(InvalidInput, match="profile 'titan-rtx-vit-huge' was measured with 'encoder' of"):
            galvatron.plan(other, "titan-rtx-8", batch=8, profile="titan-rtx-vit-huge")
    assert galvatron.plan("vit-huge-48", "titan-rtx-8", batch=8, profile="titan-rtx-vit-huge").profile is not None


def test_a_profile_that_does_not_say_whose_it_is_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    galvatron.plan("bert-base", "titan-rtx-8", batch=8, profile=str(_with(tmp_path)))
    (record,) = caplog.records
    assert record.getMessage().startswith("profile 'mine' does not say which layers it has times of")
