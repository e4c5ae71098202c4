"""The radio's signal: outputs of mmcli, and an mmcli that fails, hangs or is absent.

The samples have the form of outputs of mmcli 1.20 that are public, for example in the tests of
github.com/iqrfsdk/iqrf-gateway-webapp (with a decimal comma, by the locale); the values are ours.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from pilotfish.base.errors import InterruptedGenerationError
from pilotfish.lab.field.watch import radio
from pilotfish.lab.field.watch.radio import modem_signal, read_signal

ABSENT = {
    "5g": {"error-rate": "--", "rsrp": "--", "rsrq": "--", "snr": "--"},
    "gsm": {"error-rate": "--", "rssi": "--"},
    "lte": {"error-rate": "--", "rsrp": "--", "rsrq": "--", "rssi": "--", "snr": "--"},
    "refresh": {"rate": "0"},
    "umts": {"ecio": "--", "error-rate": "--", "rscp": "--", "rssi": "--"},
}


def described(state: str = "connected", technologies: tuple[str, ...] = ("lte",)) -> bytes:
    generic = {"access-technologies": technologies, "state": state}
    network = {"operator-code": "26202", "operator-name": "Example Mobile"}
    return json.dumps({"modem": {"3gpp": network, "generic": generic}}).encode()


def measured(**technologies: dict[str, str]) -> bytes:
    return json.dumps({"modem": {"signal": {**ABSENT, **technologies}}}).encode()


def test_a_modem_on_lte() -> None:
    lte = {"error-rate": "--", "rsrp": "-104.00", "rsrq": "-14.00", "rssi": "-69.00", "snr": "2.00"}
    assert modem_signal(described(), measured(lte=lte)) == {
        "source": "ModemManager",
        "technology": "lte",
        "operator": "Example Mobile",
        "operator_code": "26202",
        "dbm": -104.0,
        "dbm_of": "rsrp",
        "measured_on": "lte",
        "rsrp_dbm": -104.0,
        "rsrq_db": -14.0,
        "rssi_dbm": -69.0,
        "snr_db": 2.0,
    }


def test_the_newest_technology_counts_and_a_comma_is_a_point() -> None:
    newest = {"rsrp": "-91,50", "rsrq": "--", "snr": "11,0"}
    measures = measured(**{"5g": newest, "lte": {"rsrp": "-104.00"}})
    signal = modem_signal(described(technologies=("lte", "5gnr")), measures)
    assert signal is not None
    assert (signal["dbm"], signal["snr_db"], signal["technology"]) == (-91.5, 11.0, "lte+5gnr")
    assert "rsrq_db" not in signal


@pytest.mark.parametrize("text", ["--", "", "nan", "inf", "-999.00", "12", "1e9", "\x00", "-9_0"])
def test_a_value_that_cannot_be_is_left_out(text: str) -> None:
    signal = modem_signal(described(), measured(lte={"rsrp": text, "rssi": "-69.00"}))
    assert signal is not None
    assert "dbm" not in signal


def test_measures_that_were_never_set_up_leave_the_technology() -> None:
    signal = modem_signal(described(), measured())
    assert signal is not None
    assert signal["technology"] == "lte"
    assert "dbm" not in signal
    assert modem_signal(described(), None) == signal


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"\xff",
        b"error: couldn't find modem",
        b"[]",
        b'{"modem":null}',
        b'{"modem":{"generic":[]}}',
        b"[" * 100_000,
        described("registered"),
        described(state="--"),
    ],
)
def test_no_modem_that_is_connected(output: bytes) -> None:
    assert modem_signal(output, measured()) is None


def test_names_are_short_and_printable() -> None:
    network = {"operator-name": "A\x1b[31m\n" + "x" * 1000, "operator-code": "--"}
    output = json.dumps({"modem": {"3gpp": network, "generic": {"state": "connected"}}}).encode()
    signal = modem_signal(output, None)
    assert signal is not None
    assert str(signal["operator"]).startswith("A[31mx")
    assert len(str(signal["operator"])) == 64
    assert "operator_code" not in signal


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(programs: Path, *lines: str) -> None:
    mmcli = programs / "mmcli"
    mmcli.write_text("\n".join([f"#!{sys.executable}", "import sys, time", *lines]))
    mmcli.chmod(0o755)


@pytest.fixture
def wlan(tmp_path: Path) -> Path:
    source = tmp_path / "wireless"
    source.write_text("headings\nheadings\n wlan0: 0000   54.  -56.  -256        0      0\n")
    return source


def test_a_real_process_gives_both_outputs(programs: Path, wlan: Path) -> None:
    outputs = {True: measured(lte={"rsrp": "-95.0"}).decode(), False: described().decode()}
    install(programs, f"print({outputs!r}['--signal-get' in sys.argv])")
    signal = read_signal(wlan)
    assert signal is not None
    assert (signal["dbm"], signal["dbm_of"], signal["wlan_dbm"]) == (-95.0, "rsrp", -56.0)


def test_without_modemmanager_wlan_counts(programs: Path, wlan: Path) -> None:
    assert read_signal(wlan) == {"source": "WLAN", "dbm": -56.0, "dbm_of": "level"}
    assert read_signal(programs / "none") is None


@pytest.mark.parametrize("line", ["sys.exit(1)", "time.sleep(60)", "print('x' * (1 << 20))"])
def test_a_faulty_mmcli_is_as_none(
    programs: Path, wlan: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radio, "_LIMIT_S", 0.5)
    install(programs, line)
    begun_s = time.monotonic()
    signal = read_signal(wlan)
    assert signal is not None
    assert signal["source"] == "WLAN"
    assert time.monotonic() - begun_s < 5.0


def test_an_endless_output_is_not_read_to_its_end(
    programs: Path, wlan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radio, "_LIMIT_S", 20.0)
    pid = programs / "pid"
    install(
        programs,
        f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))",
        "while True: sys.stdout.write('x' * 65536); sys.stdout.flush(); time.sleep(0.01)",
    )
    begun_s = time.monotonic()
    signal = read_signal(wlan)
    assert signal is not None
    assert signal["source"] == "WLAN"
    assert time.monotonic() - begun_s < 10.0
    assert not Path("/proc", pid.read_text()).exists()


def test_a_wait_for_the_modem_can_be_ended(
    programs: Path, wlan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radio, "_LIMIT_S", 20.0)
    pid = programs / "pid"
    install(
        programs,
        f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))",
        "sys.stdout.write('{'); sys.stdout.flush(); time.sleep(60)",
    )

    def end() -> None:
        if pid.exists() and pid.read_text():
            raise InterruptedGenerationError("The watch ends.")

    with pytest.raises(InterruptedGenerationError):
        read_signal(wlan, on_wait=end)
    assert not Path("/proc", pid.read_text()).exists()
