"""What a user installs: the wheel and the source distribution, built from the checkout's files.

Several rooms are links in the package (pilotfish/wire → ../wire); what is built must not show it.
Building fetches setuptools, as `pip install .` does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pilotfish.deploy import wheelhouse

ROOT = Path(__file__).parents[2]


class Built(NamedTuple):
    checkout: Path
    wheel: Path
    wheel_of_sdist: Path


def run(*command: object, **options: Any) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def uv(*arguments: object) -> None:
    run(sys.executable, "-m", "uv", *arguments)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def modules(wheel: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(wheel).items() if "dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """From a copy without what earlier builds left behind, and with links as links."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    listed = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").splitlines()
    for name in listed:
        if os.path.lexists(ROOT / name):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
    uv("build", "--wheel", "--out-dir", folder / "wheel", checkout)
    uv("build", "--sdist", "--out-dir", folder / "sdist", checkout)
    [sdist] = (folder / "sdist").glob("*.tar.gz")
    uv("build", "--wheel", "--out-dir", folder / "wheel_of_sdist", sdist)
    [wheel] = (folder / "wheel").glob("*.whl")
    [wheel_of_sdist] = (folder / "wheel_of_sdist").glob("*.whl")
    return Built(checkout, wheel, wheel_of_sdist)


def test_wheel_puts_one_name_into_site_packages(built: Built) -> None:
    version = built.wheel.name.split("-")[1]
    top = {name.split("/")[0] for name in contents(built.wheel)}
    assert top == {"pilotfish", f"pilotfish-{version}.dist-info"}


def test_wheel_has_every_module(built: Built) -> None:
    package = built.checkout / "pilotfish"
    there = {
        (Path(folder) / name).relative_to(built.checkout).as_posix()
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
    }
    assert len(there) > 300
    assert set(modules(built.wheel)) == there


def test_source_distribution_makes_the_same_wheel(built: Built) -> None:
    assert contents(built.wheel_of_sdist) == contents(built.wheel)


def test_bundle_packs_the_same_files(built: Built, tmp_path: Path) -> None:
    """`deploy.wheelhouse` writes its wheel without a build tool."""
    assert modules(wheelhouse.pack(tmp_path).path) == modules(built.wheel)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installed_wheel_runs_the_demo(built: Built, tmp_path: Path) -> None:
    """With the extras `cpu` and `export` and nothing else, far from the checkout."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    wanted = f"pilotfish[cpu,export] @ {built.wheel.as_uri()}"
    uv("pip", "install", "--python", python, "-c", ROOT / "constraints.txt", wanted)
    (tmp_path / "elsewhere").mkdir()
    figures = run(
        tmp_path / "venv/bin/pilotfish",
        *("demo", "--max-tokens", "16", "--json", "-"),
        cwd=tmp_path / "elsewhere",
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert json.loads(figures)["matches_target"] is True
    completed = run(python, "-c", "import pilotfish; print(pilotfish.__file__)", cwd=tmp_path)
    assert Path(completed.strip()).is_relative_to(tmp_path / "venv")
