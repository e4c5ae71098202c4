"""The table of what can be exported: in the docs as the code has it, and true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.supported import TRANSFORMERS, TREES, SupportedModel, supported

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_docs_have_the_table_of_the_code() -> None:
    table = re.search(r"<!-- supported -->\n(.*?)\n<!-- end -->", DOCS.read_text("utf-8"), re.S)
    assert table is not None
    assert table[1] == markdown(supported())


def test_the_command_lists_every_class() -> None:
    command = [sys.executable, "-m", "pilotfish", "export", "list", "--supported"]
    done = subprocess.run([*command, "--json"], capture_output=True, check=True)
    listed = json.loads(done.stdout)
    assert [each["model_type"] for each in listed] == list(ARCHITECTURES)
    by_type = {each["model_type"]: each for each in listed}
    assert "opset17" not in by_type["qwen3_5_text"]["dialects"]
    assert by_type["lfm2"]["drafts"] == "chains"
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "gemma3_text" in shown


def markdown(models: Sequence[SupportedModel]) -> str:
    """Format the table of docs/models.md."""
    lines = [
        "| `model_type` | models | dialects | token trees | stages | GGUF |",
        "|---|---|---|---|---|---|",
    ]
    for model in models:
        marks = (model.drafts == TREES, model.stages, model.gguf)
        cells = (
            f"`{model.model_type}`",
            model.models,
            ", ".join(model.dialects),
            *("✓" if mark else "–" for mark in marks),
        )
        lines.append(f"| {' | '.join(cells)} |")
    precisions = "; ".join(
        f"{name}: {', '.join(dialect.precisions)}" for name, dialect in DIALECTS.items()
    )
    told = f"All give hidden states. Tested against transformers {TRANSFORMERS}."
    return "\n".join([*lines, "", f"Precisions: {precisions}. {told}"])
