"""``--config FILE``: read the flags of a daemon from a TOML file.

Each key of the file is a flag's long name, with dashes or underscores. ``true`` sets a flag that
takes no value, and ``false`` leaves this flag out. A list repeats a flag that may be repeated, and
is the value of a flag that takes A,B,…; any other flag takes no list. So the file and the command
line have the same names, defaults and checks. The command line takes precedence.
"""

import argparse
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pilotfish.base.errors import ConfigError
from pilotfish.base.prose import one_line
from pilotfish.base.reading import reading_file, without_bom
from pilotfish.cli.flags import reads_list, reads_quantity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_BYTES = 64 * 1024
_PLAIN = {str, int, float}
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class ConfiguredParser(argparse.ArgumentParser):
    """A parser that also reads flags from a file, if `config_option` was called."""

    reads_files = False  # set by `config_option`
    _file: Path | None = None

    def __init__(self, **options: Any) -> None:
        # argparse would accept `--conf FILE` as `--config`, but would not read the file
        super().__init__(**(options | {"allow_abbrev": False}))

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads of this one
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, the file's flags first, then the command line's."""
        words = list(sys.argv[1:] if args is None else args)
        self._file = _config_path(words) if self.reads_files else None
        if self._file is None:
            return super().parse_known_args(words, namespace)
        flags = list(_flags(self._file, self._option_string_actions))
        parsed, rest = super().parse_known_args([*flags, *words], namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        parsed.again = partial(self.parse_args, words)
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """End the program with this error; if a file was read, the error names the file."""
        if self._file is None:
            super().error(message)
        raise ConfigError(f"{self._file} (or a flag of the command line): {message}.")


def config_option(parser: ConfiguredParser, example: str, *, reloads: bool = True) -> None:
    """Add the option ``--config FILE``. example: a line of such a file, which the help shows.

    reloads: whether SIGHUP makes the command read the file again.
    """
    again = "; read again on SIGHUP" if reloads else ""
    parser.reads_files = True
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"a TOML file that sets more of these flags ({example}, …){again}",
    )


def reread_args(args: argparse.Namespace) -> argparse.Namespace:
    """Parse the same command line again with the file's present content.

    Raises `ConfigError` if the file is broken.
    """
    reread = getattr(args, "again", None)
    reparsed: argparse.Namespace = args if reread is None else reread()
    return reparsed


def _config_path(words: Sequence[str]) -> Path | None:
    """Return the file that the last ``--config`` option names; None without this option."""
    path = None
    for at, word in enumerate(words):
        if word == "--config" and at + 1 < len(words):
            path = Path(words[at + 1])
        elif word.startswith("--config="):
            path = Path(word.partition("=")[2])
    return path


def _flags(path: Path, options: Mapping[str, argparse.Action]) -> Iterator[str]:
    """Yield the words of a file's settings. options: argparse's options by flag."""
    for key, value in read_settings(path).items():
        flag = "--" + key.replace("_", "-")
        if flag == "--config":
            raise ConfigError(f"{path}: a configuration file cannot name another one.")
        # a `help` key would end the daemon, on SIGHUP too
        option = options.get(flag) if _KEY.fullmatch(key) and flag != "--help" else None
        if option is None:
            raise ConfigError(f"{path}: {key!r} is not a setting of this command.")
        words = _words(flag, value, option)
        if words is None:
            raise ConfigError(
                f"{path}: {key} is {_describe(value)}; it must be {_describe_expected(option)}."
            )
        if any("\0" in word for word in words):
            raise ConfigError(
                f"{path}: the value of {key} contains a NUL character, which is not allowed."
            )
        yield from words


def _words(flag: str, value: Any, option: argparse.Action) -> list[str] | None:
    """Return the words that a setting is on the command line; None if it has the wrong type."""
    if isinstance(value, bool):
        takes_none = option.nargs in (0, "?")
        return ([flag] if value else []) if takes_none else None
    if isinstance(value, list):
        if not _takes_several(option) or not all(type(each) in _PLAIN for each in value):
            return None
        if isinstance(option, argparse._AppendAction):
            return [f"{flag}={each}" for each in value]
        return [f"{flag}={','.join(map(str, value))}"] if value else None
    if type(value) not in _PLAIN or option.nargs == 0:
        return None
    return [f"{flag}={value}"]


def _takes_several(option: argparse.Action) -> bool:
    return isinstance(option, argparse._AppendAction) or reads_list(option.type)


def _describe(value: Any) -> str:
    """Describe a value in TOML's words."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {one_line(repr(value), 60)}"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, list):
        plain = all(type(each) in _PLAIN for each in value)
        return ("a list" if value else "an empty list") if plain else "a list of other values"
    return "a table" if isinstance(value, dict) else f"the {type(value).__name__} {value}"


def _describe_expected(option: argparse.Action) -> str:
    """Describe what the value of an option may be."""
    if option.nargs == 0:
        return "true or false"
    like = option.metavar or option.dest.upper()
    if isinstance(option, argparse._AppendAction):
        return f"a text, a number, or a list of these, each as {like}"
    if reads_list(option.type):
        return f"a list of texts or numbers, or a text such as {like}"
    either = ", or true or false" if option.nargs == "?" else ""
    kind = "text with a unit" if reads_quantity(option.type) else "text or number"
    return f"one {kind} ({like}){either}"


def read_settings(path: Path) -> dict[str, Any]:
    """Read a configuration file: key → value; raise `ConfigError` if it cannot be used."""
    with reading_file(lambda problem: ConfigError(f"{path} cannot be read: {problem}.")):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # the opening of a pipe would block
            raise ConfigError(f"{path} is not a file.")
        with path.open("rb") as file:
            if status.st_mode & stat.S_IWOTH:
                raise ConfigError(
                    f"{path} is writable by every user of this machine: run `chmod o-w {path}`."
                )
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ConfigError(f"{path} is longer than {_MAX_BYTES:,} bytes.")
    with reading_file(lambda problem: ConfigError(f"{path} is not valid TOML: {problem}.")):
        table: dict[str, Any] = tomllib.loads(without_bom(text).decode())
    return table
