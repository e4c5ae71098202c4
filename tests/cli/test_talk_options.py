"""Tools and thoughts on the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pilotfish.base.errors import ConfigError
from pilotfish.cli.generation import talk_of, talk_options
from tests.support.calling import TOOLS


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    talk_options(parser)
    return parser.parse_args(flags)


def test_tools_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    info = talk_of(parsed("--tools", str(file), "--tool-choice", "move", "--no-think"))
    assert info == {"tools": TOOLS, "tool_choice": "move", "thinking": False}
    assert talk_of(parsed()) == {"tool_choice": None, "thinking": None}


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", "[" * 100_000, '"x"', None])
def test_a_file_that_holds_none(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "tools.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"tools\.json"):
        talk_of(parsed("--tools", str(file)))
