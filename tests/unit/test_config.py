"""Options: defaults, the environment, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_nanguard.config import ENV_PREFIX, RESERVED_ENVIRONMENT, GuardConfig, environment_ignored
from ddp_nanguard.report.types import WATCHABLE

build = GuardConfig.from_code_and_environment


def test_defaults() -> None:
    config = build({}, {})
    assert config == GuardConfig()
    assert (config.on_fault, config.max_skips, config.history, config.dump_keep) == ("stop", 10, 16, 5)
    assert (config.exit_code, config.timeout_s, config.state_every) == (65, 60.0, 100)
    assert (config.max_consecutive_overflows, config.scale_floor) == (20, 2.0**-14)
    assert config.watch == tuple(str(phase) for phase in WATCHABLE)


def test_the_environment_wins_over_the_code() -> None:
    config = build({"on_fault": "warn", "max_skips": 3}, {"NANGUARD_ON_FAULT": "skip", "PATH": "/bin"})
    assert (config.on_fault, config.max_skips) == ("skip", 3)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("enabled", "0", False),
        ("enabled", "TRUE", True),
        ("max_skips", "7", 7),
        ("timeout_s", "2.5", 2.5),
        ("dump_dir", "none", None),
        ("dump_dir", "/scratch", "/scratch"),
        ("grad_norm_warn", "none", None),
        ("grad_norm_warn", "10", 10.0),
        ("ignore", "layers.*, head", ("layers.*", "head")),
        ("watch", "loss,backward", ("loss", "backward")),
        ("hold_batches", "host", "host"),
    ],
)
def test_every_kind_of_option_is_read_from_the_environment(option: str, text: str, value: object) -> None:
    assert getattr(build({}, {ENV_PREFIX + option.upper(): text}), option) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_nan": "stop"}, ["on_nan", "on_fault", "dump_dir"]),
        ({"on_fault": "explode"}, ["on_fault", "'explode'", "'stop'", "'skip'", "'warn'"]),
        ({"max_skips": 1.5}, ["max_skips", "1.5", "whole number"]),
        ({"max_skips": True}, ["max_skips", "True"]),
        ({"max_skips": -1}, ["max_skips", "-1", "at least 0"]),
        ({"history": 0}, ["history", "0", "at least 1"]),
        ({"exit_code": 0}, ["exit_code", "0", "1 to 255"]),
        ({"exit_code": 256}, ["exit_code", "256", "1 to 255"]),
        ({"timeout_s": 0}, ["timeout_s", "0", "above 0"]),
        ({"grad_norm_warn": 0.0}, ["grad_norm_warn", "0.0", "None"]),
        ({"watch": ("forward", "sideways")}, ["watch", "sideways", "forward", "reduce"]),
        ({"ignore": "layers.*"}, ["ignore", "layers.*", "list of strings"]),
        ({"dump_dir": 3}, ["dump_dir", "3", "None"]),
    ],
)
def test_a_wrong_option_names_itself_its_value_and_the_valid_ones(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="option") as caught:
        build(options, {})
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("NANGUARD_ON_FAULT", "explode", ["'stop'", "'skip'", "'warn'"]),
        ("NANGUARD_MAX_SKIPS", "many", ["whole number"]),
        ("NANGUARD_ENABLED", "maybe", ["True or False"]),
        ("NANGUARD_ON_NAN", "stop", ["NANGUARD_ON_FAULT", "NANGUARD_DUMP_DIR"]),
    ],
)
def test_a_wrong_environment_value_names_the_variable(name: str, text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="environment variable") as caught:
        build({}, {name: text})
    assert [word for word in (name, text, *words) if word not in str(caught.value)] == [], str(caught.value)


def test_reserved_variables_are_no_options() -> None:
    assert build({}, dict.fromkeys(RESERVED_ENVIRONMENT, "x")) == GuardConfig()


def test_a_replay_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANGUARD_ON_FAULT", "warn")
    with environment_ignored():
        assert GuardConfig.from_code_and_environment({}).on_fault == "stop"
    assert GuardConfig.from_code_and_environment({}).on_fault == "warn"


def test_lists_become_tuples_and_json_round_trips() -> None:
    config = build({"ignore": ["a", "b"]}, {})
    assert config.ignore == ("a", "b")
    assert build(json.loads(json.dumps(config.to_dict())), {}) == config


def test_every_option_is_documented() -> None:
    source = (Path(__file__).parents[2] / "ddp_nanguard" / "config.py").read_text().splitlines()
    for field in dataclasses.fields(GuardConfig):
        (line,) = [number for number, text in enumerate(source) if text.startswith(f"    {field.name}: ")]
        assert source[line + 1].startswith('    """'), field.name


@given(st.integers(min_value=0, max_value=10**9), st.floats(min_value=1e-6, max_value=1e6))
def test_numbers_survive_the_environment(max_skips: int, timeout_s: float) -> None:
    config = build({}, {"NANGUARD_MAX_SKIPS": str(max_skips), "NANGUARD_TIMEOUT_S": repr(timeout_s)})
    assert (config.max_skips, config.timeout_s) == (max_skips, timeout_s)


def test_every_option_is_on_the_options_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows == [field.name for field in dataclasses.fields(GuardConfig)]
