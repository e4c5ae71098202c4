"""The table of what can be exported: in the docs as the code has it, and true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from pilotfish.export.architectures import ARCHITECTURES
from pilotfish.export.supported import markdown, supported

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
