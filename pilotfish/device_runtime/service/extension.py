"""Read the object ``pilotfish`` of a request: how to generate, for measurements.

In:  the object's bytes, and the request's options. Out: changed options, or a `RefusalError`.

The fields are protocol, among, lossy, policy, rtt_threshold_s, thrift, window, expansion,
draft_temperature, draft_top_k, draft_top_p, as in `device_runtime.plan`, and the protocols' own
options. If the object names a protocol, the service's defaults for window, expansion and drafting
do not apply. If it sets any option of ``auto``, none of the service's defaults for ``auto`` apply.
"""

from functools import cache
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import AUTO, Auto, Options, expect_effective
from pilotfish.device_runtime.service.prompts import bad_value
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.wire.protocols import ProtocolOptions, option_types

# _CHOOSING: options of protocol "auto"; _DRAFTING: options of protocols that draft.
_CHOOSING = ("among", "lossy", "policy", "rtt_threshold_s", "thrift")
_DRAFTING = ("window", "expansion", "draft_temperature", "draft_top_k", "draft_top_p")
Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]
Mass = Annotated[float, msgspec.Meta(gt=0, le=1)]
Top = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    """The object ``pilotfish`` without the protocols' own options, which `_extension` adds."""

    protocol: str | None = None
    among: Annotated[list[str], msgspec.Meta(max_length=128)] | None = None
    lossy: bool | None = None
    policy: str | None = None
    rtt_threshold_s: Seconds | None = None
    thrift: bool | None = None
    window: int | Literal["auto"] | None = None
    expansion: Annotated[list[int], msgspec.Meta(max_length=128)] | None = None
    draft_temperature: Temperature | None = None
    draft_top_k: Top | None = None
    draft_top_p: Mass | None = None


@cache
def _extension(kinds: tuple[type[ProtocolOptions], ...]) -> type[Extension]:
    """Add the options of these types to `Extension`."""
    fields: list[tuple[str, Any, None]] = [
        (name, hint | None, None)
        for kind in kinds
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if name in kind.__struct_fields__
    ]
    kind = msgspec.defstruct("Extension", fields, bases=(Extension,), forbid_unknown_fields=True)
    return cast(type[Extension], kind)


def _read(raw: msgspec.Raw) -> Extension:
    """Read the object ``pilotfish``; an empty one if the request has none."""
    kind = _extension(option_types())
    try:
        return msgspec.json.decode(raw, type=kind | None) or kind()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        at = "`$.pilotfish"
        message = str(error)
        message = message.replace("`$", at) if "`$" in message else f"{message} - at {at}`"
        raise bad_value(error, message) from None


def extend(options: Options, raw: msgspec.Raw) -> None:
    """Change the options in place to those that the object ``raw`` sets."""
    extension = _read(raw)
    if extension.protocol is not None:
        for name in _DRAFTING:
            options.pop(name, None)  # type: ignore[misc]  # these are keys of Options
        options["protocol"] = extension.protocol
    fields = extension.__struct_fields__
    protocol_fields = [name for name in fields if name not in Extension.__struct_fields__]
    values = {name: value for name in fields if (value := getattr(extension, name)) is not None}
    if extension.protocol not in (None, AUTO):
        try:
            expect_effective(
                extension.protocol, [name for name in protocol_fields if name in values]
            )
        except UnsupportedError as error:
            raise bad_request("pilotfish", str(error)) from None
    for name in (*_DRAFTING, *protocol_fields):
        if name in values:
            options[name] = values[name]  # type: ignore[literal-required]  # as above
    if any(name in values for name in _CHOOSING):
        if extension.protocol not in (None, AUTO):
            raise bad_request(
                "pilotfish",
                f"{', '.join(_CHOOSING[:-1])} and {_CHOOSING[-1]} can only be used with protocol "
                "auto.",
            )
        options["protocol"] = Auto(
            among=extension.among,
            lossy=bool(extension.lossy),
            policy=extension.policy or Auto.policy,
            rtt_threshold_s=extension.rtt_threshold_s,
            thrift=bool(extension.thrift),
        )
