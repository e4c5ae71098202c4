"""Typed access to a configuration, with a record of the keys that were read.

In: a JSON object, or the metadata of a GGUF file's architecture. The record finds keys that we do
    not implement: without it, such a model would run, but compute something else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pilotfish.export.export_errors import ExportError

T = TypeVar("T", int, float, bool, str)
MAX_COUNT = 2**31 - 1
MAX_FLOAT = 1e38  # numbers of graphs are float32
MOST_NAMED = 20  # maximum number of keys listed in one error
MAX_SHOWN = 80  # maximum characters of a value in an error


class Fields:
    """Typed access to `values`; each ExportError names the file and the key.

    Args:
        values: the decoded object.
        where: path of the file, for errors.
        prefix: what precedes a key in its full name ("rope_scaling.", "llama.").
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self._read: set[str] = set()
        self._tables: dict[str, Fields] = {}

    def get(self, key: str, kind: type[T], default: T | None = None, *, null: T | None = None) -> T:
        """Return the value of `key`; `default` if it is absent, `null` if it is null.

        Raises:
            ExportError: if the value has another type, or if it is absent without `default` or null
            without `null`.
        """
        self._read.add(key)
        value = self.values.get(key, default)
        if value is None:
            value = null
        if value is None and key not in self.values:
            raise self.error(f"{self.prefix}{key} is missing")
        if type(value) in (int, float) and not abs(value) <= MAX_FLOAT:
            raise self.error(
                f"{self.prefix}{key} is {format_value(value)}, but must be below {MAX_FLOAT:.0e}"
            )
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(
                f"{self.prefix}{key} is {format_value(value)}, but must be of type {kind.__name__}"
            )
        return value

    def mark_read(self, key: str) -> None:
        """Mark a key as read."""
        self._read.add(key)

    def count(self, key: str, default: int | None = None, *, null: int | None = None) -> int:
        """Return a count of at least one; see `get`."""
        value = self.get(key, int, default, null=null)
        if not 1 <= value <= MAX_COUNT:
            raise self.error(
                f"{self.prefix}{key} is {format_value(value)}, but must be a count of 1 or more"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above zero; see `get`."""
        value = self.get(key, float, default)
        if not value > 0:
            raise self.error(f"{self.prefix}{key} is {value}, but must be above 0")
        return value

    def items(self, key: str) -> list[Any] | None:
        """Return the list under `key`; None if it is absent or null."""
        self._read.add(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(f"{self.prefix}{key} is {format_value(value)}, but must be a list")
        return value

    def table(self, key: str) -> Fields:
        """Return the object under `key`, empty if absent or null.

        Its unread keys are refused, too.
        """
        self._read.add(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{self.prefix}{key} is {format_value(value)}, but must be an object")
        if key not in self._tables:
            self._tables[key] = Fields(value or {}, self.where, f"{self.prefix}{key}.")
        return self._tables[key]

    def unread_keys(self) -> Iterator[tuple[str, Any]]:
        """Yield full name and value of each key that was not read."""
        for key, value in self.values.items():
            if key not in self._read:
                yield f"{self.prefix}{key}", value
        for table in self._tables.values():
            yield from table.unread_keys()

    def unknown_keys(
        self,
        inert: Collection[str],
        neutral: Mapping[str, Collection[Any]],
        ignored: Collection[str],
    ) -> list[str]:
        """Return the full names of unread keys of which nothing is known.

        Args:
            inert: full names of keys that never have an effect on the model's output.
            neutral: full name of a key → values with which the key has no effect.
            ignored: full names of keys that the user chose to ignore.

        Raises:
            ExportError: if a key has a value with an effect, or cannot be ignored.
        """
        unread = dict(self.unread_keys())
        for name in ignored:
            if name not in unread:
                raise self.error(
                    f"the key {name} cannot be ignored: the file lacks it, or the model "
                    "depends on it"
                )
        unknown = []
        for name, value in unread.items():
            if name in ignored or name in inert or _is_neutral(value, neutral.get(name, ())):
                continue
            if name in neutral:
                accepted = [each for each in neutral[name] if _is_alike(value, each)]
                listed = " or ".join(map(repr, accepted or neutral[name]))
                raise self.error(
                    f"{name} is {format_value(value)}, but only "
                    f"{listed or 'a file without the key'} is supported"
                )
            unknown.append(name)
        return unknown

    def unknown(self, names: Sequence[str], why: str = "") -> ExportError:
        """Build an error about unknown keys; `why` is a sentence before the advice."""
        some = [format_value(name, quoted=False) for name in names[:MOST_NAMED]]
        more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
        return self.error(
            f"unknown keys: {', '.join(some)}{more}. {why}The exported model might compute "
            "something else. If the keys have no effect on the text, ignore them by "
            "--ignore-key " + " --ignore-key ".join(some)
        )

    def error(self, problem: str) -> ExportError:
        """Build an error about this object."""
        return ExportError(f"{self.where}: {problem}")


def format_value(value: Any, *, quoted: bool = True) -> str:
    """Format a file's value for an error: on one line, of bounded length."""
    text = repr(value) if quoted or not str(value).isprintable() else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _is_alike(value: Any, accepted: Any) -> bool:
    """Whether an error about `value` names `accepted`: None, and values of the same kind."""
    kinds = [float if type(each) is int else type(each) for each in (value, accepted)]
    return accepted is None or kinds[0] is kinds[1]


def _is_neutral(value: Any, accepted: Collection[Any]) -> bool:
    """Whether a value equals one of `accepted`, where booleans differ from 0 and 1."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in accepted
    )
