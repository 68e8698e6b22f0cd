"""No case is dropped: each id has a test or a reason why it has none, and each case names its source."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.cases.harness import Case
from tests.cases.not_here import GROUPS, IDS, NOT_HERE, PARTLY_HERE, id_of

FILES = (
    *("a_lockstep", "b_precision", "c_sharding", "d_model", "e_data", "f_optimizer", "g_legitimate", "h_calls"),
    *("i_replay", "j_hooks", "k_answers"),
)


def _modules() -> list[ModuleType]:
    return [importlib.import_module(f"tests.cases.test_{name}") for name in FILES]


def _names(module: ModuleType) -> list[str]:
    """Names of tests and of parameter sets that pytest makes of a module."""
    tests = [(name, value) for name, value in vars(module).items() if name.startswith("test_") and callable(value)]
    marks = [mark for _, test in tests for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    sets = [str(case.id) for mark in marks for case in mark.args[1] if hasattr(case, "id")]
    return [name for name, _ in tests] + sets


def test_every_id_has_a_case_or_a_reason() -> None:
    found = {name for module in _modules() for text in _names(module) if (name := id_of(text)) is not None}
    assert found | set(NOT_HERE) == set(IDS)
    assert found & set(NOT_HERE) == set() and set(PARTLY_HERE) <= found
    assert len(IDS) == len(set(IDS)) == 110
    assert {name[0] for name in IDS} == set(GROUPS)


@pytest.mark.parametrize("file", FILES)
def test_every_case_names_its_source(file: str) -> None:
    (module,) = [each for each in _modules() if each.__name__.endswith(file)]
    sources: dict[str, Any] = {
        name: case.source for name, case in getattr(module, "CASES", {}).items() if isinstance(case, Case)
    }
    sources |= {name: vars(module)[name].__doc__ for name in _names(module) if name[5:6] in GROUPS}
    assert sources
    assert [name for name, text in sources.items() if "https://" not in (text or "")] == []
