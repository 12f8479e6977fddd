"""Cluster files: the presets, what is written reads back, and whatever is wrong is named and refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_text import VALID, refusal, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import cluster_names, cluster_schema, dump_cluster, load_cluster
from galvatron.core.spec import Cluster, Device, Kind, Level, Strategy

DOCS = Path(__file__).parents[3] / "docs"
PRESETS = Path(__file__).parents[3] / "src" / "galvatron" / "core" / "files" / "presets" / "clusters"

# Presets


@pytest.mark.parametrize(
    ("name", "devices", "islands"),
    [
        ("titan-rtx-8", 8, (2, 2, 2)),
        ("titan-rtx-16", 16, (2, 2, 2, 2)),
        ("a100-8", 8, (8,)),
        ("a100-64", 64, (8, 8)),
        ("h100-8", 8, (8,)),
        ("h100-64", 64, (8, 8)),
        ("h100-1024", 1024, (8, 128)),
        ("h200-8", 8, (8,)),
        ("rtx4090-8", 8, (4, 2)),
        ("l4-8", 8, (4, 2)),
        ("rtx4090", 8, (4, 2)),
        ("rtx4090:4", 4, (4,)),
        ("rtx4090-2", 2, (2,)),
        ("l40s:1", 1, ()),
        ("a100:2x8", 16, (8, 2)),
        ("a100-80gb:3x4", 12, (4, 3)),
        ("h100-pcie-4", 4, (2, 2)),
        ("rtx5090:6", 6, (6,)),
        ("b200:4x8", 32, (8, 4)),
    ],
)
def test_preset(name: str, devices: int, islands: tuple[int, ...]) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.devices == devices
    assert tuple(level.units for level in cluster.levels) == islands


@pytest.mark.parametrize(
    ("name", "devices", "same"),
    [
        ("rtx4090", 4, "rtx4090:4"),
        ("h100", 64, "h100-64"),
        ("a100:2x8", 8, "a100-8"),
        ("titan-rtx-8", 8, "titan-rtx-8"),
    ],
)
def test_so_many_devices_of_a_preset(name: str, devices: int, same: str) -> None:
    assert load_cluster(name, devices=devices).digest == load_cluster(same).digest


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("a100:2x9", None, "a node of a100 has 1 to 8 devices"),
        ("a100:0x8", None, "1 to 8 devices"),
        ("a100-12", None, "12 devices of a100 asked for; expected 1 to 8"),
        ("rtx4090", 12, "12 devices of rtx4090 asked for"),
        ("rtx4090", 0, "0 devices of rtx4090 asked for"),
        ("a100:2x8", 32, "32 given; cluster 'a100:2x8' has 16"),
        ("titan-rtx-8:4", None, "one machine of 8 devices"),
        ("rtx4080:8", None, "unknown cluster"),
        ("h100:9999999x8", None, "expected at most"),
    ],
)
def test_a_size_that_no_node_has_is_refused(name: str, devices: int | None, said: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(said)):
        load_cluster(name, devices=devices)


def test_another_network_between_nodes() -> None:
    across = Strategy.parse("dp2-tp8").factors(Kind.DP)
    shared = load_cluster("h100:2x8", node_link="200Gb")
    assert shared.link(across).bytes_per_s == pytest.approx(0.9 * 25e9 / 8)
    rails = load_cluster("a100:2x8", node_link="8x400Gb")
    assert rails.link(across).bytes_per_s == pytest.approx(0.9 * 50e9)
    assert "8x400Gb" in rails.source
    for name, network, said in (
        ("a100", "200Gb", "is one node"),
        ("titan-rtx-8", "200Gb", "is one node"),
        ("a100:2x8", "fast", "expected a bandwidth such as 200Gb"),
        ("a100:2x8", "200Gx", "is not a bandwidth"),
        ("a100:2x8", "0Gb", "from 1MB/s"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(said)):
            load_cluster(name, node_link=network)


def test_gpus_leave_their_allocator_a_margin_and_the_paper_s_setting_none() -> None:
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.fragmentation == (0 if name.startswith(("titan", "cpu")) else 0.06), name
    roomy = galvatron.plan("bert-large", "a100-8", batch=64)
    assert roomy.memory_bytes <= roomy.memory_budget_bytes - roomy.cluster.facts.allocator_bytes(
        roomy.memory_budget_bytes
    )
    assert galvatron.plan("bert-large", "a100-8", batch=8, paper=True).cluster.facts.fragmentation == 0


def test_every_preset_is_known_and_says_where_its_figures_come_from() -> None:
    assert cluster_names() == tuple(sorted(file.stem for file in PRESETS.glob("*.toml")))
    for name in cluster_names():
        assert load_cluster(name).source
        for line in (PRESETS / f"{name}.toml").read_text(encoding="utf-8").splitlines():
            if re.match(
                r"(reserved|fragmentation|overlap|memory|fp32|tf32|float8|bf16|layer_o|bandwidth|transfer)", line
            ):
                assert "  # " in line, f"{name}: {line} has no source"


def test_the_paper_s_cards_have_no_bf16_and_the_others_do() -> None:
    for name in cluster_names():
        assert (load_cluster(name).device.bf16_flops_per_s is None) == name.startswith(("titan", "cpu"))


def test_presets_are_in_the_order_their_hardware_suggests() -> None:
    a100, h100, h200, l4 = (load_cluster(name) for name in ("a100-8", "h100-8", "h200-8", "l4-8"))
    for slower, faster in ((l4, a100), (a100, h100), (h100, h200)):
        assert slower.device.bf16_flops_per_s is not None
        assert faster.device.bf16_flops_per_s is not None
        assert slower.device.bf16_flops_per_s < faster.device.bf16_flops_per_s
        assert slower.device.memory_bytes < faster.device.memory_bytes
        assert slower.device.memory_bytes_per_s < faster.device.memory_bytes_per_s


def test_a_node_of_rails_gives_a_lane_to_each_device_and_a_shared_port_does_not() -> None:
    across = Strategy.parse("dp8-tp8").factors(Kind.DP)
    assert load_cluster("h100-64").link(across).bytes_per_s == 45e9
    assert load_cluster("a100-64").link(across).bytes_per_s == 11e9 / 8


@pytest.mark.parametrize(
    ("name", "hint"),
    [("titan-rtx-9", "titan-rtx-8"), ("h100_64", "h100"), ("nothing", "a100"), ("", "a100"), ("a\nb", "a100")],
)
def test_an_unknown_name_gets_suggestions(name: str, hint: str) -> None:
    with pytest.raises(InvalidInput, match=hint) as caught:
        load_cluster(name)
    assert "unknown cluster" in str(caught.value)
    assert ".toml" in str(caught.value)


def test_loading_a_preset_needs_neither_pydantic_nor_numpy() -> None:
    program = (
        "import sys; from galvatron.core.files.clusters import load_cluster; load_cluster('h100-64'); "
        "print(*sorted({'pydantic', 'numpy', 'torch'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


# Reading


def test_a_file_s_units_are_read(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, VALID))
    assert cluster == Cluster(
        name="pair of nodes",
        device=Device(
            name="card",
            memory_bytes=24 * 2**30,
            memory_bytes_per_s=550e9,
            fp32_flops_per_s=9e12,
            bf16_flops_per_s=60e12,
            layer_overhead_s=0.2e-3,
        ),
        levels=(
            Level(name="node", units=8, bytes_per_s=200e9, latency_s=4 * 1e-6, shared=False),
            Level(
                name="cluster",
                units=2,
                bytes_per_s=12.5e9,
                latency_s=9 * 1e-6,
                transfer_bytes_per_s=9e9,
                shared=True,
            ),
        ),
        reserved_bytes=2**30,
        overlap_slowdown=1.3,
    )


def test_what_may_be_left_out(tmp_path: Path) -> None:
    short = re.sub(r"(?m)^(overlap_slowdown|bf16|layer_overhead|transfer_bandwidth) = .*\n", "", VALID)
    cluster = load_cluster(write(tmp_path, short))
    assert cluster.overlap_slowdown == 1.0
    assert cluster.device.bf16_flops_per_s is None
    assert cluster.device.layer_overhead_s == 0.0
    assert cluster.levels[1].transfer_bytes_per_s is None


def test_a_single_device_says_that_it_has_no_levels(tmp_path: Path) -> None:
    single = VALID[: VALID.index("[[levels]]")]
    assert "levels is missing" in refusal(tmp_path, single)
    assert load_cluster(write(tmp_path, "levels = []\n" + single)).devices == 1


def test_plain_numbers_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    plain = VALID.replace('"24GiB"', "24_000_000_000").replace('"4us"', "4e-6").replace('"200GB/s"', "2e11")
    cluster = load_cluster(write(tmp_path, b"\xef\xbb\xbf" + plain.encode()))
    assert cluster.device.memory_bytes == 24_000_000_000
    assert cluster.levels[0].latency_s == 4e-6


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"100Gb/s"', '"0GB/s"', "levels[1].bandwidth is '0GB/s'; expected a bandwidth from 1MB/s to 1PB/s, such as"),
        ('"100Gb/s"', "-1.0", "levels[1].bandwidth is -1.0"),
        ('"100Gb/s"', "nan", "levels[1].bandwidth is nan"),
        ('"100Gb/s"', "inf", "levels[1].bandwidth is inf"),
        ('"100Gb/s"', '"1e308PB/s"', "levels[1].bandwidth is '1e308PB/s'"),
        ('"100Gb/s"', "25", "levels[1].bandwidth is 25; expected a bandwidth from 1MB/s to 1PB/s, such as"),
        ('"100Gb/s"', '"100us"', "levels[1].bandwidth is '100us'"),
        ('"100Gb/s"', "true", "levels[1].bandwidth is True"),
        ('"100Gb/s"', "[1]", "levels[1].bandwidth is a list of 1"),
        ('"9GB/s"', "{ a = 1 }", "levels[1].transfer_bandwidth is a table"),
        ('"9us"', '"-9us"', "levels[1].latency is '-9us'; expected a time from 0s to 1s"),
        ('"9us"', "9", "levels[1].latency is 9"),
        ("units = 2", "units = 1", "levels[1].units is 1; expected greater than or equal to 2"),
        ("units = 2", "units = 2.0", "levels[1].units is 2.0"),
        ("units = 2", "units = 0xffffffffffffffffffffffff", "levels[1].units is an integer of more than 64 bits"),
        ("shared = true", 'shared = "yes"', "levels[1].shared is 'yes'; expected a valid boolean"),
        ("shared = true", "shared = 1", "levels[1].shared is 1"),
        ('"24GiB"', "0", "device.memory is 0; expected a size from 1MiB"),
        ('"24GiB"', '"1e308GB"', "device.memory is '1e308GB'"),
        ('"9TFLOP/s"', '"9TB"', "device.fp32 is '9TB'; expected a compute rate"),
        ("slowdown = 1.3", "slowdown = 0.9", "overlap_slowdown is 0.9; expected greater than or equal to 1"),
        ("slowdown = 1.3", "slowdown = 4.1", "overlap_slowdown is 4.1"),
        ("slowdown = 1.3", "slowdown = nan", "overlap_slowdown is nan"),
        ('"1GiB"', '"24GiB"', "reserved is 24.0 GiB, but device.memory is 24.0 GiB"),
        ('"card"', '""', "device.name is ''"),
        ('"card"', '"\\u001b[2J"', "device.name is '\\x1b[2J'"),
        (
            'name = "node"',
            'name = "node"\nlatancy = 1',
            "levels[0].latancy is not a known key; did you mean 'latency'?",
        ),
        ("reserved", "reserve", "reserve is not a known key; did you mean 'reserved'?"),
        ("reserved", "reserve", "reserved is missing; expected memory a process needs"),
        ("[device]", "[devices]", "device is missing; expected a [device] table"),
        ('memory = "24GiB"\n', "", "device.memory is missing; expected memory of one device"),
        ("shared = true\n", "", "levels[1].shared is missing"),
        ("units = 8", "units = 1000000", "levels join 2000000 devices; expected at most 1048576"),
    ],
)
def test_an_error_names_field_value_and_remedy(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in VALID
    assert expected in refusal(tmp_path, VALID.replace(old, new))


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, VALID.replace('"9us"', '"soon"').replace("units = 8", "units = 1").replace("fp32", "fp31")
    )
    for field in ("device.fp31", "device.fp32", "levels[0].units", "levels[1].latency"):
        assert field in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "name is missing"),
        ("name = ", "is not TOML: Invalid value"),
        (VALID.replace("units = 8", "units = = 8"), "line 15"),
        (VALID.replace("units = 8", "units = 8\nunits = 8"), "Cannot overwrite"),
        (b"\x80\x04\x95PK\x03", "byte 0 is not UTF-8 text"),
        (b"name = 'a'\n\x00\x01\x02", "is not TOML"),
        ("a = " + "[" * 100_000, "nested too deep"),
        ("a = " + "9" * 10_000, "is not TOML"),
        ("device = 3\nlevels = 'x'", "device is 3; expected a table with the keys"),
        ("levels = [1, [], {}]", "levels[0] is 1; expected a table"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, content: str | bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path / ("long" * 1000 + ".toml"), Path("nul\0.toml")):
        with pytest.raises(InvalidInput, match=r"no such file|cannot be read"):
            load_cluster(path)
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_cluster(str(folder))


def test_presets_are_right_though_they_are_read_unchecked() -> None:
    for name in cluster_names():
        checked = load_cluster(PRESETS / f"{name}.toml")
        whole = load_cluster(name if name.startswith(("titan", "cpu")) else f"{name}:2x8")
        assert checked == replace(whole, name=name)


def test_a_file_full_of_problems_gets_a_message_of_some_lines(tmp_path: Path) -> None:
    groups = "".join(f"[[groups]]\nranks = [0, {rank}]\n" for rank in range(500))
    with pytest.raises(InvalidInput) as caught:
        load_cluster(write(tmp_path, VALID + groups))
    assert len(str(caught.value).splitlines()) == 51
    assert "2951 more problems" in str(caught.value)


# Writing


@pytest.mark.parametrize("name", cluster_names())
def test_presets_read_back_equal(tmp_path: Path, name: str) -> None:
    cluster = load_cluster(name)
    assert load_cluster(write(tmp_path, dump_cluster(cluster))) == cluster


texts = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=100)
rates = st.floats(1e6, 1e15)
times = st.floats(0, 1)
clusters = st.builds(
    Cluster,
    name=texts,
    device=st.builds(
        Device,
        name=texts,
        memory_bytes=st.integers(2**30, 2**43),
        memory_bytes_per_s=rates,
        fp32_flops_per_s=rates,
        bf16_flops_per_s=st.none() | rates,
        tf32_flops_per_s=st.none() | rates,
        float8_flops_per_s=st.none() | rates,
        layer_overhead_s=times,
    ),
    levels=st.lists(
        st.builds(
            Level,
            name=texts,
            units=st.integers(2, 16),
            bytes_per_s=rates,
            latency_s=times,
            transfer_bytes_per_s=st.none() | rates,
            shared=st.booleans(),
        ),
        max_size=4,
    ).map(tuple),
    reserved_bytes=st.integers(0, 2**30 - 1),
    overlap_slowdown=st.floats(1, 4),
    fragmentation=st.floats(0, 0.5),
    source=st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from(' \n"\\'), max_size=200),
)


@given(clusters)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_is_written_reads_back_equal(tmp_path: Path, cluster: Cluster) -> None:
    assert load_cluster(write(tmp_path, dump_cluster(cluster))) == cluster


def test_figures_are_written_as_people_write_them(tmp_path: Path) -> None:
    written = dump_cluster(load_cluster(write(tmp_path, VALID)))
    valid = VALID.replace("100Gb/s", "12.5GB/s").replace("[device]\n", "[device]\ncompiles = true\n")
    assert tomllib.loads(written) == tomllib.loads(valid) | {
        "source": "",
        "compute_contention": 1.0,
        "message_contention": 2.0,
        "fragmentation": 0.0,
    }


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, float("nan"), float("inf"), 1e17])
def test_what_no_file_may_say_is_not_written(bytes_per_s: float) -> None:
    """Python may say up to 1e18, files up to 1PB/s; more nobody may say."""
    cluster = load_cluster("a100-8")
    with pytest.raises(InvalidInput, match=r"level 'node': bytes_per_s is|cluster 'a100-8': levels\[0\]\.bandwidth"):
        dump_cluster(replace(cluster, levels=(replace(cluster.levels[0], bytes_per_s=bytes_per_s),)))


# The schema


def test_the_schema_in_the_docs_is_the_code_s() -> None:
    assert json.loads((DOCS / "cluster.schema.json").read_text(encoding="utf-8")) == cluster_schema()


def test_the_schema_knows_what_presets_say() -> None:
    whole = cluster_schema()

    def check(value: Any, schema: dict[str, Any]) -> None:
        if "$ref" in schema:
            schema = whole["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        if isinstance(value, dict):
            assert schema["additionalProperties"] is False
            assert set(schema["required"]) <= set(value) <= set(schema["properties"])
            for key, part in value.items():
                check(part, schema["properties"][key])
        elif isinstance(value, list):
            for part in value:
                check(part, schema["items"])
        elif isinstance(value, str) and "anyOf" in schema:
            assert re.search(schema["anyOf"][0]["pattern"], value)

    for file in PRESETS.glob("*.toml"):
        check(tomllib.loads(file.read_text(encoding="utf-8")), whole)


@pytest.mark.parametrize("text", ["8GB", "24 GiB", "-1GB", "8Gb", "8GB/s", "1e3", ".5k", "8gb", ""])
def test_the_schema_s_pattern_agrees_with_the_reader(tmp_path: Path, text: str) -> None:
    pattern = cluster_schema()["$defs"]["Device"]["properties"]["memory"]["anyOf"][0]["pattern"]
    try:
        load_cluster(write(tmp_path, VALID.replace('"24GiB"', json.dumps(text)).replace('"1GiB"', "0")))
        readable = True
    except InvalidInput as error:
        readable = bool(re.match(r"[.0-9e]+k?$", text)) and "device.memory" in str(error)  # read, but too small
    assert (re.search(pattern, text) is not None) == readable


# The documentation


def test_the_documented_file_is_a_cluster_and_every_preset_is_listed(tmp_path: Path) -> None:
    page = (DOCS / "clusters.md").read_text(encoding="utf-8")
    example = page[page.index("```toml\n") + len("```toml\n") :]
    cluster = load_cluster(write(tmp_path, example[: example.index("```")]))
    assert cluster.devices == 16
    for name in cluster_names():
        assert f"`{name}`" in page


def test_the_documented_shares_are_those_of_the_code() -> None:
    base = load_cluster("a100-8")
    for shared, expected in ((True, (1.25e9, 2.5e9, 10e9)), (False, (10e9, 20e9, 80e9))):
        outer = replace(base.levels[0], units=2, bytes_per_s=10e9, shared=shared)
        nodes = replace(base, levels=(base.levels[0], outer))
        groups = [Strategy.parse(text).factors(Kind.DP) for text in ("dp2-tp8", "dp4-tp4", "dp16")]
        assert tuple(nodes.link(group).bytes_per_s for group in groups) == expected


def test_the_beginning_of_another_name_is_no_number() -> None:
    with pytest.raises(InvalidInput, match="a100-80gb, or a100 --devices 80"):
        load_cluster("a100-80")
