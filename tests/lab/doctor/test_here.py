"""`pilotfish doctor` as a process on this machine."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import pilotfish
from pilotfish.lab.doctor.commands import run_commands
from pilotfish.lab.doctor.examination import Examination
from tests.conftest import Pair
from tests.support.commands import command, patience_s

FACTS = {"kernel", "machine", "cpus", "memory_bytes", "disks", "python", "pilotfish", "packages"}


def doctor(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    names = {name: value for name, value in environment.items() if value}
    others = {name: value for name, value in os.environ.items() if name not in environment}
    return subprocess.run(
        command("doctor", *arguments),
        env=others | names,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {each["subject"]: each for each in json.loads(done.stdout)["findings"]}


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_it_tells_what_this_machine_is_as_text_and_as_json() -> None:
    began = time.monotonic()
    done = doctor()
    assert time.monotonic() - began < patience_s()
    assert done.returncode in (0, 1, 3), done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    for word in ("system", "memory", "Python", "can run", "model"):
        assert f"\n{word}" in f"\n{done.stdout}"
    examination = msgspec.json.decode(doctor("--json").stdout, type=Examination)
    facts = msgspec.to_builtins(examination.machine)
    assert facts.keys() >= FACTS
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    providers = {each.name: each.works for each in examination.expects.providers}
    assert providers["cpu"] is True


def test_the_model_of_a_configuration_is_examined(pair: Pair, tmp_path: Path) -> None:
    config = tmp_path / "device.toml"
    config.write_text(f'draft = "{pair.draft}"\nlanes = 3\ncontext = 64\nprovider = "cpu"\n')
    expects = json.loads(doctor("--json", "--config", config).stdout)["expects"]
    assert (expects["context"], expects["slots"], expects["provider"]) == (64, 3, "cpu")
    assert expects["weights_bytes"] > 0
    config.write_text(f'draft = "{tmp_path / "gone"}"\n')
    done = doctor("--json", "--config", config)
    assert done.returncode == 3
    assert findings(done)["model"]["severity"] == "fault"
    config.write_text(f'target = "{pair.draft}"\nprovider = "cuda"\n')
    done = doctor("--json", "--config", config)
    assert json.loads(done.stdout)["expects"]["role"] == "edge"
    assert "cuda, which cannot run here" in findings(done)["provider"]["message"]
    config.write_text(f'target = "{pair.draft}"\nprovider = "banana"\n')
    done = doctor("--json", "--config", config)
    assert done.returncode == 3
    assert "banana, which there is not" in findings(done)["provider"]["message"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "required: --draft"),
        ("foo = 1", "'foo' is not a setting"),
        ("context = -5", "--context: -5 is not"),
        ("lanes = 123456789012345678901234567890", "is not between"),
    ],
)
def test_what_the_daemon_refuses_in_its_configuration_is_a_fault(
    tmp_path: Path, lines: str, message: str
) -> None:
    config = tmp_path / "device.toml"
    config.write_text(f'edge = "tcp://127.0.0.1:7077"\n{lines}\n')
    done = doctor("--json", "--config", config)
    assert done.returncode == 3
    assert message in findings(done)["configuration"]["message"]
    assert "model" not in findings(done)


@pytest.mark.parametrize("model", ["Org/Name", "file", "text", "default"])
def test_a_model_that_is_exported_later_is_no_fault(tmp_path: Path, model: str) -> None:
    config = tmp_path / "device.toml"
    if model == "file":
        model = str(tmp_path / "model.gguf")
        Path(model).write_bytes(b"GGUF")
    config.write_text('edge = "tcp://127.0.0.1:7077"\n' + f'draft = "{model}"\n')
    done = doctor("--json", "--config", config, PILOTFISH_CACHE=str(tmp_path / "cache"))
    listed, expects = findings(done), json.loads(done.stdout)["expects"]
    assert all(each["severity"] != "fault" for each in listed.values()), listed
    if model == "default":
        assert expects["model"].startswith("default ")
        assert expects["context"] == 8192
        return
    assert expects["model"] == model
    assert "weights_bytes" not in expects
    if model != "text":
        assert listed["model"]["mend"] == f"pilotfish models fetch {model} --role drafter"
        assert "no artifact yet" in doctor("--config", config).stdout


def test_a_file_that_cannot_be_read_is_an_exit_code(tmp_path: Path) -> None:
    for flag in ("--config", "--recorded"):
        done = doctor(flag, tmp_path / "nothing.toml")
        assert done.returncode == 78
        assert done.stderr.startswith("pilotfish: ")
        assert "nothing.toml" in done.stderr


@pytest.mark.parametrize("body", ["sleep 60", "trap '' TERM; sleep 60 & wait; sleep 60"])
def test_a_tool_that_hangs_is_a_finding(tmp_path: Path, body: str) -> None:
    tool(tmp_path, "nvidia-smi", f"echo begun; {body}")
    tool(tmp_path, "nvpmodel", "echo 'NV Power Mode: 15W'; echo 0")
    began = time.monotonic()
    done = doctor("--json", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert time.monotonic() - began < patience_s()
    assert "nvidia-smi" in findings(done)["command"]["message"]
    facts = json.loads(done.stdout)["machine"]
    assert facts["power_mode"] == "15W"
    assert facts["unfinished"]
    assert "cpu" in facts["absent"]


@pytest.mark.parametrize(
    ("body", "subject", "words"),
    [
        ("import time; time.sleep(60)", "command", "(onnxruntime)` did not end in time"),
        ("import os; os.abort()", "ONNX Runtime", "crashed"),
    ],
    ids=["hangs", "crashes"],
)
def test_a_runtime_that_cannot_be_imported_is_a_finding(
    tmp_path: Path, body: str, subject: str, words: str
) -> None:
    (tmp_path / "onnxruntime.py").write_text(body)
    paths = os.pathsep.join([str(tmp_path), str(Path(pilotfish.__file__).parents[1])])
    began = time.monotonic()
    done = doctor("--json", PYTHONPATH=paths)
    assert time.monotonic() - began < patience_s()
    assert words in findings(done)[subject]["message"]
    assert json.loads(done.stdout)["machine"]["packages"]["onnxruntime"]


def test_an_endless_output_ends(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", "yes")
    began = time.monotonic()
    outputs = run_commands({"yes": [str(tmp_path / "nvidia-smi")]}, 2.0)
    assert time.monotonic() - began < patience_s()
    assert len(outputs["yes"].text) == 256 * 1024


def test_commands_run_at_once_and_a_missing_one_has_a_status() -> None:
    began = time.monotonic()
    outputs = run_commands({f"sleep {i}": ["sleep", "0.5"] for i in range(6)}, 2.0)
    assert time.monotonic() - began < 0.5 * patience_s()
    assert [output.status for output in outputs.values()] == [0] * 6
    assert run_commands({"x": ["/nonexistent"]}, 1.0)["x"].status == 127


def test_under_64_files_and_without_a_locale() -> None:
    words = " ".join(command("doctor", "--json"))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 64 && unset LANG LC_ALL LC_CTYPE && exec {words}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    facts = json.loads(done.stdout)["machine"]
    assert facts["open_files"] == [64, 64]
    assert findings(done)["open files"]["severity"] == "warning"
    assert facts["packages"]
    assert "locale" not in findings(done)


def test_without_a_home() -> None:
    done = doctor("--json", HOME="", PILOTFISH_CACHE="", XDG_CACHE_HOME="")
    assert json.loads(done.stdout)["machine"]["disks"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, of which nothing is left."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if (
        not mounted
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder],
            check=False,
            capture_output=True,
        ).returncode
    ):
        pytest.skip("needs root, who may mount a tmpfs")
    try:
        with pytest.raises(OSError, match="No space"), (folder / "big").open("wb") as file:
            file.write(bytes(2 << 20))
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_fault(full_disk: Path) -> None:
    done = doctor("--json", PILOTFISH_CACHE=str(full_disk), TMPDIR=str(full_disk))
    assert done.returncode == 3
    assert "is full" in findings(done)["disk"]["message"]


def test_a_disk_that_is_mounted_read_only_is_called_so(full_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", full_disk], check=True)
    message = findings(doctor("--json", PILOTFISH_CACHE=str(full_disk)))["disk"]["message"]
    assert message.endswith("lies on a disk that is mounted read-only.")


def test_it_needs_no_root() -> None:
    python = Path("/usr/bin/python3")
    if os.geteuid() != 0 or not python.exists() or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user, and the system's Python")
    folders = os.pathsep.join([str(Path(pilotfish.__file__).parents[1]), *site.getsitepackages()])
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    environment = {"PYTHONPATH": folders, "HOME": "/nonexistent", "PATH": os.environ["PATH"]}
    words = [*user, str(python), "-m", "pilotfish", "doctor", "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        pytest.skip(f"the system's Python cannot run this tree: {done.stderr[-200:]}")
    assert done.stderr == ""
    assert json.loads(done.stdout)["machine"]["memory_bytes"] > 0
    assert "cannot be written" in findings(done)["disk"]["message"]
