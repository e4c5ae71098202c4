"""Write tests/data/tool_schemas.json: the schemas that zod and pydantic make of their types.

npm install zod && node tests/reference/make_zod_tools.mjs > zod.json
python -m tests.reference.make_tool_schemas zod.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pydantic

from tests.support.pydantic_types import schemas
from tests.support.tool_schemas import FILE


def main() -> None:
    """Put both together, with the versions that they were made with."""
    zod = json.loads(Path(sys.argv[1]).read_text())
    python = {"made": f"pydantic {pydantic.VERSION}", "types": schemas()}
    kinds = {"zod": zod, "pydantic": python}
    FILE.write_text("{\n" + ",\n".join(map(_written, kinds.items())) + "\n}\n")


def _written(message: tuple[str, dict[str, Any]]) -> str:
    """Write a library's schemas, a line a type."""
    library, schemas = message
    types = (f"{json.dumps(name)}: {json.dumps(item)}" for name, item in schemas["types"].items())
    made = f'"made": {json.dumps(schemas["made"])}, "types": {{\n'
    return f"{json.dumps(library)}: {{{made}" + ",\n".join(types) + "\n}}"


if __name__ == "__main__":
    main()
