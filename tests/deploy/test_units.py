"""The units as systemd's own tools see them, and what stands in them against our code."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import stat
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from pilotfish.base.errors import KeysError
from pilotfish.cli import parser
from pilotfish.cli.configuration import read_settings
from pilotfish.cli.flags import from_args
from pilotfish.deploy import power
from pilotfish.deploy.errors import InstallError
from pilotfish.lab.field.watch.probe import ProbeSettings
from pilotfish.lab.field.watch.watch_settings import WatchSettings
from pilotfish.wire.keys import DeviceKeys, EdgeKeys

FOLDER = Path(str(resources.files("pilotfish"))) / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("pilotfish-*"))
# What each service runs; its settings are in the file of its name.
ROLES = {"device": "device serve", "edge": "edge serve", "worker": "edge worker"}
MAIN = [f"pilotfish-{role}.service" for role in ROLES]
WATCH = "pilotfish-watch.service"
PROGRAM = "/opt/pilotfish/current/bin/pilotfish"
MOST_EXPOSED = {
    **dict.fromkeys([*MAIN, "pilotfish-engine-build.service"], 2.0),
    WATCH: 1.5,
    "pilotfish-power.service": 3.0,  # root's, and it writes /sys
}


def systemd_analyze(*arguments: object) -> str:
    """What the tool says; skips where it is missing or older than its offline checks."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is missing")
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
    match = re.search(r"systemd (\d+)", version.stdout)
    if match is None or int(match[1]) < 250:
        pytest.skip(f"systemd-analyze checks files offline from 250 on: {version.stdout[:40]!r}")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def section(name: str, heading: str) -> dict[str, list[str]]:
    """Key → values of one section of a unit; keys may repeat."""
    results: dict[str, list[str]] = {}
    now = ""
    for line in text(name).splitlines():
        if line.startswith("["):
            now = line.strip("[]")
        elif now == heading and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            results.setdefault(key, []).append(value)
    return results


def test_units_verify_cleanly(tmp_path: Path) -> None:
    for name in UNITS:
        # the program is not installed here
        (tmp_path / name).write_text(text(name).replace(PROGRAM, "/bin/true"))
    assert systemd_analyze("verify", "--man=no", *(tmp_path / name for name in UNITS)) == ""


@pytest.mark.parametrize("name", MOST_EXPOSED)
def test_units_are_hardened(name: str) -> None:
    reply = systemd_analyze("security", "--offline=true", "--no-pager", FOLDER / name)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", reply)
    assert exposure is not None, reply
    assert float(exposure[1]) <= MOST_EXPOSED[name]


@pytest.mark.parametrize("name", MAIN)
def test_gpu_is_not_locked_out(name: str) -> None:
    service = section(name, "Service")
    for fatal_to_cuda in ("PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"):
        assert fatal_to_cuda not in service
    assert service["DevicePolicy"] == ["closed"]
    allowed = {value.split()[0] for value in service["DeviceAllow"]}
    assert {"char-nvidia*", "char-drm", "char-nvhost*", "char-*.gpu", "/dev/nvmap"} <= allowed
    build = section("pilotfish-engine-build.service", "Service")
    for grant in ("DeviceAllow", "SystemCallFilter"):
        assert build[grant] == service[grant]


def test_power_mode_can_be_set_and_noted() -> None:
    """What `nvpmodel` and `jetson_clocks` write: /sys, and a file that others read."""
    service = section("pilotfish-power.service", "Service")
    fatal = ("User", "PrivateUsers", "PrivateDevices", "ProtectKernelTunables", "ProcSubset")
    assert not {*fatal, "UMask"} & service.keys()
    assert service["ProtectSystem"] == ["full"]  # leaves /var writable


@pytest.mark.parametrize("name", MAIN)
def test_service_is_never_given_up(name: str) -> None:
    service = section(name, "Service")
    assert section(name, "Unit")["StartLimitIntervalSec"] == ["0"]
    assert service["Restart"] == ["always"]
    assert service["Type"] == ["notify"]
    assert int(service["WatchdogSec"][0]) > 0
    assert int(service["TimeoutAbortSec"][0]) <= 5


@pytest.mark.parametrize("role", ROLES)
def test_reload_tells_how_it_went(role: str) -> None:
    """By the exit code of a command, under any systemd; it and the service share a folder."""
    service = section(f"pilotfish-{role}.service", "Service")
    (command,) = service["ExecReload"]
    program, *words = command.replace("$MAINPID", "17").split()
    assert program == PROGRAM
    assert parser(words).parse_args(words).pid == 17
    assert service["RuntimeDirectory"] == [f"pilotfish-{role}"]
    assert service["NotifyAccess"] == ["main"]


@pytest.mark.parametrize("name", [*MAIN, "pilotfish-engine-build.service"])
def test_service_cannot_write_what_it_runs(name: str) -> None:
    service = section(name, "Service")
    assert service["ProtectSystem"] == ["strict"]
    for grant in ("StateDirectory", "ReadWritePaths", "BindPaths", "LogsDirectory"):
        assert grant not in service
    assert service["CacheDirectory"] == ["pilotfish"]
    assert "HOME=/var/cache/pilotfish" in service["Environment"][0].split()
    assert service["WorkingDirectory"] == ["/var/cache/pilotfish"]
    owners = dict(
        line.split()[1:4:2] for line in text("pilotfish.tmpfiles").splitlines() if line[0] == "d"
    )
    assert owners["/var/lib/pilotfish"] == "root"


CONFIGURED = {**ROLES, "watch": "field watch"}


@pytest.mark.parametrize("role", CONFIGURED)
def test_example_configuration_is_understood(role: str, tmp_path: Path) -> None:
    """Each flag in the example exists, those in comments as well."""
    example = text(f"{role}.toml")
    for commented in (False, True):
        path = tmp_path / f"{commented}.toml"
        path.write_text(re.sub(r"(?m)^#(?=[a-z-]+ = )", "", example) if commented else example)
        args = parser().parse_args([*CONFIGURED[role].split(), "--config", str(path)])
        assert args.keys == Path("/etc/pilotfish/keys")
    started = " ".join(section(f"pilotfish-{role}.service", "Service")["ExecStart"])
    assert started == f"{PROGRAM} {CONFIGURED[role]} --config /etc/pilotfish/{role}.toml"


@pytest.mark.parametrize("role", CONFIGURED)
def test_broken_configuration_ends_with_the_code_that_is_not_tried_again(
    role: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{role}.toml"
    path.write_text("sessions = [[\n")
    words = CONFIGURED[role].split()
    command = [sys.executable, "-m", "pilotfish", *words, "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.startswith(f"pilotfish: {path} is not valid TOML")
    assert len(done.stderr.splitlines()) == 1
    given_up = section(f"pilotfish-{role}.service", "Service")["RestartPreventExitStatus"][0]
    assert str(done.returncode) in given_up.split()


def test_watch_writes_its_folder_alone_and_goes_on_after_a_kill() -> None:
    """A watch that has come to its end stays ended."""
    service = section(WATCH, "Service")
    assert section(WATCH, "Unit")["StartLimitIntervalSec"] == ["0"]
    assert service["Restart"] == ["on-failure"]
    assert service["Type"] == ["notify"]
    assert service["ProtectSystem"] == ["strict"]
    assert service["StateDirectory"] == ["pilotfish-watch"]
    for grant in ("ReadWritePaths", "BindPaths", "DeviceAllow", "SupplementaryGroups"):
        assert grant not in service
    assert 'out = "/var/lib/pilotfish-watch/' in text("watch.toml")


def test_watch_has_an_example_of_what_its_user_may_want(tmp_path: Path) -> None:
    """Each key, also one behind a #, is a flag, and its value is one that the flag takes."""
    lines = text("watch.toml").splitlines()
    file = tmp_path / "watch.toml"
    file.write_text("\n".join(re.sub(r"^#(?=[a-z-]+ = )", "", line) for line in lines))
    keys = set(read_settings(file))
    assert keys >= {"edge", "keys", "out", "every", "for", "protocols", "draft", "keep"}
    assert keys >= {"max-tokens", "most-bytes", "goodput-bytes", "metrics", "name"}
    words = ["field", "watch", "--config", str(file)]
    settings = from_args(parser().parse_args(words), WatchSettings)
    assert settings.metrics == ("127.0.0.1", 9466)
    assert settings.probe == ProbeSettings()


@pytest.mark.parametrize("name", [*MAIN, WATCH])
def test_key_that_is_missing_counts_as_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a default for its credential the unit would not start at all (243/CREDENTIALS)."""
    service = section(name, "Service")
    for loaded, default in zip(service["LoadCredential"], service["SetCredential"], strict=True):
        credential, _, path = loaded.partition(":")
        assert path == f"/etc/pilotfish/keys/{credential}"
        assert default == f"{credential}:\\n"
    credential = service["LoadCredential"][0].partition(":")[0]
    (tmp_path / credential).write_text("\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    load = EdgeKeys.load if credential == "edge.key" else DeviceKeys.load
    with pytest.raises(KeysError, match=f"{tmp_path / 'keys' / credential} is missing"):
        load(tmp_path / "keys")


def test_engine_is_built_by_a_command_that_exists() -> None:
    (started,) = section("pilotfish-engine-build.service", "Service")["ExecStart"]
    program, *arguments = started.split()
    assert program == PROGRAM
    args = parser().parse_args(arguments)
    assert args.run is not None


NVPMODEL = """\
# MAXN is the NONE power model
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
# < POWER_MODEL ID=9 NAME=NONE >
< PM_CONFIG DEFAULT=1 >
"""


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A board's power modes, and NVIDIA's tools as scripts that note how they were called."""
    (tmp_path / "nvpmodel.conf").write_text(NVPMODEL)
    for tool in ("nvpmodel", "jetson_clocks"):
        script = tmp_path / tool
        script.write_text(
            f'#!/bin/sh\necho "{tool} $*" >>{tmp_path}/calls\nread -r answer && exit 9\ntrue\n'
        )
        script.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_power_mode_is_set_by_its_name(board: Path) -> None:
    assert power.modes(NVPMODEL) == {"15W": 0, "MAXN_SUPER": 2}
    power.set_mode("maxn_super", board / "nvpmodel.conf")
    assert (board / "calls").read_text() == "nvpmodel -m 2\n"


def test_unknown_power_mode_is_refused_by_name(board: Path) -> None:
    with pytest.raises(InstallError, match="15W, MAXN_SUPER"):
        power.set_mode("TURBO", board / "nvpmodel.conf")
    assert not (board / "calls").exists()


def test_power_unit_calls_what_there_is(board: Path, tmp_path: Path) -> None:
    (started,) = section("pilotfish-power.service", "Service")["ExecStart"]
    defaults = configparser.ConfigParser()
    defaults.optionxform = str
    defaults.read_string("[power]\n" + text("power.conf"))
    words = started.split()[1:]
    for key, value in {**defaults["power"], "CLOCKS": "yes"}.items():
        words = [word.replace(f"${{{key}}}", value) for word in words]
    subprocess.run([sys.executable, *words], check=True)
    assert (board / "calls").read_text() == "jetson_clocks \n"
