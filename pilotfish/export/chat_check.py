"""Check a model's chat templates and end tokens before an export writes anything.

In: the model's vocabulary. Out: warnings, or an ExportError for an unusable template.
"""

from __future__ import annotations

import logging

import msgspec

from pilotfish.engines.engine_errors import TemplateError
from pilotfish.engines.vocabulary import Vocabulary, used_templates
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.huggingface_tokenizer import TEMPLATE_KEY

log = logging.getLogger("pilotfish.export")
_PLACES = (
    "name the end token by eos_token_id in generation_config.json (for other sources: in "
    "genai_config.json, or as a GGUF file's tokenizer.ggml.eot_token_id)"
)


def check_chat(vocabulary: Vocabulary) -> list[str]:
    """Check chat templates and end tokens; log and return the warnings, a sentence each.

    Raises:
        ExportError: if a chat template does not compile; the message names the template's line.
    """
    for name, source in used_templates(vocabulary.chat_templates).items():
        _check_template(msgspec.structs.replace(vocabulary, chat_template=source), f" {name}")
    _check_template(vocabulary, "")
    warnings = list(_end_warnings(vocabulary))
    for warning in warnings:
        log.warning("%s: %s", vocabulary.model, warning)
    return warnings


def _check_template(vocabulary: Vocabulary, name: str) -> None:
    try:
        _ = vocabulary.template
    except TemplateError as error:
        problem = str(error).replace("the chat template", f"the chat template{name}", 1)
        raise ExportError(
            f"{vocabulary.model}: {problem}. Correct the template, or export the model without "
            f"chats by --ignore-key {TEMPLATE_KEY}"
        ) from None


def _end_warnings(vocabulary: Vocabulary) -> list[str]:
    """List the warning, if any, that the model's answers may not end by themselves."""
    spell = vocabulary.tokenizer.piece
    mark = vocabulary.turn_mark
    if not vocabulary.eos_ids:
        hint = "" if mark is None else f" (the chat template puts {spell(mark)} after an answer)"
        return [
            f"no file names an end token{hint}, so answers end only at their maximum length: "
            f"{_PLACES}"
        ]
    if mark is None or mark in vocabulary.eos_ids:
        return []
    ends = ", ".join(map(spell, vocabulary.eos_ids))
    return [
        f"the chat template puts {spell(mark)} after an answer, but this token is not an end "
        f"token ({ends}), so answers may continue after it: {_PLACES}"
    ]
