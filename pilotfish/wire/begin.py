"""The options of a request in the message `begin`: written by the device, read by the edge.

An option with a field of the same name in `Begin` has its value there, changes of the logits are in
`LogitsOptionsMsg`, and the grammar's text is frame 1. All other options that the edge needs (in
`Request` marked ``wire``) travel with the protocol's options, in the map ``options``.
"""

from typing import Any, Final, get_type_hints

import msgspec

from pilotfish.base.errors import MalformedError, TooLargeError
from pilotfish.base.settings import settings
from pilotfish.base.struct_types import gathered
from pilotfish.speculation.logits_options import Grammar, LogitsOptions
from pilotfish.wire.messages import MAX_GRAMMAR, Begin, Buffer, LogitsOptionsMsg
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.request import Request

# Names of the options that have a field in `Begin`.
_PLAIN: Final = tuple(
    name
    for name in Begin.__struct_fields__
    if name in Request.__struct_fields__ and name != "options"
)


def _mapped_options(kind: type[Request]) -> type[msgspec.Struct]:
    """Return a struct with the options that travel in the map ``options``."""
    hints = get_type_hints(kind, include_extras=True)
    return msgspec.defstruct(
        "MappedOptions",
        [
            (option.name, hints[option.name], option.default)
            for option in settings(kind)
            if option.extra.get("wire")
        ],
        omit_defaults=True,
    )


_MappedOptions = _mapped_options(Request)


def begin_fields(request: Request, prompt_length: int) -> dict[str, Any]:
    """Return the fields of `Begin` that the request determines. prompt_length: in tokens."""
    mapped = _MappedOptions(
        **{name: getattr(request, name) for name in _MappedOptions.__struct_fields__}
    )
    return {
        **{name: getattr(request, name) for name in _PLAIN},
        "options": {**request.options, **msgspec.to_builtins(mapped)},
        "shape": _shape_of(request.logits_options, prompt_length),
    }


def read_begin(begin: Begin, grammar: Buffer | None) -> tuple[Request, SamplingParams]:
    """Return the request that a `Begin` states, and its sampling parameters.

    The request's ``options`` are the protocol's. grammar: frame 1, if there is one. Raises
    `MalformedError` for impossible values.
    """
    options = dict(begin.options)
    names = _MappedOptions.__struct_fields__
    mapped = {name: options.pop(name) for name in names if name in options}
    try:
        known = msgspec.convert(mapped, gathered(_MappedOptions))
    except msgspec.ValidationError as error:
        raise MalformedError(f"The options are unusable: {error}.") from error
    request = Request(
        **{name: getattr(begin, name) for name in _PLAIN},
        **{name: getattr(known, name) for name in names},
        **_logits_fields(begin.shape, grammar),
        options=options,
    )
    try:
        return request, SamplingParams(
            sampling=request.sampling, seed=begin.seed, logits_options=request.logits_options
        )
    except ValueError as error:
        raise MalformedError(f"The sampling parameters are unusable: {error}.") from error


def _shape_of(options: LogitsOptions, prompt_length: int) -> LogitsOptionsMsg | None:
    """Return the message for these options; None if they change nothing."""
    if options.is_identity:
        return None
    return LogitsOptionsMsg(
        since=prompt_length,
        logit_bias=list(options.logit_bias.items()),
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        grammar=options.grammar.kind if options.grammar is not None else "",
    )


def _logits_fields(shape: LogitsOptionsMsg | None, grammar: Buffer | None) -> dict[str, Any]:
    """Return the fields of a request that a message about its logits determines."""
    if shape is None:
        return {}
    bias = dict(shape.logit_bias)
    if len(bias) < len(shape.logit_bias):
        raise MalformedError("logit_bias names a token twice.")
    return {
        "logit_bias": bias,
        "repetition_penalty": shape.repetition_penalty,
        "frequency_penalty": shape.frequency_penalty,
        "presence_penalty": shape.presence_penalty,
        "grammar": None if grammar is None else Grammar(shape.grammar, _decode_grammar(grammar)),
    }


def _decode_grammar(grammar: Buffer) -> str:
    if len(grammar) > MAX_GRAMMAR:
        raise TooLargeError(
            f"The grammar has {len(grammar)} bytes; at most {MAX_GRAMMAR} are allowed."
        )
    try:
        return bytes(grammar).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"The grammar is not UTF-8: {error}.") from error
