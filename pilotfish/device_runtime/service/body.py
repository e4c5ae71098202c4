"""Read the body of a request that asks for an answer: JSON in, one struct out, in one decode.

In:  the bytes of a body, and the service's default `Request`. Out: the body's fields, and the
     request that they state, or a `RefusalError` that names the field at fault.

A route declares a subclass of `BodyFields` with its own fields. `read_body` adds the options of
`wire.request.Request` and, in the object ``pilotfish``, options of protocol and drafter and the
protocols' own options. If this object names a protocol, the service's defaults for its other
options do not apply. If it sets any option of ``auto``, none of the service's defaults for ``auto``
apply. A body may set one grammar for its answer: by OpenAI's ``response_format`` or
``text.format``, or by vLLM's ``structured_outputs``.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    cast,
    get_type_hints,
)

import msgspec
from msgspec import structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.reading import without_bom
from pilotfish.base.settings import settings
from pilotfish.device_runtime.default_temperature import with_default_temperature
from pilotfish.device_runtime.plan import Auto, expect_effective
from pilotfish.device_runtime.service.prompts import (
    bad_value,
    present_fields,
    refuse_unless_neutral,
    unknown_name,
)
from pilotfish.device_runtime.service.refusal import RefusalError, bad_request
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.messages import MAX_GRAMMAR
from pilotfish.wire.protocols import ProtocolOptions, option_types
from pilotfish.wire.request import AUTO, AutoOptions, Request, StopTexts

_ABSENT = msgspec.Raw()

Values: TypeAlias = Mapping[str, tuple[object, ...]]  # unsupported field → values without effect
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


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored


class BodyFields(msgspec.Struct, kw_only=True):
    """The fields of a body that all routes share, without those of `Request`.

    inert: fields that are ignored, since they cannot change a text. neutral: unsupported fields
    that would change a text, with their values without effect; only these are accepted. pilotfish:
    the object with the options of protocol and drafter.
    """

    inert: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Values] = {}

    model: str | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: str | StopTexts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    pilotfish: Any = None


_Kind = TypeVar("_Kind", bound=BodyFields)
_Field = tuple[str, Any, Any]


def _optional(kind: type[msgspec.Struct], names: Iterable[str]) -> Iterator[_Field]:
    """Yield the fields of these names, which a body may leave out or set to null."""
    hints = get_type_hints(kind, include_extras=True)
    return ((name, hints[name] | None, None) for name in names)


def _names(kind: type[msgspec.Struct], place: str) -> tuple[str, ...]:
    """Return the options that HTTP has at this place; see `wire.request`."""
    return tuple(each.name for each in settings(kind) if each.extra.get("http") == place)


_IN_BODY: Final = _names(Request, "body")
_IN_OBJECT: Final = _names(Request, "pilotfish")
_OF_AUTO: Final = _names(AutoOptions, "pilotfish")


@cache
def _body_type(kind: type[_Kind], options: tuple[type[ProtocolOptions], ...]) -> type[_Kind]:
    """Return the type of a route's whole bodies. options: the types of the protocols' options."""
    pilotfish = msgspec.defstruct(
        "Pilotfish",
        [
            *_optional(Request, _IN_OBJECT),
            *_optional(AutoOptions, _OF_AUTO),
            *(
                each
                for protocol in options
                for each in _optional(protocol, protocol.__struct_fields__)
            ),
        ],
        forbid_unknown_fields=True,
    )
    undecoded: list[_Field] = [
        (name, msgspec.Raw, _ABSENT) for name in dict.fromkeys((*kind.neutral, *kind.inert))
    ]
    fields = [*_optional(Request, _IN_BODY), *undecoded, ("pilotfish", pilotfish | None, None)]
    whole = msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True
    )
    return cast(type[_Kind], whole)


def read_body(body: bytes, kind: type[_Kind]) -> _Kind:
    """Read a body; an unknown field, or a value of another type, ends decoding at once."""
    try:
        fields: _Kind = msgspec.json.decode(
            without_bom(body), type=_body_type(kind, option_types())
        )
    except msgspec.ValidationError as error:
        message = str(error)
        if message.startswith("Expected `object`") and " - at `$" not in message:
            raise _malformed(error) from None
        if unknown_name(error) is None:
            _refuse_unsupported(body, kind)
        raise bad_value(error, message) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(error) from None
    except RecursionError:
        raise RefusalError(400, "The body is nested too deeply.", code="malformed") from None
    refuse_unless_neutral(present_fields(fields, kind.neutral), kind.neutral)
    return fields


def _refuse_unsupported(body: bytes, kind: type[BodyFields]) -> None:
    """Refuse a faulty body for its unsupported fields, which may be the cause of the fault.

    For example, a body for /v1/responses with ``prompt`` has no ``input``.
    """
    absent: list[_Field] = [(name, msgspec.Raw, _ABSENT) for name in kind.neutral]
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = msgspec.json.decode(without_bom(body), type=msgspec.defstruct("Neutral", absent))
        refuse_unless_neutral(present_fields(fields, kind.neutral), kind.neutral)


def _malformed(error: Exception) -> RefusalError:
    return RefusalError(400, f"The body is not a JSON object: {error}.", code="malformed")


def request_of(
    body: BodyFields, defaults: Request, format: Format | FormatOfText | None
) -> Request:
    """Return the request that a body states. defaults: the service's own options."""
    changes = _present(body, _IN_BODY)
    if (grammar := _grammar_of(format, body.structured_outputs)) is not None:
        changes["grammar"] = grammar
    if body.stop is not None:
        changes["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    request = structs.replace(defaults, **changes)
    if body.pilotfish is not None:
        request = _with_object(request, body.pilotfish)
    return with_default_temperature(request)


def _grammar_of(
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


def _present(fields: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of these names that are neither absent nor null."""
    return {name: value for name in names if (value := getattr(fields, name)) is not None}


def _with_object(request: Request, fields: msgspec.Struct) -> Request:
    """Return the request with the options that the object ``pilotfish`` sets."""
    changes, auto = _present(fields, _IN_OBJECT), _present(fields, _OF_AUTO)
    shared = {*_IN_OBJECT, *_OF_AUTO}
    protocol_options = _present(
        fields, [name for name in fields.__struct_fields__ if name not in shared]
    )
    protocol = changes.get("protocol")
    if protocol is not None:
        changes = {name: getattr(_DEFAULTS, name) for name in _IN_OBJECT} | changes
    if protocol not in (None, AUTO):
        try:
            expect_effective(protocol, protocol_options)
        except UnsupportedError as error:
            raise bad_request("pilotfish", str(error)) from None
        if auto:
            raise bad_request(
                "pilotfish",
                f"{', '.join(_OF_AUTO[:-1])} and {_OF_AUTO[-1]} can only be used with protocol "
                "auto.",
            )
    elif auto or protocol == AUTO:
        changes |= {"protocol": AUTO, "auto": Auto(**auto)}
    for name, other in (("window", "expansion"), ("expansion", "window")):
        if name in changes:  # it replaces the service's shape of windows
            changes.setdefault(other, None)
    return structs.replace(request, **changes, options={**request.options, **protocol_options})


_DEFAULTS: Final = Request()  # a request without any option
