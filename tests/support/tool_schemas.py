"""Schemas that libraries make of their types, as programs send them with tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "tool_schemas.json"


def tool_schemas() -> dict[str, dict[str, Any]]:
    """The schema of each type, by a library and the type."""
    return {
        f"{library} {name}": schema
        for library, info in json.loads(FILE.read_text()).items()
        for name, schema in info["types"].items()
    }
