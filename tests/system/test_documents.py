"""What the documents name exists: files, classes, and their methods, in backticks."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("pilotfish", "tests", "benchmarks")
# A class, or a member of one: `Session`, `Session.speculate`, `Session.speculate()`.
CLASS = re.compile(r"`(?:[a-z_]+\.)*([A-Z][a-z]\w*)(?:\.([a-z_]\w*))?(?:\([^`]*\))?`")
FOREIGN = {"StreamingResponse", "Forwarded"}  # Starlette's, and a header
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]\w*\.py)`")


@cache
def classes() -> dict[str, str]:
    """Every class of the sources, with the text of the files that define it."""
    texts = defaultdict(str)
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
                texts[name] += text
    return texts


@cache
def words() -> frozenset[str]:
    """Every word of the sources: classes of other packages are imported there."""
    texts = (path.read_text("utf-8") for name in SOURCES for path in (ROOT / name).rglob("*.py"))
    return frozenset(re.findall(r"\w+", "\n".join(texts)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_classes_and_their_members_exist(document: Path) -> None:
    missing = []
    for name, member in CLASS.findall(document.read_text("utf-8")):
        if member:
            present = re.search(rf"\b{member}\b", classes().get(name, ""))
        else:
            present = name in classes() or name in words() | FOREIGN
        if not present:
            missing.append(f"{name}.{member}")
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_exist(document: Path) -> None:
    paths = PATH.findall(document.read_text("utf-8"))
    tops = (ROOT, ROOT / "pilotfish", *document.parents)
    assert not [path for path in paths if not any((top / path).exists() for top in tops)]


def test_the_makefile_makes_the_head_by_the_documented_commands() -> None:
    def commands(text: str) -> list[str]:
        lines = re.sub(r"\\\n", " ", text.replace("$(JUDGE)", "pilotfish judge")).splitlines()
        words = [" ".join(line.replace(";", " ").split()) for line in lines]
        return [line.removesuffix("\\").strip() for line in words if line.startswith("pilotfish")]

    document = (ROOT / "docs" / "wisv.md").read_text("utf-8")
    blocks = [text.partition("```")[0] for text in document.split("```sh\n")]
    block = next(text for text in blocks if "judge questions" in text)
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\nhead: ")[2].partition("\n\n")[0]
    recipe = recipe.replace("; \\\n", "\n").replace("set -ex", "")
    assert commands(block) == commands(recipe)
    assert len(commands(recipe)) == 7
