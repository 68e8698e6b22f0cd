"""Imports go one way: what each part of the package may import is written down here and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddp_nanguard"

LEAVES = {"site", "scan", "rng", "config", "errors", "batch", "why"}
"""torch, numpy and the standard library only; no torch.distributed, no files."""
TOP = {"cli", "demo", "drill", "drill_job", "integrations", "report"}
FORBIDDEN = {
    "probes": {"guard", "replay", "dump", "wrappers", "verdict", *TOP},
    "wrappers": {"guard", "replay", "dump", "probes", "verdict", *TOP},
    "verdict": {"guard", "replay", "dump", "wrappers", "probes", *TOP},
    "window": {"guard", "replay", "dump", "wrappers", "probes", "verdict", *TOP},
    "dump": {"guard", "replay", "probes", "wrappers", "verdict", *TOP},
    "board": {"guard", "replay", "dump", "probes", "wrappers", "verdict", *TOP},
    "guard": {"replay", *TOP},
    "policy": {"guard", "replay", *TOP},
    "cause": {"guard", "policy", "replay", *TOP},
    "rerun": {"guard", *TOP},  # it alone takes the replay, within a function and on a fault
    "replay": {"cli", "demo", "drill", "drill_job", "integrations"},
}


def _modules(part: str) -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of what a file imports, inside functions too, except for type checking only."""
    package = ".".join(("ddp_nanguard", *path.relative_to(PACKAGE).parts[:-1]))
    for node in _runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _runtime_nodes(child)


def _context(path: Path) -> set[str]:
    """Parts of this package that a file imports."""
    return {name.split(".")[1] for name in _imports(path) if name.startswith("ddp_nanguard.")}


@pytest.mark.parametrize("part", sorted(LEAVES))
def test_leaves_import_nothing_of_the_rest_and_no_communication(part: str) -> None:
    for path in _modules(part):
        assert _context(path) <= LEAVES, path
        names = set(_imports(path))
        assert not {name for name in names if name.startswith("torch.distributed")}, path
        assert "torch.distributed" not in path.read_text() or part == "scan", path


@pytest.mark.parametrize("part", sorted(FORBIDDEN))
def test_imports_go_one_way(part: str) -> None:
    modules = _modules(part)
    assert modules, f"no part called {part}"
    for path in modules:
        assert not _context(path) & FORBIDDEN[part], path


def test_only_the_dump_touches_files_and_only_config_reads_the_environment() -> None:
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        if part not in {"dump", "cli", "demo", "drill", "drill_job", "replay", "report"}:
            assert not calls & {"open", "os.open", "os.makedirs", "os.mkdir"}, path
        assert "pickle.loads" not in calls, path
        assert "torch.load" not in calls, path


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "helpers", "common", "manager"}]
