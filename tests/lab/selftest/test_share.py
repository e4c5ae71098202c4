"""The self-test begins with the doctor, and `--share` prints a block without private names."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.cli import main
from pilotfish.lab.doctor import sharing
from pilotfish.lab.doctor.sharing import scrub, shared_block
from pilotfish.wire import keys
from tests.support.commands import command

PRIVATE = {
    "a path": ("cannot open /home/alice/secret-project/model.onnx", "alice", "secret-project"),
    "a path with spaces": ("no /home/al smith/my model/x.onnx there", "al smith", "my model"),
    "a path in quotes": ("No such file: '/home/al smith/the model'", "smith", "the model"),
    "a path of Windows": (r"no C:\Users\alice\x.onnx", "alice"),
    "a path that climbs": ("/usr/share/../../home/alice/x", "alice"),
    "a disk": ("/run/media/al/STICK-OF-AL and /dev/disk/by-id/nvme-S4EWNX0R", "STICK", "S4EWN"),
    "a host with a port": ("no answer from my-edge.example.eu:7077", "my-edge"),
    "a host": ("my-edge.duckdns.org and kitchen.local refused", "my-edge", "kitchen"),
    "a MAC with dashes": ("eth0 00-1b-44-11-3a-b7", "3a-b7"),
    "a number of a Jetson": ("board 1421922013489 failed", "1421922013489"),
    "a key of SSH": ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5", "AAAAC3"),
    "a password": ("token: hunter2 was refused", "hunter2"),
    "a short token": ("hf_AbCdEfGhIj is invalid", "AbCd"),
    "an address": ("tcp://edge.example.com:7077 refused", "example.com"),
    "an address of IPv4": ("no answer from 192.168.17.4:22", "192.168.17.4"),
    "addresses of IPv6": ("fe80::1c2b and 2001:db8:0:1:2:3:4:5", "fe80", "2001:db8"),
    "a MAC": ("eth0 00:1b:44:11:3a:b7 up", "3a:b7"),
    "mail": ("ask bob.builder@example.org", "bob.builder"),
    "a serial number": ("Serial Number: 1421922013489", "1421922013489"),
    "a UUID": ("GPU-6d9f7a3e-0c1b-4d2e-8f00-aa11bb22cc33 failed", "6d9f7a3e"),
    "an invitation": ("pf1_AbCdEf-123 was used", "AbCdEf-123"),
    "a token": ("Authorization hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789", "hf_AbCd"),
}
PUBLIC = (
    "TensorRT cannot be imported: sudo apt install python3-libnvinfer",
    "/usr/lib/aarch64-linux-gnu/libcudart.so.12 and /etc/nv_tegra_release",
    "2026-11-28T12:39:19+00:00",
    "Thu 1970-01-01 01:28:34",
    "# R36 (release), REVISION: 4.3",
    "logits 1 of 3: row 4, column 17, 1.5e-06",
    "nvidia,p3768-0000+p3767-0005-super",
    "opset24 fp16, growth",
    "running.py:120 and model.onnx, 8500000000 bytes of 1.5/2.0",
)


def block(text: str) -> dict[str, Any]:
    """Return the JSON in a block of Markdown."""
    assert text.startswith("<details><summary>")
    assert text.rstrip().endswith("</details>")
    assert max(map(len, text.splitlines())) < 2000
    payload: dict[str, Any] = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    return payload


@pytest.mark.parametrize("kind", PRIVATE)
def test_private_things_are_removed_wherever_they_are(kind: str) -> None:
    text, *secrets = PRIVATE[kind]
    results = {"findings": [{"reason": text}], "doctor": {"machine": {text: text}}}
    shared = shared_block(results, "title")
    for secret in secrets:
        assert secret not in shared
    assert block(shared)["findings"][0]["reason"] != text


@pytest.mark.parametrize("text", PUBLIC)
def test_what_names_nobody_stays(text: str) -> None:
    assert scrub({"reason": text}) == {"reason": text}


def test_versions_that_look_like_addresses_stay() -> None:
    results = {
        "packages": {"tensorrt": "10.3.0.30"},
        "reason": "TensorRT 10.3.0.30 at 10.3.0.31",
    }
    assert scrub(results)["packages"] == {"tensorrt": "10.3.0.30"}
    assert scrub(results)["reason"] == "TensorRT 10.3.0.30 at <address>"


def test_keys_are_removed(tmp_path: Path) -> None:
    public = keys.create(tmp_path, "device").read_text().split()
    secret = (tmp_path / "device.key").read_text().split()
    shared = shared_block({"reason": f"the keys {secret[-1]} and {public[-1]} differ"}, "title")
    assert block(shared) == {"reason": "the keys <key> and <key> differ"}


def test_names_of_host_and_user_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "carols-robot.lan")
    monkeypatch.setattr(getpass, "getuser", lambda: "carol77")
    text = "carol77 on carols-robot.lan (CAROLS-ROBOT): carol77x stays"
    assert scrub(text) == "<name> on <name> (<name>): carol77x stays"
    monkeypatch.setattr(platform, "node", lambda: "orin")
    assert scrub("Jetson Orin Nano") == "Jetson Orin Nano"


FAILED = {"provider": "cuda", "check": "tree", "status": "failed", "reason": "no kernel " * 30}


def results_of(checks: int, failures: int) -> dict[str, Any]:
    """Return results of four providers, each with so many checks of every model that passed."""
    passed = [
        {"provider": provider, "model": f"model-{number}", "precision": "fp32",
         "dialect": "opset24", "check": f"check-{check}", "status": "passed", "difference": 2e-5,
         "tolerance": 1e-4, "where": "logits of 48 tokens, row 34, column 132", "seconds": 0.015}
        for provider in ("cpu", "cuda", "tensorrt", "tensorrt-ep")
        for number in range(20) for check in range(checks)
    ]  # fmt: skip
    del passed[0]["difference"], passed[0]["tolerance"]  # of texts, no outputs are compared
    return {"passed": not failures, "findings": [*passed, *[FAILED] * failures], "times": [1]}


def test_a_block_fits_into_an_issue() -> None:
    shared = shared_block(results_of(checks=12, failures=3), "title")
    assert len(shared) < 65_536 - 5_000
    payload = block(shared)
    assert payload["findings"][:3] == [FAILED] * 3
    row = payload["findings"][3]
    assert row["passed"].split() == [f"check-{number}" for number in range(12)]
    assert row["of_tolerance"] == 0.2
    assert "findings_left_out" not in payload
    shared = shared_block(results_of(checks=12, failures=900), "title")
    assert len(shared) < 65_536 - 5_000
    payload = block(shared)
    assert payload["findings"][0] == FAILED
    assert len(payload["findings"]) + payload["findings_left_out"] == 80 + 900
    assert payload["times"] == [1]


def test_long_and_deep_results_take_no_time(tmp_path: Path) -> None:
    began = time.process_time()
    for text in ("!", "a:", ":", "1.", "a.b@", "/a"):
        assert len(scrub(text * 50_000)) < 10_000
    assert time.process_time() - began < 5
    path = tmp_path / "deep.json"
    path.write_text('{"findings": [], "machine": ' + "[" * 900 + "]" * 900 + "}")
    assert main(["selftest", "--share", str(path)]) in (0, 78)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_a_block_is_json_whatever_is_in_it(value: Any) -> None:
    lines = list(sharing._break(json.dumps({"value": value}, ensure_ascii=False)))
    assert json.loads("\n".join(lines)) == {"value": value}


def test_the_page_begins_with_the_doctor_and_results_are_shared_later(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = subprocess.run(
        command(
            "selftest", "--quick", "--minutes", "0.0001", "--provider", "tensorrt", "--out", out
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("doctor: "), done.stderr
    results = json.loads(out.read_text())
    assert results["doctor"]["format"] == "pilotfish-doctor"
    results["findings"] = [{"reason": PRIVATE["a path"][0]}]
    out.write_text(json.dumps(results))
    done = subprocess.run(
        command("selftest", "--share", out), capture_output=True, text=True, check=True
    )
    payload = block(done.stdout)
    assert payload["doctor"]["machine"]["python"] == results["doctor"]["machine"]["python"]
    assert payload["findings"] == [{"reason": "cannot open <path>"}]


def test_a_run_prints_only_the_block() -> None:
    done = subprocess.run(
        command("selftest", "--quick", "--minutes", "0.0001", "--provider", "tensorrt", "--share"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert block(done.stdout)["doctor"]["version"] == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"findings": []', '{"findings": []}'])
def test_a_file_that_has_no_results_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "none.json"
    path.write_text(text)
    assert main(["selftest", "--share", str(path)]) == 78
    assert "no results" in capsys.readouterr().err
