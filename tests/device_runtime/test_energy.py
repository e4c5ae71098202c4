"""Energy as a device service counts it, with a sensor, without one, and with one that fails."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from pilotfish.device_runtime.energy import Watch, rails
from pilotfish.device_runtime.service.service_metrics import ServiceMetrics
from pilotfish.device_runtime.service.status import ServiceStatus
from tests.lab.test_host import sensor
from tests.support.service_facts import samples


def test_without_a_sensor_energy_is_absent():
    metrics = ServiceMetrics([])
    text = metrics.exposition().decode()
    assert "joules" not in text
    assert "watts" not in text
    assert ServiceStatus(drafter="d", lanes=1, energy=metrics.energy).snapshot()["energy"] is None
    metrics.close()


def test_energy_is_counted_while_the_service_runs(tmp_path):
    sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    began = time.monotonic()
    watch = Watch(rails(tmp_path), period_s=0.01).start()
    time.sleep(0.5)
    watch.close()
    assert watch.joules == pytest.approx(10.0 * (time.monotonic() - began), rel=0.2)
    assert watch.watts == pytest.approx(10.0)


def test_energy_is_exposed_as_a_counter(tmp_path):
    sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    metrics = ServiceMetrics(rails(tmp_path))
    awaited(lambda: metrics.energy.watts is not None)
    result = samples(metrics)
    assert result["pilotfish_power_watts"] == pytest.approx(10.0)
    assert result['pilotfish_energy_joules_total{source="INA3221: VDD_IN"}'] >= 0
    metrics.close()


def test_a_sensor_that_fails_for_a_while_costs_only_that_while(tmp_path):
    current = (
        sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")}) / "hwmon/hwmon1/curr1_input"
    )
    watch = Watch(rails(tmp_path), period_s=0.01).start()
    awaited(lambda: watch.joules)
    current.rename(current.with_name("away"))
    awaited(lambda: watch.watts is None)
    counted = watch.joules
    time.sleep(0.3)
    assert watch.joules == counted
    current.with_name("away").rename(current)
    awaited(lambda: watch.watts is not None)
    awaited(lambda: watch.joules > counted)
    # the gap of 0.3 s would have been 3 J
    assert watch.joules < counted + 2.5
    watch.close()


def awaited(condition, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
