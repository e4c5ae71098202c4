"""Read the body of a request that asks for an answer: JSON in, one struct out, in one decode.

In:  the bytes of a body, and the service's default `Request`. Out: the body's fields, and the
     request that they state, or a `RefusalError` that names the field at fault.

A route declares a subclass of `BodyFields` with its own fields. `read_body` adds the options of
`wire.request.Request` and, in the object ``pilotfish``, options of protocol and drafter and the
protocols' own options. Unknown fields are ignored or refused (`field_check`), but those of
``pilotfish`` are always refused. If this object names a protocol, the service's defaults for its
other options do not apply. If it sets any option of ``auto``, none of the service's defaults for
``auto`` apply. A body may set one grammar for its answer: by OpenAI's ``response_format`` or
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
from pilotfish.base.struct_types import gathered
from pilotfish.device_runtime.default_temperature import with_default_temperature
from pilotfish.device_runtime.plan import Auto, expect_effective
from pilotfish.device_runtime.service.field_check import (
    IgnoredFields,
    RequestFields,
    Values,
    check_fields,
    check_names,
)
from pilotfish.device_runtime.service.neutral_values import HINTS, INERT, INPUT, OUTPUT, SAMPLING
from pilotfish.device_runtime.service.prompts import bad_value
from pilotfish.device_runtime.service.refusal import RefusalError, bad_request
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.messages import MAX_GRAMMAR
from pilotfish.wire.protocols import ProtocolOptions, option_types
from pilotfish.wire.request import AUTO, AutoOptions, Request, StopTexts

Grammatical = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)]


class _NamedSchema(RequestFields):
    """OpenAI's ``json_schema``; name, description and ``strict`` have no effect."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(RequestFields, tag_field="type", tag="text"):
    """A ``response_format`` without a constraint."""


class ObjectFormat(RequestFields, tag_field="type", tag="json_object"):
    """A format of any JSON object, or of JSON by a schema (llama.cpp's addition)."""

    schema: msgspec.Raw = msgspec.Raw(b'{"type": "object"}')


class SchemaFormat(RequestFields, tag_field="type", tag="json_schema"):
    """A format of JSON by a schema, as ``response_format`` has it."""

    json_schema: _NamedSchema


class FlatFormat(_NamedSchema, tag_field="type", tag="json_schema"):
    """A format of JSON by a schema, as ``text.format`` has it."""


Format: TypeAlias = TextFormat | ObjectFormat | SchemaFormat
FormatOfText: TypeAlias = TextFormat | ObjectFormat | FlatFormat


class StructuredOutputs(RequestFields):
    """VLLM's ``structured_outputs``; a request may set one of the fields."""

    json: msgspec.Raw = msgspec.Raw(b"null")
    json_object: Literal[True] | None = None
    regex: Grammatical | None = None
    choice: Annotated[list[Grammatical], msgspec.Meta(min_length=1, max_length=4096)] | None = None
    grammar: Grammatical | None = None


class StreamOptions(RequestFields):
    """OpenAI's ``stream_options``."""

    inert: ClassVar[frozenset[str]] = frozenset(("include_obfuscation",))

    unsupported_hints: ClassVar[Values] = {"continuous_usage_stats": (None, False)}  # vLLM's

    include_usage: bool | None = None


class BodyFields(RequestFields, kw_only=True):
    """The fields of a body that all routes share, without those of `Request`.

    pilotfish: the object with the options of protocol and drafter.
    """

    inert: ClassVar[frozenset[str]] = INERT
    neutral: ClassVar[Values] = {**SAMPLING, **INPUT, **OUTPUT}
    unsupported_hints: ClassVar[Values] = HINTS

    model: str | None = None
    structured_outputs: StructuredOutputs | None = None
    stop: str | StopTexts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    pilotfish: Any = None


STRICT: Final = IgnoredFields()  # takes no names

_Fields = TypeVar("_Fields", bound=RequestFields)
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

# Values of other servers for "none", beyond a field's bounds: their fields count as left out.
_NONE: Final[Mapping[str, int]] = {"seed": -1, "top_k": -1}
_WIDER: Final[Mapping[str, Any]] = {
    "seed": Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None,
    "top_k": Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None,
    "top_p": Annotated[float, msgspec.Meta(ge=0, le=1)] | None,
}


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
    fields = [*_optional(Request, _IN_BODY), ("pilotfish", pilotfish | None, None)]
    fields = [(name, _WIDER.get(name, kind), default) for name, kind, default in fields]
    whole = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)
    return cast(type[_Kind], whole)


def read_body(body: bytes, kind: type[_Kind], ignored: IgnoredFields = STRICT) -> _Kind:
    """Read a body. A value of another type ends decoding at once.

    ignored: takes the names of unknown fields, or refuses them (default).
    """
    whole: type[_Kind] = _body_type(kind, option_types())
    return read_fields(body, whole, ignored)


def read_fields(body: bytes, kind: type[_Fields], ignored: IgnoredFields = STRICT) -> _Fields:
    """Read a body of exactly this type; otherwise as `read_body`."""
    body = without_bom(body)
    try:
        fields: _Fields = msgspec.json.decode(body, type=gathered(kind))
        check_fields(body, fields, ignored)
    except msgspec.ValidationError as error:
        message = str(error)
        if message.startswith("Expected `object`") and " - at `$" not in message:
            raise _malformed(error) from None
        # an unsupported or unknown field may be the cause: with ``prompt``, /v1/responses needs no
        # ``input``
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            check_names(body, kind, ignored)
        raise bad_value(error, message) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(error) from None
    except RecursionError:
        raise RefusalError(400, "The body is nested too deeply.", code="malformed") from None
    return fields


def _malformed(error: Exception) -> RefusalError:
    return RefusalError(400, f"The body is not a JSON object: {error}.", code="malformed")


def request_of(
    body: BodyFields, defaults: Request, format: Format | FormatOfText | None
) -> Request:
    """Return the request that a body states. defaults: the service's own options."""
    changes = _present(body, _IN_BODY)
    changes = {name: value for name, value in changes.items() if _NONE.get(name) != value}
    if changes.get("top_p") == 0:  # a nucleus of one token
        changes |= {"top_p": 1.0, "top_k": 1}
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
