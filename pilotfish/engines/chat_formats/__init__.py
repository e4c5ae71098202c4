"""The chat formats of model families. To add a format, add a file, and a line here."""

from pilotfish.engines.chat_formats.chat_format import Calls, ChatFormat
from pilotfish.engines.chat_formats.gemma import GEMMA, GEMMA_4
from pilotfish.engines.chat_formats.granite import GRANITE
from pilotfish.engines.chat_formats.hermes import HERMES
from pilotfish.engines.chat_formats.llama import LLAMA
from pilotfish.engines.chat_formats.mistral import MISTRAL, MISTRAL_ARGS
from pilotfish.engines.chat_formats.phi import PHI
from pilotfish.engines.chat_formats.tools import Tool, Tools

__all__ = ["CHAT_FORMATS", "Calls", "ChatFormat", "Tool", "Tools", "chat_format_of"]

# The first format that matches a template is used.
CHAT_FORMATS = (MISTRAL_ARGS, MISTRAL, GEMMA_4, GEMMA, GRANITE, PHI, LLAMA, HERMES)


def chat_format_of(template: str) -> ChatFormat:
    """Return the chat format of this chat template, recognised by its source."""
    return next(chat_format for chat_format in CHAT_FORMATS if chat_format.matches(template))
