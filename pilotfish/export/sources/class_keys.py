"""Look up keys of a configuration by Llama's names, with the defaults of the model's class."""

from __future__ import annotations

from typing import Any

from pilotfish.export.architectures import Architecture
from pilotfish.export.architectures.architecture import REQUIRED
from pilotfish.export.sources.fields import Fields


class ClassKeys:
    """A configuration with the key names and defaults of its class.

    Args:
        fields: the file's keys and values.
        architecture: the class's entry, with key names and defaults.
    """

    def __init__(self, fields: Fields, architecture: Architecture) -> None:
        self.fields = fields
        self.architecture = architecture

    def class_key(self, key: str) -> str:
        """Return the class's name for one of Llama's keys."""
        return self.architecture.key_names.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the class has the key."""
        return key in self.architecture.keys and self.class_key(key) != ""

    def states(self, key: str) -> bool:
        """Whether the file has the key."""
        return self.class_key(key) in self.fields.values

    def default(self, key: str) -> Any:
        """Return the class's default for a key."""
        return self.architecture.keys[key]

    def raw(self, key: str) -> Any:
        """Return the file's value, or the class's default; None for null."""
        self.fields.mark_read(self.class_key(key))
        default = self.default(key)
        return self.fields.values.get(self.class_key(key), None if default is REQUIRED else default)

    def count(self, key: str, *, null: int | None = None, otherwise: int | None = None) -> int:
        """Return a count; `null` replaces a null in the file or in the default.

        `otherwise`: result if the class does not have the key; None if it has the key.
        """
        if otherwise is not None and not self.has(key):
            return otherwise
        default = self.default(key)
        stated = null if default is None else None if default is REQUIRED else default
        return self.fields.count(self.class_key(key), stated, null=null)

    def whole(self, key: str, *, otherwise: int = 0) -> int:
        """Return a whole number; `otherwise` if the class does not have the key."""
        if not self.has(key):
            return otherwise
        default: int = self.default(key)
        return self.fields.get(self.class_key(key), int, default)

    def number(self, key: str, *, otherwise: float = 1.0) -> float:
        """Return a number above 0; `otherwise` if the class does not have the key."""
        if not self.has(key):
            return otherwise
        return self.fields.positive(self.class_key(key), float(self.default(key)))

    def optional(self, key: str) -> float | None:
        """Return a number above 0; None if it is null or the class does not have the key."""
        if not self.has(key) or self.raw(key) is None:
            return None
        return self.fields.positive(self.class_key(key), self.default(key))

    def flag(self, key: str) -> bool:
        """Return a boolean; false if the class does not have the key."""
        return self.has(key) and self.fields.get(self.class_key(key), bool, bool(self.default(key)))

    def form_value(self, key: str) -> Any:
        """Return a key's value for `Architecture.vary`; only booleans are checked."""
        return self.flag(key) if isinstance(self.default(key), bool) else self.raw(key)
