"""Define the options that every generating command has: the flags of `wire.request.Request`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Meta, Struct

from pilotfish.base.errors import ConfigError, UnsupportedError
from pilotfish.base.reading import read_text, reading_file
from pilotfish.base.settings import Setting, settings
from pilotfish.bridge.prompt import TalkOptions
from pilotfish.cli.flags import add_flag, add_flags, flag_value, from_args
from pilotfish.device_runtime.choice import POLICIES
from pilotfish.device_runtime.plan import Auto, expect_effective
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.protocols import names, option_types
from pilotfish.wire.request import AUTO, AutoOptions, Request


def generation_options(
    parser: argparse.ArgumentParser, notes: Mapping[str, str], **defaults: object
) -> None:
    """Add the options of generation.

    notes: option → text to add to its help. defaults: option → default of its flag. All other flags
    have no default, so that `generation_of` knows which were given.
    """
    choices = {"protocol": (*names(), AUTO), "policy": tuple(POLICIES)}
    for option in settings(Request):
        if option.group:
            for each in settings(option.type):
                add_flag(parser, _flag_setting(each, choices))
        elif option.name == "grammar":
            constraint_options(parser)
        elif option.name == "stop":  # the protocols' own options come before it
            protocol_options(parser)
            add_flag(parser, _flag_setting(option, choices))
        elif option.meta.description:
            note = notes.get(option.name, "")
            flag = _flag_setting(option, choices, note)
            add_flag(parser, flag._replace(default=defaults.get(option.name)))


def _flag_setting(
    option: Setting, choices: Mapping[str, tuple[str, ...]], note: str = ""
) -> Setting:
    """Return an option as the setting of its flag: without bounds, which the plan checks."""
    extra = dict(option.extra)
    if option.name in choices:
        extra["choices"] = choices[option.name]
    meta = Meta(description=f"{option.meta.description}{note}", extra=extra)
    return option._replace(default=False if option.type is bool else None, meta=meta)


def constraint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that constrain the answer to a grammar."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--schema", type=Path, metavar="FILE", help="constrain the answer to this JSON schema"
    )
    group.add_argument(
        "--regex", metavar="R", help="constrain the answer to this regex (full match)"
    )
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="constrain the answer to one of these texts; repeat the flag for each text",
    )
    group.add_argument(
        "--lark", type=Path, metavar="FILE", help="constrain the answer to this Lark grammar"
    )


def talk_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a chat: tools, and whether the model thinks first."""
    parser.add_argument(
        "--tools", type=Path, metavar="FILE", help="a JSON list of tools that the model may call"
    )
    parser.add_argument(
        "--tool-choice", metavar="C", help="auto (default), none, required, or a tool's name"
    )
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction,
        help="let a reasoning model think first, or not (default: as its chat template does)",
    )  # fmt: skip


def prediction_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of a text that the answer is expected to resemble."""
    parser.add_argument(
        "--prediction", type=Path, metavar="FILE",
        help="a text that the answer will mostly repeat, such as a file to be edited: drafts are "
        "taken from it; a wrong one costs a little time, and changes no text under ahead, greedy "
        "and coupled",
    )  # fmt: skip


def prediction_of(args: argparse.Namespace) -> str:
    """Return the predicted text, or ""; raise `ConfigError` for an unreadable file."""
    if args.prediction is None:
        return ""
    with reading_file(lambda problem: ConfigError(f"{args.prediction} cannot be read: {problem}.")):
        return read_text(args.prediction)


def talk_of(args: argparse.Namespace) -> TalkOptions:
    """Return the chat options for `Device.stream`; raise `ConfigError` for an unreadable file."""
    options = TalkOptions(tool_choice=args.tool_choice, thinking=args.think)
    if args.tools is None:
        return options
    with reading_file(lambda problem: ConfigError(f"{args.tools} cannot be read: {problem}.")):
        tools = json.loads(read_text(args.tools))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f'{args.tools} does not contain a JSON list of objects {{"type": "function", …}}.'
        )
    options["tools"] = tools
    return options


def constraint_of(args: argparse.Namespace) -> Grammar | None:
    """Return the answer's grammar; raise `ConfigError` for an unreadable file."""
    file = args.schema or args.lark
    if file:
        with reading_file(lambda problem: ConfigError(f"{file} cannot be read: {problem}.")):
            wanted = read_text(file)
        return Grammar.from_schema(wanted) if args.schema else Grammar("lark", wanted)
    if args.choice:
        return Grammar.from_choices(args.choice)
    return Grammar("regex", args.regex) if args.regex is not None else None


def protocol_options(parser: argparse.ArgumentParser) -> None:
    """Add the protocols' own options; raise `ConfigError` if two options have the same flag."""
    try:
        for kind in option_types():
            add_flags(parser, kind)
    except argparse.ArgumentError as error:
        raise ConfigError(
            f"{error}: the command has this flag already; in the protocol's declaration of the "
            f"option, set another flag by flag=."
        ) from error


def _flag(option: str) -> str:
    """Return the flag that sets a protocol's option."""
    declared = (setting for kind in option_types() for setting in settings(kind))
    return "--" + next((setting.flag for setting in declared if setting.name == option), option)


def protocol_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the protocols' options that differ from their defaults: name → value."""
    return {
        name: value
        for kind in option_types()
        for name, value in from_args(args, kind).to_dict().items()
    }


def generation_of(args: argparse.Namespace) -> Request:
    """Return the request that the flags state.

    Raise `UnsupportedError` for an option without effect.
    """
    options, auto = protocol_options_of(args), _flag_values(args, AutoOptions)
    if args.protocol != AUTO:
        expect_effective(args.protocol, options, _flag)
        if auto:
            *first, last = (f"--{option.flag}" for option in settings(AutoOptions))
            raise UnsupportedError(f"{', '.join(first)} and {last} go with --protocol auto.")
    return Request(
        **_flag_values(args, Request),
        auto=Auto(**auto),
        grammar=constraint_of(args),
        options=options,
    )


def _flag_values(args: argparse.Namespace, kind: type[Struct]) -> dict[str, Any]:
    """Return the options that flags set: name → value."""
    options = (option for option in settings(kind) if option.meta.description)
    values = {option.name: flag_value(args, option) for option in options}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }
