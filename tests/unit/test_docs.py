"""The pages under `docs/` speak of what is there: files, notes, keys of a dump."""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
from pathlib import Path

import pytest

from tests.golden import GOLDEN

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "ddp_nanguard"
PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
LONGEST_LINE = 120
PRINTED = ("NonFiniteError: ", "  evidence: ", "  line: ", "  cause: ", "  state: ", "reason: ")
"""Beginnings of lines that the package has printed, which stand as they are."""

PROGRAMS = ("distributed/FSDP2/", "distributed/ddp-tutorial-series/", "word_language_model/", "vae/")
"""Where programs lie that are not of this repository."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|yaml|sbatch|toml))`", page.read_text()))
    others = ("integrations", "train", "path", *PROGRAMS)
    missing = {name for name in named if not _exists(name) and not name.startswith(others)}
    assert not missing


def _exists(name: str) -> bool:
    roots = (REPOSITORY, PACKAGE, PACKAGE / "diagnosis", REPOSITORY / "tests", REPOSITORY / "tests" / "ranks")
    anywhere = "/" not in name and any(REPOSITORY.glob(f"*/**/{name}"))
    return anywhere or any((root / name).exists() for root in roots)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_can_be_read(page: Path) -> None:
    lines = page.read_text().splitlines()
    long = [line for line in lines if len(line) > LONGEST_LINE and not line.startswith(("|", "torchrun", *PRINTED))]
    assert not long


def test_the_index_of_notes_lists_each_note_with_its_file() -> None:
    indexed = set(
        re.findall(r"^\| ([^|]+) \| `(\S+\.py)` \|", (REPOSITORY / "docs/design.md").read_text(), re.MULTILINE)
    )
    written = {
        (title, str(path.relative_to(PACKAGE))) for path in PACKAGE.rglob("*.py") for title in _notes(path.read_text())
    }
    assert indexed == written


def _notes(text: str) -> set[str]:
    """Titles of the notes that a docstring holds: each begins a paragraph."""
    return set(re.findall(r"\n\n\[Note: ([^\]]+)\]", text))


def test_notes_that_are_cited_are_there() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    written = {title for text in texts.values() for title in _notes(text)}
    for path, text in texts.items():
        cited = {" ".join(title.split()) for title in re.findall(r"\[Note: ([^\]]+)\]", text)}
        assert cited <= written, path


def test_the_page_on_dumps_has_every_key() -> None:
    """Of what is declared; the names of options have a page of their own, those of batches are the user's."""
    page = (REPOSITORY / "docs/dump-format.md").read_text() + (REPOSITORY / "docs/options.md").read_text()
    (form,) = sorted(GOLDEN.parent.glob("form-*.txt"))[-1:]
    sections = re.split(r"^# ", form.read_text(), flags=re.MULTILINE)
    declared = [line for section in sections if "declared" in section[:60] for line in section.splitlines()[1:] if line]
    keys = {part.strip("?[]{}") for line in declared for part in re.split(r"[:,]", line)[0].split(".")} - {"", "*"}
    assert not {key for key in keys if not re.search(rf"\b{re.escape(key)}\b", page)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_in_docstrings_and_comments_are_there(path: Path) -> None:
    named = re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", path.read_text())
    assert not {name for name in named if not (_is_ours(name) or _is_of_a_library(name))}


def _is_ours(name: str) -> bool:
    """Whether the package has each part of the name, and a module where it speaks of one."""
    module, _, last = name.removeprefix("ddp_nanguard.").rpartition(".")
    is_module = any(f".{each}".endswith(f".{module}") for each in _modules())
    return last in _identifiers() and (is_module or all(part in _identifiers() for part in module.split(".") if part))


@functools.cache
def _modules() -> frozenset[str]:
    paths = [path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py")]
    return frozenset(".".join(parts) for parts in [*paths, *(parts[:-1] for parts in paths)])


@functools.cache
def _identifiers() -> frozenset[str]:
    names = {part for module in _modules() for part in module.split(".")}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {value for key, value in ast.iter_fields(node) if key in ("name", "id", "attr", "arg") and value}
    return frozenset(names)


def _is_of_a_library(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return "." in name


def test_every_test_that_the_page_on_articles_names_is_there() -> None:
    text = (REPOSITORY / "docs/articles.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("|") and "::" in line]
    assert len(named) == len(rows) >= 50
    assert not [(path, name) for path, name in named if f"def {name}(" not in (REPOSITORY / path).read_text()]
