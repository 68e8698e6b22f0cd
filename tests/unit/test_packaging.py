"""What a release holds: the package alone in the wheel, all that the README's commands need in the sdist."""

from __future__ import annotations

import email
import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", "77", reason="builds the wheel")  # as pyproject.toml asks for

REPOSITORY = Path(__file__).parents[2]
NOT_SHIPPED = shutil.ignore_patterns(
    ".git", "__pycache__", "*.egg-info", "build", "dist", ".venv", ".*_cache", ".hypothesis", "nan_dumps", "PKG-INFO",
    "setup.cfg", "site",
)  # fmt: skip
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
EXAMPLE = "share/ddp-nanguard/examples/digits.py"


def _build(tree: Path, kind: str) -> Path:
    """What ``python -m build --no-isolation`` makes of this tree."""
    out = tree.parent / f"{tree.name}-{kind}"
    out.mkdir()
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked."""
    directory = tmp_path_factory.mktemp("release")
    shutil.copytree(REPOSITORY, directory / "clean", ignore=NOT_SHIPPED)
    with tarfile.open(_build(directory / "clean", "sdist")) as packed:
        packed.extractall(directory / "unpacked", filter="data")
    (tree,) = (directory / "unpacked").iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Made of the sdist, as an installer makes it."""
    return _build(sdist, "wheel")


def _files(tree: Path) -> set[str]:
    found = (path.relative_to(tree) for path in tree.rglob("*") if path.is_file())
    made = ("build", "ddp_nanguard.egg-info", "PKG-INFO", "setup.cfg")
    return {str(path) for path in found if path.parts[0] not in made and "__pycache__" not in path.parts}


def test_the_sdist_is_the_whole_clone(sdist: Path) -> None:
    assert _files(sdist) == _files(sdist.parents[1] / "clean")
    assert {"tests/conftest.py", "constraints.txt", "docs/guide.md", "mkdocs.yml", "launch/train.sh"} <= _files(sdist)


def test_the_wheel_is_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    package = {f"ddp_nanguard/{name}" for name in _files(REPOSITORY / "ddp_nanguard")}
    assert names == package | {f"ddp_nanguard-0.1.0.data/data/{EXAMPLE}"}
    assert "ddp_nanguard/py.typed" in names


def test_the_metadata_says_what_a_person_and_an_installer_need(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        told = {name.partition(".dist-info/")[2]: packed.read(name).decode() for name in packed.namelist()}
    metadata = email.message_from_string(told["METADATA"])
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["License-Expression"] == "Apache-2.0"
    assert str(metadata.get_payload()).strip() == (REPOSITORY / "README.md").read_text().strip()
    assert told["licenses/LICENSE"] == (REPOSITORY / "LICENSE").read_text()
    assert "ddp-nanguard = ddp_nanguard.cli.main:run" in told["entry_points.txt"]
    needed = {line for line in metadata.get_all("Requires-Dist") or [] if "extra" not in line}
    assert needed == {"torch>=2.13", "numpy", "filelock", "safetensors"}


def _installed(wheel: Path, directory: Path) -> Path:
    """The programs of a new environment, with the wheel and, from this environment, what it depends on."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=60)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))  # its own .pth files are not read
    pip = [str(directory / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=60)
    return directory / "bin"


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_both_install_and_run_the_commands_of_the_readme(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    programs = _installed(wheel, tmp_path / "environment")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{programs}:{env['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(directory: Path, *command: str) -> str:
        ended = subprocess.run(
            command, cwd=directory, env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    where = "import ddp_nanguard; print(ddp_nanguard.__file__)"
    assert run(tmp_path, str(programs / "python"), "-c", where).startswith(str(tmp_path / "environment"))
    assert "bit for bit the same" in run(tmp_path, "ddp-nanguard", "demo", "--out", "demo")
    # the README's second command, `pytest`, on a part of what it runs
    shutil.rmtree(sdist / "ddp_nanguard")  # the tests find the installed package
    told = run(
        sdist, str(programs / "python"), "-m", "pytest", "-q", "tests/unit/test_site.py", "tests/ranks/test_readme.py"
    )
    assert " passed" in told and "failed" not in told
