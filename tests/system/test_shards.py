"""The suite's own processes: shares by recorded time, and none that dies takes others with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.__main__ import split_arguments
from tests.support import shards
from tests.support.shards import NO_TESTS, ROOT, Results, Shards, important, take_batch, units

FILES = {
    "test_passes.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_fails.py": "def test_it(): assert False\n",
    "test_skips.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
    "test_broken.py": "import no_such_module\n",
    "test_dies.py": (
        "import os\ndef test_before(): pass\ndef test_it(): os._exit(0)\ndef test_after(): pass\n"
    ),
    "test_waits.py": "import time\ndef test_it(): time.sleep(300)\n",
    # a thread that Python joins at its exit
    "test_never_exits.py": (
        "import threading, time\n"
        "def linger(): time.sleep(300)\n"
        "def test_before(): pass\n"
        "def test_it(): threading.Thread(target=linger).start()\n"
    ),
    "test_dies_when_imported.py": "import os\nos._exit(3)\n",
}


def run(folder: Path, *names: str, **options: bool) -> Results:
    """Run such files in two processes, without the conftest of this repository."""
    for name in names:
        (folder / name).write_text(FILES[name])
    (folder / "none.ini").write_text("[pytest]\n")
    words = ["-c", "none.ini", "--rootdir", ".", "--timeout", "60"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        return Shards(names, words, 2, root=folder, **options).run()


def test_every_test_has_its_outcome(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = ("test_waits.py", "test_never_exits.py")
    results = run(tmp_path, *(name for name in FILES if name not in slow))
    assert results.outcomes == {
        "test_passes.py::test_one": "passed",
        "test_passes.py::test_two": "passed",
        "test_fails.py::test_it": "failed",
        "test_skips.py": "skipped",
        "test_broken.py": "failed",
        "test_dies.py::test_before": "passed",
        "test_dies.py::test_it": "failed",
        "test_dies.py::test_after": "passed",
        "test_dies_when_imported.py": "failed",
    }
    assert results.status == 1
    output = capfd.readouterr().out
    assert "assert False" in output
    assert "No module named 'no_such_module'" in output
    assert output.count("a process ended with status 0, in") == 1


def test_a_process_that_does_not_exit_is_ended_and_its_last_test_has_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_EXIT_S", 0.5)
    results = run(tmp_path, "test_never_exits.py")
    assert results.outcomes == {
        "test_never_exits.py::test_before": "passed",
        "test_never_exits.py::test_it": "failed",
    }
    output = capfd.readouterr().out
    assert "after test_never_exits.py::test_it" in output
    assert "in linger" in output  # where it hangs


def test_without_tests_it_says_so(tmp_path: Path) -> None:
    assert run(tmp_path).status == NO_TESTS


def test_the_first_failure_may_end_the_run(tmp_path: Path) -> None:
    began = time.monotonic()
    results = run(tmp_path, "test_waits.py", "test_fails.py", stop_early=True)
    assert results.outcomes["test_fails.py::test_it"] == "failed"
    assert time.monotonic() - began < 60


def test_long_files_begin_first_and_batches_become_shorter() -> None:
    seconds = {f"tests/wire/test_{at}.py": float(at) for at in range(1, 41)}
    queue = units(list(seconds), seconds)
    batches = []
    while queue:
        batches.append(take_batch(queue, workers=4, least_s=20.0))
    assert sorted(name for batch in batches for name in batch) == sorted(seconds)
    shares = [sum(seconds[name] for name in batch) for batch in batches]
    assert "tests/wire/test_40.py" in batches[0]
    assert shares[0] <= sum(seconds.values()) / 6
    assert shares[-1] <= max(seconds.values())
    assert len(batches) < 25


def test_files_that_share_what_takes_long_stay_together() -> None:
    files = ["tests/deploy/booted/test_keys.py", "tests/wire/test_a.py", "tests/deploy/booted/b.py"]
    assert [files[0], files[2]] in [group for group, _ in units(files, {})]


def test_options_with_values_are_no_paths() -> None:
    words = ["-k", "wire", "tests/base", "tests/wire/test_keys.py::test_x", "-x", "--tb", "short"]
    files, options = split_arguments(words)
    assert options == ["-k", "wire", "-x", "--tb", "short"]
    assert "tests/base/test_cpus.py" in files
    assert files[-1] == "tests/wire/test_keys.py::test_x"


def test_a_log_is_cut_to_what_matters() -> None:
    log = "....F\n==== FAILURES ====\n___ test ___\nleft by the tests, and killed: 7\n"
    assert important(log, failed=True).startswith("==== FAILURES")
    assert important(log, failed=False) == "left by the tests, and killed: 7\n"
    assert important("no such option\n", failed=True) == "no such option\n"
