"""`--config FILE`: the flags of a daemon in a TOML file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from msgspec import Meta

from pilotfish.base.errors import ConfigError
from pilotfish.cli.configuration import ConfiguredParser, config_option, reread_args
from pilotfish.cli.flags import bounded, name_list
from pilotfish.cli.options import int_between
from pilotfish.cli.quantities import size, span


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser()
    actions = top.add_subparsers(required=True, parser_class=ConfiguredParser)
    serve = actions.add_parser("serve")
    config_option(serve, "sessions = 3")
    serve.add_argument("--target", required=True, type=Path)
    serve.add_argument("--sessions", type=int_between(1), default=16)
    serve.add_argument("--idle-s", type=float, default=60.0)
    serve.add_argument("--quiet", action="store_true")
    serve.add_argument("--also", action="append", default=[])
    serve.add_argument("--names", type=name_list)
    serve.add_argument("--keys", nargs="?", const="default")
    serve.add_argument("--name", metavar="NAME")
    serve.add_argument("--every", type=span, metavar="TIME")
    serve.add_argument("--most", type=bounded(size, Meta(gt=0)), metavar="SIZE")
    other = actions.add_parser("other")
    other.add_argument("--target")
    return top


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "edge.toml"
    path.write_text(
        'target = "model"\nsessions = 3\nidle_s = 1.5\nquiet = true\nalso = ["a", "--b"]\n'
    )
    return path


def test_keys_are_flags_and_pass_their_validation(file: Path) -> None:
    args = parser().parse_args(["serve", "--config", str(file)])
    assert args.target == Path("model")
    assert (args.sessions, args.idle_s, args.quiet, args.also) == (3, 1.5, True, ["a", "--b"])


@pytest.mark.parametrize("before", [True, False])
def test_the_command_line_wins_wherever_it_stands(file: Path, before: bool) -> None:
    named, ours = [f"--config={file}"], ["--sessions", "5"]
    words = ours + named if before else named + ours
    assert parser().parse_args(["serve", *words]).sessions == 5


def test_false_leaves_a_flag_out(file: Path) -> None:
    file.write_text('target = "model"\nquiet = false\n')
    assert parser().parse_args(["serve", "--config", str(file)]).quiet is False


def test_a_list_is_all_values_of_a_flag_that_takes_several(file: Path) -> None:
    """argparse alone would keep the last value."""
    file.write_text('target = "model"\nnames = ["a", "b"]\n')
    assert parser().parse_args(["serve", "--config", str(file)]).names == ["a", "b"]


def test_a_list_is_not_one_of_its_values(file: Path) -> None:
    file.write_text('target = "model"\nsessions = [3, 4]\n')
    with pytest.raises(ConfigError, match=r"sessions is a list; it must be one .*number"):
        parser().parse_args(["serve", "--config", str(file)])


def test_read_again_it_is_as_it_stands_now(file: Path) -> None:
    args = parser().parse_args(["serve", "--config", str(file), "--idle-s", "9"])
    file.write_text('target = "other"\nsessions = 4\n')
    fresh = reread_args(args)
    assert (fresh.target, fresh.sessions, fresh.idle_s) == (Path("other"), 4, 9.0)
    file.write_text("target = \n")
    with pytest.raises(ConfigError, match=r"edge\.toml is not valid TOML"):
        reread_args(args)
    assert reread_args(parser().parse_args(["serve", "--target", "x"])).target == Path("x")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("target = 'm'\nsesions = 3\n", "'sesions' is not a setting of this command"),
        ("target = 'm'\nsessions = 0\n", "0 is not between"),
        ("target = 'm'\nsessions = 'many'\n", "invalid"),
        ("sessions = 3\n", "required: --target"),
        ("[edge]\ntarget = 'm'\n", "'edge' is not a setting of this command"),
        ("target = 'm'\nbogus = ['a']\n", "'bogus' is not a setting of this command"),
        ("target = 'm'\nbogus = true\n", "'bogus' is not a setting of this command"),
        ("target = 'm'\nbogus = false\n", "'bogus' is not a setting of this command"),
        ("target = 'm'\nevery = ['5min']\n", r"every is a list; .* one text with a unit \(TIME"),
        ("target = 'm'\nevery = true\n", r"every is true; .* one text with a unit \(TIME"),
        ("target = 'm'\nmost = ['1MB']\n", r"most is a list; .* one text with a unit \(SIZE"),
        ("target = ['m', 'n']\n", r"target is a list; it must be one text or number \(TARGET\)"),
        ("target = ['m']\n", "target is a list; it must be one text"),
        ("target = []\n", "target is an empty list; it must be one text"),
        ("target = 'm'\nsessions = true\n", "sessions is true; it must be one text or number"),
        ("target = 'm'\nsessions = false\n", "sessions is false; it must be one text or number"),
        ("target = 'm'\nsessions = 1979-05-27\n", "sessions is the date 1979-05-27; it must be"),
        ("target = 'm'\nname = 07:32:00\n", r"name is the time 07:32:00; .* \(NAME\)"),
        ("target = 'm'\nname = {a = 1}\n", "name is a table; it must be one text"),
        ("target = 'm'\nquiet = 'yes'\n", "quiet is the text 'yes'; it must be true or false"),
        ("target = 'm'\nquiet = 1\n", "quiet is the number 1; it must be true or false"),
        ("target = 'm'\nquiet = [true]\n", "quiet is a list.*; it must be true or false"),
        ("target = 'm'\nnames = []\n", "names is an empty list; it must be a list of texts"),
        ("target = 'm'\nnames = [['a']]\n", "names is a list of other values; it must be a list"),
        ("target = 'm'\nalso = [true]\n", "also is a list of other values; it must be a text"),
        ("target = 'm'\nkeys = ['a']\n", "keys is a list; .* or true or false"),
        ("config = 'more.toml'\n", "cannot name another"),
        ("target = 'm'\nhelp = true\n", "'help' is not a setting"),
        ("target = 'm'\n'' = true\n", "'' is not a setting"),
        ("target = 'm'\n'-' = true\n", "'-' is not a setting"),
        ("target = 'm'\n'sessions=2' = true\n", "'sessions=2' is not a setting"),
        ("target = 'm'\nhel = true\n", "'hel' is not a setting of this command"),
        ("target = 'm\n", "not valid TOML"),
        ("x = '" + "y" * 70_000 + "'\n", "longer than"),
        (b"\xff", "not valid TOML"),
    ],
)
def test_mistakes_name_the_file(file: Path, text: str | bytes, complaint: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=complaint) as caught:
        parser().parse_args(["serve", "--config", str(file)])
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_anyone_may_write_is_refused(file: Path) -> None:
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        parser().parse_args(["serve", "--config", str(file)])


def test_flags_have_no_abbreviations(file: Path) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--target", "m", "--conf", str(file)])


@pytest.mark.parametrize("name", ["missing.toml", ".", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot be read|not a file"):
        parser().parse_args(["serve", "--config", str(tmp_path / name)])


def test_without_a_file_argparse_speaks_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve"])
    assert "--target" in capsys.readouterr().err
    assert parser().parse_args(["other", "--target", "--config"[2:]]).target == "config"
