"""A board of arm64, flashed from this machine: its programs run, and it answers over the link."""

from __future__ import annotations

import json
import re

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.deploy.install import LAUNCHER
from tests.deploy.arm64.board import Board
from tests.deploy.arm64.conftest import MACHINE, Prepared
from tests.deploy.booted.conftest import pilotfish
from tests.support import web

pytestmark = pytest.mark.slow
CURRENT = "opt/pilotfish/current"
PILOTFISH = f"/{CURRENT}/bin/pilotfish"
ELF = b"\x7fELF"
EM_AARCH64 = 183
# Modules of extras that no bundle contains: they are for exporting, drawing, training and traces.
EXTRAS = {"matplotlib", "onnx", "requests", "torch"}
IMPORT = """
import importlib, json, pkgutil, platform, sys
import pilotfish
done, missing = [], {}
for module in pkgutil.walk_packages(pilotfish.__path__, "pilotfish."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        done.append(module.name)
    except ImportError as error:
        missing[module.name] = error.name
    except pilotfish.base.errors.UnsupportedError as error:
        missing[module.name] = error.__cause__.name
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps([platform.machine(), done, missing, sorted(loaded)]))
"""
# Modules of the wheels, as far as they have code of their own for this CPU.
COMPILED = ("hf_xet", "llguidance", "markupsafe._speedups", "msgspec._core", "numpy",
            "onnxruntime", "safetensors", "tokenizers", "yaml._yaml", "zmq",
            "google._upb._message")  # fmt: skip
# Protocols with their temperatures. Of the first, target and seed decide the text, whatever the
# drafter says, and however its CPU rounds.
SAME_TEXT = {"greedy": 0.0, "coupled": 0.8, "ahead": 0.8, "stream": 0.8}
OTHERS = dict.fromkeys(("dsd", "dssd", "tslt", "tree", "auto"), 0.8)
PROMPT, SEED, TOKENS = "onceupon", 7, 40


def test_only_programs_of_arm64_are_installed(device_board: Board) -> None:
    libraries = 0
    folder = (device_board.root / CURRENT).resolve()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            head = file.read(20)
        if head.startswith(ELF):
            assert int.from_bytes(head[18:20], "little") == EM_AARCH64, path
            libraries += 1
    assert libraries > len(COMPILED)


def test_all_modules_of_a_device_can_be_imported(device_board: Board) -> None:
    reply = device_board.execute(IMPORT, f"{CURRENT}/site", *COMPILED).splitlines()[-1]
    machine, done, missing, loaded = json.loads(reply)
    assert machine == MACHINE
    assert set(missing.values()) <= EXTRAS, missing
    assert {"pilotfish.cli.device", "pilotfish.cli.edge", "pilotfish.engines.onnx_decoder",
            "pilotfish.device_runtime.service.serve"} <= {*done}  # fmt: skip
    for name in COMPILED:
        assert any(f"/{name.split('.')[0]}" in path for path in loaded), (name, loaded)


def test_command_names_its_version_and_its_actions(device_board: Board) -> None:
    assert device_board.run(PILOTFISH, "--version") == pilotfish("--version").strip()
    help_text = device_board.run(PILOTFISH, "--help")
    assert help_text.startswith("usage: pilotfish")
    assert "exit codes: 0 done" in help_text


def test_launcher_runs_the_system_s_python(device_board: Board, prepared: Prepared) -> None:
    path = (device_board.root / CURRENT).resolve() / "bin/pilotfish"
    assert path.read_text() == LAUNCHER.format(python=f"/usr/bin/python{prepared.python}")
    assert path.stat().st_mode & 0o777 == 0o755


def test_bytecode_of_this_machine_is_used_there(device_board: Board, prepared: Prepared) -> None:
    site = (device_board.root / CURRENT).resolve() / "site"
    if not (site / "pilotfish/base/__pycache__").exists():
        pytest.skip(f"this machine has no Python {prepared.python}, so nothing was compiled")
    variables = (f"PYTHONPATH=/{CURRENT}/site", "PYTHONVERBOSE=1")
    reply = device_board.run("env", *variables, "python3", "-sc", "import pilotfish.base.errors")
    assert re.search(r"# .*/base/__pycache__/errors\.\S+\.pyc matches ", reply), reply[-2000:]


def test_one_prompt_is_answered_over_the_link(
    device_board: Board, near_edge: EdgeServer, near_device: Device
) -> None:
    reply = device_board.run(
        PILOTFISH, "device", "run", "--draft", f"/{CURRENT}/draft", "--edge", near_edge.endpoint,
        "--keys", "/etc/pilotfish/keys", "--protocol", "greedy", "--max-tokens", 24, "hello",
    )  # fmt: skip
    wanted = near_device.generate("hello", protocol="greedy", max_tokens=24)
    assert reply.splitlines()[0] == wanted.text


def test_service_answers_as_one_on_this_machine(
    device_board: Board, near_edge: EdgeServer, near_device: Device
) -> None:
    settings = device_board.root / "etc/pilotfish/device.toml"
    settings.write_text(
        re.sub("(?m)^edge = .*", f'edge = "{near_edge.endpoint}"', settings.read_text())
        + 'listen = "127.0.0.1:0"\nthreads = 1\n'
    )
    with device_board.serving("pilotfish-device.service", "the device serves on ") as url:
        for protocol, temperature in SAME_TEXT.items():
            wanted = text_of(near_device, protocol, temperature)
            assert _ask(url, protocol, temperature) == wanted, protocol
        for protocol, temperature in OTHERS.items():
            assert _ask(url, protocol, temperature), protocol
    assert "Traceback" not in device_board.log.read_text()


def text_of(device: Device, protocol: str, temperature: float) -> str:
    """What a device answers to the prompt of these tests, without a chat template."""
    return device.generate(
        device.tokenizer.encode(PROMPT), protocol=protocol, temperature=temperature, seed=SEED,
        max_tokens=TOKENS,
    ).text  # fmt: skip


def _ask(url: str, protocol: str, temperature: float) -> str:
    """What a service answers to it."""
    body = {"model": "pilotfish", "prompt": PROMPT, "seed": SEED, "max_tokens": TOKENS,
            "temperature": temperature, "pilotfish": {"protocol": protocol}}  # fmt: skip
    reply = web.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    text = reply["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def test_installation_is_whole_when_checked_there_and_here(device_board: Board) -> None:
    there = device_board.run(PILOTFISH, "flash", "--rootfs", "/", "--check")
    assert "pilotfish-device.service is enabled" in there
    assert pilotfish("flash", "--rootfs", device_board.root, "--check").strip() == there
