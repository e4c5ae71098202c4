"""Families of models, by how they write calls and thoughts. A new one is a file and a line here."""

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat
from pilotfish.engines.chat_formats.gemma import GEMMA, GEMMA_4
from pilotfish.engines.chat_formats.granite import GRANITE
from pilotfish.engines.chat_formats.hermes import HERMES
from pilotfish.engines.chat_formats.llama import LLAMA
from pilotfish.engines.chat_formats.mistral import MISTRAL, MISTRAL_ARGS
from pilotfish.engines.chat_formats.phi import PHI
from pilotfish.engines.chat_formats.tools import Tool, Tools

__all__ = ["FAMILIES", "Calls", "ChatFormat", "Tool", "Tools", "chat_format_of"]

# The first that speaks a template is its family.
FAMILIES = (MISTRAL_ARGS, MISTRAL, GEMMA_4, GEMMA, GRANITE, PHI, LLAMA, HERMES)


def chat_format_of(template: str) -> ChatFormat:
    """Return the family that this chat template is of, by its source."""
    return next(family for family in FAMILIES if family.matches(template))
