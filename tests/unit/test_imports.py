"""Imports go one way: the floors of the package, from the bottom up, are written down here and nowhere else."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_nanguard.hooks.frames import FrameRole, role_of

PACKAGE = Path(__file__).parents[2] / "ddp_nanguard"

FLOORS = (
    ("report", "lazy"),
    ("errors", "config", "tensors"),
    ("hooks",),
    ("probes", "wrappers"),
    ("capture", "distributed"),
    ("inject", "dump"),
    ("context",),
    ("blame", "validate"),
    ("build",),
    ("step",),
    ("replay", "page"),
    ("diagnosis",),
    ("second_look",),
    ("fault", "script"),
    ("guard",),
    ("testing", "cli", "loggers"),
    ("integrations",),
    ("__init__", "__main__"),
)
"""Rooms: folders, and modules of the root. One imports from the floors below it, and from nowhere else."""
WITHOUT_COMMUNICATION = {"report", "errors", "config", "hooks"}
MAY_TOUCH_FILES = {"dump", "cli", "replay", "script", "page"}
MAX_ROOT_MODULES = 12


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of all that a file imports: in functions and for type checking too."""
    package = ("ddp_nanguard", *path.relative_to(PACKAGE).parts[:-1])
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _own_imports(path: Path) -> set[str]:
    """Rooms of this package that a file imports."""
    return {name.split(".")[1] for name in _imports(path) if name.startswith("ddp_nanguard.")} - {_room(path)}


def test_every_module_is_on_a_floor_and_every_floor_has_its_rooms() -> None:
    listed = [room for floor in FLOORS for room in floor]
    assert len(listed) == len(set(listed))
    assert {_room(path) for path in _modules()} == set(listed)


def test_imports_go_down() -> None:
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    upwards = {
        f"{path.relative_to(PACKAGE)} -> {room}"
        for path in _modules()
        for room in _own_imports(path)
        if room not in floor_of or floor_of[room] >= floor_of[_room(path)]
    }
    assert not upwards


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {_dotted(path): path for path in _modules()}
    arrows = {
        name: {target for target in map(_file_of(files), _imports(path)) if target} for name, path in files.items()
    }
    left = dict(arrows)
    while True:  # take away what imports nothing that is left
        free = [name for name, targets in left.items() if not (targets - {name}) & left.keys()]
        if not free:
            break
        for name in free:
            del left[name]
    assert not left


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file_of(files: dict[str, Path]) -> Callable[[str], str | None]:
    def find(name: str) -> str | None:
        """The module itself, or that of which a name is imported."""
        return next((each for each in (name, name.rpartition(".")[0]) if each in files), None)

    return find


def test_the_root_stays_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_MODULES


@pytest.mark.parametrize("room", sorted(WITHOUT_COMMUNICATION))
def test_the_lowest_rooms_know_of_no_communication(room: str) -> None:
    for path in _modules():
        if _room(path) == room:
            assert not [name for name in _imports(path) if name.startswith("torch.distributed")], path


def test_only_the_dump_touches_files_and_nothing_is_unpickled() -> None:
    for path in _modules():
        calls = {ast.unparse(node.func) for node in _nodes(path) if isinstance(node, ast.Call)}
        if _room(path) not in MAY_TOUCH_FILES and path.name != "launcher.py":  # which leaves torchrun its file
            assert not calls & {"open", "os.open", "os.makedirs", "os.mkdir"}, path
        assert not calls & {"pickle.loads", "torch.load"}, path


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [path for path in _modules() if path.stem in {"utils", "helpers", "common", "manager"}]


def test_every_folder_says_what_its_frames_mean_in_a_stack() -> None:
    roles = {str(role) for role in FrameRole}
    for path in PACKAGE.rglob("__init__.py"):
        folder = importlib.import_module(_dotted(path))
        outer = path.parent.parent if path.parent != PACKAGE else None
        is_inner = outer is not None and outer != PACKAGE  # as the folder around it, unless it says otherwise
        assert is_inner or folder.__dict__.get("__frame_role__") in roles, path


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("ddp_nanguard.guard", FrameRole.PASSES_ON),
        ("ddp_nanguard.step.monitor", FrameRole.PASSES_ON),
        ("ddp_nanguard.cli.main", FrameRole.PASSES_ON),
        ("ddp_nanguard.hooks.loop", FrameRole.PROBE),
        ("ddp_nanguard.probes.slots", FrameRole.PROBE),
        ("ddp_nanguard.replay.run_step", FrameRole.STARTS_STEP),
        ("ddp_nanguard.diagnosis.trace.traced_step", FrameRole.STARTS_STEP),
        ("ddp_nanguard.inject.hooks", FrameRole.INJECTS),
        ("ddp_nanguard.inject.corrupt", FrameRole.INJECTS),
        ("ddp_nanguard.inject.injector", FrameRole.PROBE),
        ("torch.nn.functional", None),
        ("__main__", None),
    ],
)
def test_the_frames_of_a_module_mean_what_its_folder_says_unless_it_says_otherwise(
    module: str, role: FrameRole | None
) -> None:
    importlib.import_module(module)
    assert module in sys.modules
    assert role_of(module) is role
