"""Read the grammar that a request sets for its answer: OpenAI's ``response_format`` and
``text.format``, vLLM's ``structured_outputs``.

In: these fields. Out: a `Grammar`, or a `RefusalError`.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.messages import MAX_GRAMMAR

Grammatical = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)]


class _NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``json_schema``; name, description and ``strict`` have no effect."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A ``response_format`` without a constraint."""


class ObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A format of any JSON object, or of JSON by a schema (llama.cpp's addition)."""

    schema: msgspec.Raw = msgspec.Raw(b'{"type": "object"}')


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A format of JSON by a schema, as ``response_format`` has it."""

    json_schema: _NamedSchema


class FlatFormat(_NamedSchema, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A format of JSON by a schema, as ``text.format`` has it."""


Format: TypeAlias = TextFormat | ObjectFormat | SchemaFormat
FormatOfText: TypeAlias = TextFormat | ObjectFormat | FlatFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """VLLM's ``structured_outputs``; a request may set one of the fields."""

    json: msgspec.Raw = msgspec.Raw(b"null")
    json_object: Literal[True] | None = None
    regex: Grammatical | None = None
    choice: Annotated[list[Grammatical], msgspec.Meta(min_length=1, max_length=4096)] | None = None
    grammar: Grammatical | None = None


def grammar_of(
    format: Format | FormatOfText | None, structured: StructuredOutputs | None
) -> Grammar | None:
    """Return the answer's grammar; refuse a request that sets two."""
    grammars = []
    match format:
        case ObjectFormat(schema=schema):
            grammars.append(Grammar.from_schema(_text_of(schema)))
        case SchemaFormat(json_schema=named) | (FlatFormat() as named):
            grammars.append(Grammar.from_schema(_text_of(named.schema)))
    if structured is not None:
        if bytes(structured.json) != b"null":
            grammars.append(Grammar.from_schema(_text_of(structured.json)))
        if structured.json_object:
            grammars.append(Grammar.from_schema({"type": "object"}))
        if structured.regex is not None:
            grammars.append(Grammar("regex", structured.regex))
        if structured.choice is not None:
            grammars.append(Grammar.from_choices(structured.choice))
        if structured.grammar is not None:
            grammars.append(Grammar("lark", structured.grammar))
    if len(grammars) > 1:
        raise bad_request(
            "structured_outputs",
            "A request may set only one format for the answer: response_format (in /v1/responses "
            "text.format), or one field of structured_outputs.",
        )
    return grammars[0] if grammars else None


def _text_of(schema: msgspec.Raw) -> str:
    """Return a schema's text; the request has it as JSON, or as a string that contains JSON."""
    try:
        text = bytes(schema).decode("utf-8")
        return msgspec.json.decode(text, type=str) if text.startswith('"') else text
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise bad_request("json", f"The schema is not a valid JSON string: {error}.") from None
