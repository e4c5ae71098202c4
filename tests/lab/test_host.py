"""Facts of the host and its power sensors, from a /sys and a /proc that lie on disk."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pilotfish.device_runtime import energy
from pilotfish.lab import host

# What a Jetson Orin Nano with JetPack 6 shows.
JETSON = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: ARMv8 Processor rev 1 (v8l)\n",
    "proc/meminfo": "MemTotal:        7802216 kB\nMemFree:         300 kB\n",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, BOARD: generic\nmore\n",
    "var/lib/nvpmodel/status": "pmode:0002",
    "etc/nvpmodel.conf": (
        "< PARAM TYPE=FILE NAME=CPU_ONLINE >\n< POWER_MODEL ID=0 NAME=15W >\n"
        "CPU_ONLINE CORE_0 1\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n< PM_CONFIG DEFAULT=1 >\n"
    ),
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "schedutil\n",
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_jetson_tells_what_it_is(tmp_path):
    result = host.facts(tree(tmp_path, JETSON))
    assert result["board"] == "NVIDIA Jetson Orin Nano Developer Kit"
    assert result["l4t"] == "# R36 (release), REVISION: 4.3, BOARD: generic"
    assert result["power_mode"] == "MAXN_SUPER"
    assert result["governor"] == "schedutil"
    assert result["cpu"] == "ARMv8 Processor rev 1 (v8l)"
    assert result["memory_bytes"] == 7802216 * 1024
    assert "gpu" not in result


def test_a_server_tells_what_it_is(tmp_path):
    files = {
        "sys/class/dmi/id/sys_vendor": "Supermicro\n",
        "sys/class/dmi/id/product_name": "SYS-1\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 3\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
    }
    result = host.facts(tree(tmp_path, files))
    assert result["board"] == "Supermicro SYS-1"
    assert result["gpu"] == "NVIDIA H200"
    assert result["governor"] == "performance, powersave"
    assert "power_mode" not in result


def test_a_mode_without_a_name_is_told_by_its_number(tmp_path):
    result = host.facts(tree(tmp_path, {"var/lib/nvpmodel/status": "pmode:0007\n"}))
    assert result["power_mode"] == "mode 7"


def test_what_is_not_there_is_absent(tmp_path):
    result = host.facts(tmp_path)
    assert {"kernel", "machine", "cpus", "python", "pilotfish", "packages"} == set(result)


def test_what_is_nonsense_is_absent(tmp_path):
    garbled = dict.fromkeys(JETSON, "\0\xff\n\n%")
    result = host.facts(tree(tmp_path, garbled))
    assert "power_mode" not in result
    assert "memory_bytes" not in result


def test_this_machine_has_facts_that_json_can_hold():
    result = host.facts()
    assert json.loads(json.dumps(result)) == result
    assert result["packages"]["numpy"]


# Power


def sensor(
    root: Path, device: str, channels: dict[int, tuple[str, str, str]], name: str = "ina3221"
):
    """An INA3221: label, millivolts and milliamperes of each channel."""
    files = {"name": name}
    for number, (label, millivolts, milliamperes) in channels.items():
        files[f"hwmon/hwmon1/in{number}_label"] = label
        files[f"hwmon/hwmon1/in{number}_input"] = millivolts
        files[f"hwmon/hwmon1/curr{number}_input"] = milliamperes
    files["hwmon/hwmon1/in7_label"] = "sum of shunt voltages"
    return tree(root / device, files)


def test_the_whole_modules_rail_is_taken_where_there_is_one(tmp_path):
    rails = {1: ("VDD_IN", "5000", "2000"), 2: ("VDD_CPU_GPU_CV", "5000", "400")}
    sensor(tmp_path, "1-0040", rails)
    result = energy.rails(tmp_path)
    assert energy.source(result) == "INA3221: VDD_IN"
    assert result[0].watts() == pytest.approx(10.0)


def test_otherwise_the_rails_are_added(tmp_path):
    sensor(tmp_path, "1-0040", {1: ("GPU", "19000", "1000"), 2: ("CPU", "19000", "500")})
    sensor(
        tmp_path, "1-0041", {1: ("DDR", "5000", "100"), 2: ("OFF", "nan", "0"), 3: ("NC", "0", "0")}
    )
    result = energy.rails(tmp_path)
    assert energy.source(result) == "INA3221: GPU + CPU + DDR"
    assert sum(rail.watts() for rail in result) == pytest.approx(29.0)


def test_other_chips_and_no_chips_are_no_sensors(tmp_path):
    sensor(tmp_path, "1-0048", {1: ("VDD_IN", "5000", "2000")}, name="tmp102")
    (tmp_path / "1-0050").mkdir()
    assert energy.rails(tmp_path) == []
    assert energy.rails(tmp_path / "nowhere") == []
    assert energy.source([]) is None
    with energy.Meter([]) as meter:
        pass
    assert meter.joules is None


def test_energy_is_power_over_time(tmp_path):
    sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    with energy.Meter(energy.rails(tmp_path), period_s=0.01) as meter:
        began = time.monotonic()
        time.sleep(0.6)
        slept = time.monotonic() - began
    assert meter.joules == pytest.approx(10.0 * slept, rel=0.2)


def test_energy_follows_power_that_changes(tmp_path):
    """Half the time 10 W and half the time 30 W."""
    current = (
        sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")}) / "hwmon/hwmon1/curr1_input"
    )
    with energy.Meter(energy.rails(tmp_path), period_s=0.005) as meter:
        times = [time.monotonic()]
        for milliamperes in ("2000", "6000"):
            name = current.with_name("next")
            name.write_text(milliamperes)
            name.replace(current)  # a reader sees the old or the new value, never half of one
            time.sleep(0.5)
            times.append(time.monotonic())
    low, high = times[1] - times[0], times[2] - times[1]
    assert meter.joules == pytest.approx(10 * low + 30 * high, rel=0.2)


def test_a_sensor_that_fails_meanwhile_gives_no_figure(tmp_path):
    root = sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    with energy.Meter(energy.rails(tmp_path), period_s=0.01) as meter:
        (root / "hwmon/hwmon1/curr1_input").unlink()
        time.sleep(0.1)
    assert meter.joules is None


def test_a_meter_ends_with_what_it_measures(tmp_path):
    sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    # if it were waited for, the test would be ended
    with pytest.raises(KeyError), energy.Meter(energy.rails(tmp_path), period_s=3600.0):
        raise KeyError
