"""Profiles of measured engines: the shipped ones, files, and what is wrong with a file in one
line.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.cli.main import main
from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import MAX_BYTES, load, shipped
from pdproxy_lab.sim.facts import SimFacts
from tests.sim import test_sim_command

ORIGIN = {"accelerator": "a", "model": "m", "engine": "e", "measured": "now"}


def written(path: Path, **changes: Any) -> str:
    usual = {"name": "mine", "origin": ORIGIN, "hardware": {"decode_step_s": 0.01}}
    path.write_text(json.dumps(usual | changes))
    return str(path)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_profile_is_an_engine_and_says_what_it_was_measured_on(name):
    profile = load(name)
    assert profile.name == name
    assert SimFacts(**profile.options()).hardware == profile.hardware
    assert all(getattr(profile.origin, field) for field in ORIGIN)
    assert profile.hardware.speed == 1


def test_the_h200_has_the_numbers_that_were_measured():
    hardware = load("h200-8b").hardware
    assert hardware.step_s(0, 1) == pytest.approx(0.00438 + 7e-6)
    assert hardware.step_s(4000, 0, 0, 8e6) == pytest.approx(
        0.0021 + 0.084 + 0.97e-9 * 8e6, rel=1e-4
    )
    expected = 0.00438 + 70e-6 + 34.5e-9 * 41_000 + 0.0384
    assert hardware.step_s(0, 10, 41_000, 0, 2, 0, 8000) == pytest.approx(expected)
    assert hardware.transfer_s(4000) == pytest.approx(0.0035 + 2.98e-6 * 4000, rel=1e-4)
    assert 0.09 < hardware.step_s(4000, 0, 0, 8e6) < 0.1  # 4,000 tokens in 90 to 100 ms


def test_a_profile_without_a_time_per_pulled_token_has_none(tmp_path):
    """As those have that were written before there was one."""
    hardware = {"pull_s": 0.0098, "further_pull_s": 0.0163}
    expected = Hardware(pull_s=0.0098, further_pull_s=0.0163, pull_token_s=0.0)
    assert load(written(tmp_path / "old.json", hardware=hardware)).hardware == expected
    known = load(
        written(tmp_path / "new.json", hardware=hardware | {"pull_token_s": 3e-6})
    ).hardware
    assert known.pull_token_s == 3e-6


def test_a_file_is_a_profile_too(tmp_path):
    profile = load(written(tmp_path / "mine.json", engine={"num_gpu_blocks": 600}))
    assert (profile.name, profile.hardware, profile.engine.num_gpu_blocks) == (
        "mine",
        Hardware(decode_step_s=0.01),
        600,
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": ""}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "x" * 200}, "name"),
        ({"hardware": {"decode_step_s": -1}}, "decode_step_s"),
        ({"hardware": {"link_bytes_per_s": 0}}, "link_bytes_per_s"),
        ({"hardware": {"decode_steps": 1}}, "decode_steps"),
        ({"hardware": {"pull_token_s": -1e-6}}, "pull_token_s must not be negative"),
        ({"hardware": {"decode_step_s": "fast"}}, "hardware.decode_step_s"),
        ({"hardware": 5}, "hardware"),
        ({"hardware": {"decode_step_s": 1e300}}, "decode_step_s must be at most"),
        ({"hardware": {"kv_bytes_per_token": 10**400}}, "kv_bytes_per_token must be at most"),
        ({"hardware": {"prefill_tokens_per_s": 1e-300}}, "prefill_tokens_per_s must be at least"),
        ({"hardware": {"speed": 1e-300}}, "speed must be at least"),
        ({"hardware": {"a\nb\x1b[2J" + "x" * 100_000: 1}}, "a?b?[2J"),
        ({"origin": {}}, "accelerator"),
        ({"engine": {"num_gpu_blocks": 10}}, "num_gpu_blocks"),
        ({"engine": {"num_gpu_blocks": 10**12}}, "num_gpu_blocks"),
        ({"engine": {"max_num_batched_tokens": 0}}, "max_num_batched_tokens"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path, changes, word, capsys):
    name = written(tmp_path / "wrong.json", **changes)
    with pytest.raises(ValueError, match="wrong") as caught:
        load(name)
    assert word in str(caught.value)
    assert main(["sim", "--profile", name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said[:-1].isprintable()
    assert len(said) < 1000
    assert "--profile" in said
    assert word in said


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b" " * (MAX_BYTES + 1)]
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "no.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused_by_a_value_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "any.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="any"):
        load(str(path))


@pytest.mark.parametrize("name", ["nothing-like-this", "", "a\0b", "../h200-8b"])
def test_a_name_that_is_neither_shipped_nor_a_file_is_refused(name):
    with pytest.raises(ValueError, match=r"h200-8b|can't be read"):
        load(name)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a directory"):
        load(str(tmp_path))


def facts(*options: str) -> SimFacts:
    from pdproxy_lab.cli import sim

    arguments: Any = test_sim_command.arguments(*options)
    return sim.facts_from(arguments)


def test_options_beside_a_profile_win():
    profile = load("h200-8b")
    assert facts("--profile=h200-8b") == SimFacts(**profile.options())
    found = facts(
        "--profile=h200-8b", "--max-num-batched-tokens=512", "--speed=10", "--no-transfers-in-line"
    )
    assert (found.max_num_batched_tokens, found.num_gpu_blocks) == (
        512,
        profile.engine.num_gpu_blocks,
    )
    assert (found.hardware.speed, found.hardware.transfers_in_line) == (10, False)
    assert found.hardware.pull_token_s == profile.hardware.pull_token_s
