"""What files and docs say of the daemons' settings is what the structs say."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from msgspec import Struct

from pilotfish.base.settings import Setting, settings
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.device_runtime.device_config import ServiceConfig
from pilotfish.edge_runtime.edge_config import EdgeConfig, NodeConfig

EXAMPLES = Path(str(resources.files("pilotfish"))) / "systemd"
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
DAEMONS = {"device": ServiceConfig, "edge": EdgeConfig, "worker": NodeConfig}
MODELS = {"device": "draft", "edge": "target", "worker": "target"}


def flat(struct: type[Struct]) -> Iterator[Setting]:
    """The settings that are flags, those of groups too."""
    for setting in settings(struct):
        if setting.group:
            yield from flat(setting.type)
        elif setting.meta.description:
            yield setting


def parsed(role: str, *words: str) -> Struct:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, DAEMONS[role])
    return from_args(parser.parse_args([f"--{MODELS[role]}=x", *words]), DAEMONS[role])


@pytest.mark.parametrize("role", DAEMONS)
def test_defaults_are_the_structs_and_within_their_own_bounds(role: str) -> None:
    numbers = [item for item in flat(DAEMONS[role]) if type(item.default) in (int, float)]
    values = parsed(role, *(f"--{item.flag}={item.default}" for item in numbers))
    assert values == parsed(role) == DAEMONS[role](**{MODELS[role]: Path("x")})


@pytest.mark.parametrize("role", DAEMONS)
def test_example_comments_out_what_holds_anyway(role: str) -> None:
    """``#sessions = 16`` in an example is the default, where there is one."""
    results = {item.flag: item for item in flat(DAEMONS[role])}
    commented = re.findall(r"^#([a-z-]+) = (\S+)", (EXAMPLES / f"{role}.toml").read_text(), re.M)
    assert commented
    for key, value in commented:
        default = results[key].default
        assert default is None or str(default) == value.strip('"'), key


@pytest.mark.parametrize("role", ["device", "edge"])
def test_operations_lists_what_a_reload_changes(role: str) -> None:
    pattern = rf"^\| {role} \| (the A?[^|]*) \| every other setting \|$"
    row = re.search(pattern, OPERATIONS.read_text(), re.M)
    assert row is not None
    live = {item.flag for item in flat(DAEMONS[role]) if item.extra.get("live")}
    assert set(re.findall(r"`([a-z-]+)`", row[1])) == live
