"""Both services on a machine that was flashed and booted: they serve, heal, reload, come back."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from pilotfish import Device
from pilotfish.base.errors import PilotfishError
from pilotfish.wire import keys
from tests.deploy.booted.asking import (
    AFTERWARDS,
    client,
    complete,
    get,
    is_undisturbed,
    link_losses,
    stream,
)
from tests.deploy.booted.conftest import API_KEY, DEVICE, EDGE, ETC, Prepared, set_api_keys
from tests.deploy.booted.machine import Machine
from tests.support import web

UNITS = [
    DEVICE,
    EDGE,
    *(f"pilotfish-{name}" for name in ("edge.socket", "engine-build.service", "power.service")),
]

# The first test waits for the machine to be made.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def served(machine: Machine) -> bool:
    """Whether a completion comes."""
    try:
        return bool(complete(machine, tokens=8))
    except openai.APIError:
        return False


def test_services_are_active_and_say_what_they_do(machine: Machine) -> None:
    for unit in (DEVICE, EDGE):
        assert machine.show(unit, "ActiveState") == "active", machine.journal(unit)
        assert machine.show(unit, "SubState") == "running"
        assert machine.show(unit, "StatusText") != ""
        assert machine.show(unit, "NRestarts") == "0", machine.journal(unit)
    assert machine.run("systemctl", "is-system-running") == "running"
    assert machine.run("systemd-analyze", "verify", *UNITS) == ""


def test_edge_shows_its_figures(machine: Machine) -> None:
    url = "http://127.0.0.1:9464/metrics"
    assert "pilotfish" in machine.on_network(lambda: web.get(url).raise_for_status().text)


def test_openai_client_is_answered(machine: Machine) -> None:
    assert machine.on_network(lambda: [model.id for model in client().models.list()])
    answer = stream(machine, lambda: None, seed=7)
    assert answer.tokens >= AFTERWARDS
    assert is_undisturbed(machine, answer, seed=7)


TRY = (
    "from pilotfish.engines.engine_errors import GrammarError\n"
    "from pilotfish.engines.grammar_trial import TRIAL, TOO_LONG\n"
    "from pilotfish.speculation.logits_options import Grammar\n"
    "TRIAL.attempt(Grammar('regex', '(ab|cd){2}'))\n"
    "stars = ''.join(f'X{n}: X{n + 1}*\\n' for n in range(3000))\n"
    "try:\n    TRIAL.attempt(Grammar('lark', f'start: X0\\n{stars}X3000: \"a\"'))\n"
    "except GrammarError as error:\n    print(error)\n"
    "else:\n    raise SystemExit('it passed')\n"
    "TRIAL.attempt(Grammar('json', '{}'))\n"
)


@pytest.mark.parametrize("unit", [DEVICE, EDGE])
def test_grammars_are_tried_under_the_confinement(machine: Machine, unit: str) -> None:
    """By a unit that is like it, but runs `TRY` once; the services' models can end no answer."""
    (place,) = machine.run("systemctl", "show", "--value", "-p", "FragmentPath", unit).splitlines()
    left_out = ("Type=", "NotifyAccess=", "ExecStart", "ExecReload=", "Restart", "WatchdogSec=",
                "Sockets=", "Requires=", "RuntimeDirectory")  # fmt: skip
    lines = machine.run("cat", place).splitlines()
    lines = [line for line in lines if not line.startswith(left_out)]
    at = lines.index("[Service]") + 1
    interpreter = machine.run("head", "-1", "/opt/pilotfish/current/bin/pilotfish").removeprefix(
        "#!"
    )
    site = "/opt/pilotfish/current/site"
    start = f"ExecStart={interpreter} /run/try.py"
    lines[at:at] = ["Type=oneshot", start, f"Environment=PYTHONPATH={site}"]
    name = f"try-{unit}"
    for file, text in (("try.py", TRY), (f"systemd/system/{name}", "\n".join(lines))):
        machine.run("sh", "-c", 'printf %s "$1" > "$2"', "sh", text, f"/run/{file}")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", name, check=False)
    reply = machine.journal(name)
    assert machine.show(name, "Result") == "success", reply
    assert "takes too much time" in reply, reply


@pytest.mark.parametrize("unit", [DEVICE, EDGE])
def test_service_has_nothing_that_it_does_not_need(machine: Machine, unit: str) -> None:
    pid = machine.show(unit, "MainPID")
    lines = machine.run("cat", f"/proc/{pid}/status").splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    user = machine.run("id", "-u", "pilotfish")
    assert status["Uid"] == [user] * 4
    assert {int(status[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == ["1"]
    assert status["Seccomp"] == ["2"]
    inside = ["nsenter", "-t", pid, "-m", "-S", user, "-G", user]
    for forbidden in (
        "/opt/pilotfish/x",
        "/usr/lib/x",
        "/etc/pilotfish/x",
        "/etc/pilotfish/keys/x",
        "/var/lib/pilotfish/x",
        "/var/lib/pilotfish/target/x",
        "/var/lib/pilotfish/target/manifest.json",
    ):
        assert "denied" in (completed := machine.run(*inside, "touch", forbidden, check=False)) or (
            "Read-only" in completed
        )
    secret = f"/etc/pilotfish/keys/{unit.removeprefix('pilotfish-').removesuffix('.service')}.key"
    assert "denied" in machine.run(*inside, "cat", secret, check=False)


@pytest.mark.parametrize("unit", [DEVICE, EDGE])
def test_frozen_service_is_restarted_and_serves_again(machine: Machine, unit: str) -> None:
    restarts = int(machine.show(unit, "NRestarts"))
    machine.run("systemctl", "kill", "-s", "STOP", unit)
    machine.until(
        lambda: (
            int(machine.show(unit, "NRestarts")) > restarts
            and machine.show(unit, "ActiveState") == "active"
        ),
        f"the watchdog has restarted {unit}",
    )
    assert "watchdog" in machine.journal(unit, lines=30).lower()
    machine.until(lambda: served(machine), "a completion is served")


def test_killed_edge_changes_nothing_in_a_stream(machine: Machine) -> None:
    losses, restarts = link_losses(machine), int(machine.show(EDGE, "NRestarts"))
    kill = ["systemctl", "kill", "-s", "KILL", EDGE]
    answer = stream(machine, lambda: _disturb(machine, kill, losses), seed=11)
    assert is_undisturbed(machine, answer, seed=11)
    assert int(machine.show(EDGE, "NRestarts")) == restarts + 1


def test_restarted_edge_changes_nothing_in_a_stream(machine: Machine) -> None:
    losses, restart = link_losses(machine), ["systemctl", "restart", EDGE]
    answer = stream(machine, lambda: _disturb(machine, restart, losses), seed=12)
    assert is_undisturbed(machine, answer, seed=12)


def _disturb(machine: Machine, command: list[str], losses: int) -> None:
    machine.run(*command)
    machine.until(lambda: link_losses(machine) > losses, "the device has lost the edge")


def test_reload_of_edge_swaps_the_allow_list_in_mid_stream(
    machine: Machine, prepared: Prepared, tmp_path: Path
) -> None:
    public = keys.create(tmp_path, keys.DEVICE)
    shutil.copy(prepared.keys / "edge.pub", tmp_path)
    allowed = machine.root / ETC / "keys/allowed/newcomer.pub"
    pid, losses = machine.show(EDGE, "MainPID"), link_losses(machine)

    def reload_when(changed: Callable[[], object], let_in: bool) -> None:
        changed()
        machine.run("systemctl", "reload", EDGE)
        machine.until(
            lambda: _let_in(machine, prepared, tmp_path) == let_in, "the list is the new one"
        )

    def change() -> None:
        reload_when(lambda: shutil.copy(public, allowed), let_in=True)
        reload_when(allowed.unlink, let_in=False)

    assert not _let_in(machine, prepared, tmp_path)
    answer = stream(machine, change, seed=13)
    assert is_undisturbed(machine, answer, seed=13)
    assert link_losses(machine) == losses
    assert machine.show(EDGE, "MainPID") == pid


def _let_in(machine: Machine, prepared: Prepared, folder: Path) -> bool:
    def ask() -> bool:
        try:
            with Device(prepared.pair.draft, "tcp://127.0.0.1:7077", folder, threads=1) as device:
                return bool(
                    "".join(
                        piece.text
                        for piece in device.stream("abc", protocol="greedy", max_tokens=4)
                    )
                )
        except PilotfishError:
            return False

    return machine.on_network(ask)


def test_reload_of_device_swaps_api_keys_in_mid_stream(machine: Machine) -> None:
    other = "other:fedcba9876543210"
    pid = machine.show(DEVICE, "MainPID")

    def swap() -> None:
        set_api_keys(machine, other)
        machine.run("systemctl", "reload", DEVICE)
        machine.until(lambda: not _knows(API_KEY), "the old key is refused")
        assert _knows(other)

    try:
        answer = stream(machine, swap, seed=14)
    finally:
        set_api_keys(machine, API_KEY)
        machine.run("systemctl", "reload", DEVICE)
    machine.until(lambda: machine.on_network(lambda: _knows(API_KEY)), "the key is known again")
    assert is_undisturbed(machine, answer, seed=14)
    assert machine.show(DEVICE, "MainPID") == pid


def _knows(line: str) -> bool:
    """Whether the service takes a key; on the machine's network."""
    status = get("/v1/models", line).status_code
    assert status in (200, 401)
    return status == 200


def test_units_of_a_jetson_leave_other_machines_alone(machine: Machine) -> None:
    for unit in ("pilotfish-engine-build.service", "pilotfish-power.service"):
        machine.run("systemctl", "start", unit)
        assert machine.show(unit, "ConditionResult") == "no"


def test_power_unit_sets_the_mode_that_its_file_names(machine: Machine) -> None:
    (machine.root / "etc/nvpmodel.conf").write_text("< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n")
    (machine.root / ETC / "power.conf").write_text("MODE=MAXN_SUPER\n")
    tool = machine.root / "usr/sbin/nvpmodel"
    status = machine.root / "var/lib/nvpmodel/status"
    status.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "nvpmodel $*"\necho pmode:0002 >/var/lib/nvpmodel/status\n')
    tool.chmod(0o755)
    try:
        machine.run("systemctl", "start", "pilotfish-power.service")
        assert "nvpmodel -m 2" in machine.journal("pilotfish-power.service").splitlines()
        assert status.stat().st_mode & stat.S_IROTH
        assert status.read_text() == "pmode:0002\n"
    finally:
        machine.run("systemctl", "stop", "pilotfish-power.service")
        (machine.root / "etc/nvpmodel.conf").unlink()
        shutil.rmtree(status.parent)


def test_broken_configuration_is_told_and_harms_nothing_at_reload(machine: Machine) -> None:
    settings = machine.root / ETC / "edge.toml"
    good = settings.read_text()
    pid = machine.show(EDGE, "MainPID")
    try:
        settings.write_text(good + "sessions = [[\n")
        assert "Job for pilotfish-edge.service failed" in reload_fails(machine, EDGE)
        assert "edge.toml" in machine.journal(EDGE, lines=8)
        assert "not in force: /etc/pilotfish/edge.toml" in machine.show(EDGE, "StatusText")
    finally:
        settings.write_text(good)
        machine.run("systemctl", "reload", EDGE)
    assert served(machine)
    assert machine.show(EDGE, "MainPID") == pid


def test_key_is_out_after_a_reload_that_fails_over_another_file(
    machine: Machine, prepared: Prepared, tmp_path: Path
) -> None:
    public = keys.create(tmp_path, keys.DEVICE)
    shutil.copy(prepared.keys / "edge.pub", tmp_path)
    allowed = machine.root / ETC / "keys/allowed"
    shutil.copy(public, allowed / "goes.pub")
    machine.run("systemctl", "reload", EDGE)
    assert _let_in(machine, prepared, tmp_path)
    try:
        (allowed / "goes.pub").unlink()
        (allowed / "empty.pub").touch()
        reload_fails(machine, EDGE)
        assert not _let_in(machine, prepared, tmp_path)
        assert "empty.pub" in machine.show(EDGE, "StatusText")
        assert served(machine)
        machine.run("systemctl", "restart", EDGE)
        assert served(machine)  # an empty key file keeps out its own device only
    finally:
        (allowed / "empty.pub").unlink()
        machine.run("systemctl", "reload", EDGE)


def test_broken_api_keys_fail_the_reload_of_the_device(machine: Machine) -> None:
    try:
        set_api_keys(machine, f"{API_KEY}\nnot a key")
        reload_fails(machine, DEVICE)
        assert machine.on_network(lambda: _knows(API_KEY))
        set_api_keys(machine, "not a key")
        reload_fails(machine, DEVICE)
        assert not machine.on_network(lambda: _knows(API_KEY))  # it was taken off
    finally:
        set_api_keys(machine, API_KEY)
        machine.run("systemctl", "reload", DEVICE)
    assert machine.show(DEVICE, "ActiveState") == "active"


def reload_fails(machine: Machine, unit: str) -> str:
    """Reload a unit, which says by its exit code that something is broken; what it says."""
    completed = machine.run("sh", "-c", f"systemctl reload {unit} || echo exit code $?")
    assert "exit code 1" in completed.splitlines(), completed
    return completed


def test_socket_holds_the_port_and_starts_the_edge(machine: Machine) -> None:
    text = complete(machine, seed=16)
    machine.run("systemctl", "stop", EDGE)
    machine.run("systemctl", "start", "pilotfish-edge.socket")
    try:
        assert complete(machine, seed=16) == text  # the device came, and waited at the port
        assert machine.show(EDGE, "ActiveState") == "active"
        assert machine.show(EDGE, "TriggeredBy") == "pilotfish-edge.socket"
        machine.run("systemctl", "restart", EDGE)
        assert complete(machine, seed=16) == text
    finally:
        machine.run("systemctl", "stop", "pilotfish-edge.socket", EDGE)
        machine.run("systemctl", "start", EDGE)
    assert served(machine)


def test_reboot_comes_back_by_itself(machine: Machine) -> None:
    text = complete(machine, seed=15)
    machine.reboot()
    for unit in (DEVICE, EDGE):
        machine.until_active(unit)
    machine.until(lambda: served(machine), "a completion is served")
    assert complete(machine, seed=15) == text


@pytest.mark.parametrize("unit", [DEVICE, EDGE])
def test_gpu_that_idles_is_a_warning_in_the_journal(machine: Machine, unit: str) -> None:
    """The GPU is a file in place of a card's device node, which no library can use."""
    machine.run("touch", "/dev/nvidia0")
    try:
        machine.run("systemctl", "restart", unit)
        log = machine.run("journalctl", "-u", unit, "-p", "warning", "-o", "cat", "-b")
        [line, *_] = [
            line for line in log.splitlines() if "although this machine has a GPU" in line
        ]
        assert "(/dev/nvidia0): " in line
        assert "To use the GPU: " in line
        assert "the GPU is idle" in machine.show(unit, "StatusText")
        if unit == DEVICE:
            status = machine.on_network(lambda: get("/status", API_KEY).json())
            assert [each["kind"] for each in status["misfits"]] == ["idle-gpu"]
            assert status["misfits"][0]["message"] in line
    finally:
        machine.run("rm", "/dev/nvidia0")
        machine.run("systemctl", "restart", unit)
