"""A checkout without symbolic links, as git makes it on some file systems, works like any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ("device_runtime", "edge_runtime", "export", "systemd", "wire")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clone what is committed, with links as text files."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    folder = tmp_path_factory.mktemp("clone") / "pilotfish"
    clone = ("git", "clone", "-q", "-c", "core.symlinks=false", str(ROOT), str(folder))
    subprocess.run(clone, check=True, timeout=60)
    return folder


def run(checkout: Path, *words: str) -> str:
    """Run Python in the checkout, whose package comes before an installed one."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", *words]
    completed = subprocess.run(
        command,
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-2000:]
    return completed.stdout


def test_the_rooms_at_the_root_are_links_into_the_package(checkout: Path) -> None:
    for name in LINKS:
        assert (checkout / name).read_text() == f"pilotfish/{name}"
        assert (checkout / "pilotfish" / name).is_dir()


def test_its_own_package_is_imported(checkout: Path) -> None:
    (checkout / "where.py").write_text("import pilotfish.wire as room; print(room.__file__)\n")
    assert run(checkout, "where").strip() == str(checkout / "pilotfish/wire/__init__.py")


def test_the_tests_of_two_rooms_pass(checkout: Path) -> None:
    rooms = ("tests/base", "tests/wire/test_messages.py")
    run(checkout, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not timing", *rooms)


@pytest.mark.slow
def test_the_demo_runs(checkout: Path) -> None:
    figures = run(checkout, "pilotfish", "demo", "--max-tokens", "8", "--json", "-")
    assert '"matches_target": true' in figures
