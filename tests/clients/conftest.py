"""A service with tiny models, and programs that use the installed clients."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pair
from tests.support.calling import callers
from tests.support.serving import Serving, two_lanes

assert callers  # a fixture

CLIENTS = Path(f"{sys.prefix}-clients")
PROGRAMS = Path(__file__).parent / "programs"
# A client gets these of this process's variables. Others may hold a user's keys or proxies.
PASSED = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TZ")
# No client may look for a hub or report its use.
SEALED = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}",
    "PYTHONPATH": "",
}
LIMIT_S = 120.0


def _installed(suffix: str) -> bool:
    if suffix == ".mjs":
        return shutil.which("node") is not None and Path(CLIENTS, "node_modules", "ai").is_dir()
    return Path(CLIENTS, "bin", "lm_eval").is_file()


def skip_without(suffix: str) -> None:
    """Skip a test if the clients for programs with this suffix are not installed."""
    if not _installed(suffix):
        pytest.skip(f"clients for {suffix} are not installed in {CLIENTS}: make test-clients")


@pytest.fixture(scope="session")
def service(callers: Pair) -> Iterator[Serving]:
    with two_lanes(callers) as started:
        yield started


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """All variables of a client's process, with an empty home."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**passed, **SEALED, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Callable[..., str]:
    """A function that runs a command in an empty folder and returns its output."""
    if _installed(".mjs"):
        Path(tmp_path, "node_modules").symlink_to(CLIENTS / "node_modules")

    def run(*command: object, limit_s: float = LIMIT_S) -> str:
        ended = subprocess.run(
            [*map(str, command)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return ended.stdout

    return run


@pytest.fixture
def answers_of(
    run: Callable[..., str], service: Serving, tmp_path: Path
) -> Callable[[str], dict[str, Any]]:
    """A function that runs one of the programs, and returns the object that it prints."""

    def answers_of(name: str, url: str = "", key: str = "none") -> dict[str, Any]:
        skip_without(Path(name).suffix)
        program = tmp_path / name  # node looks for packages beside the program
        program.write_text((PROGRAMS / name).read_text())
        runtime = "node" if program.suffix == ".mjs" else CLIENTS / "bin" / "python"
        answers: dict[str, Any] = json.loads(run(runtime, program, url or f"{service.url}/v1", key))
        return answers

    return answers_of
