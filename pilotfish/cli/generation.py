"""Define the options that every generating command has."""

import argparse
import json
from pathlib import Path
from typing import Any, Literal, cast

from pilotfish.base.errors import ConfigError, UnsupportedError
from pilotfish.base.reading import read_text, reading_file
from pilotfish.base.settings import settings
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import positive
from pilotfish.device_runtime.choice import POLICIES
from pilotfish.device_runtime.plan import AUTO, Auto, Options, TalkOptions, expect_effective
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.protocols import names, option_types


def window(text: str) -> "int | Literal['auto']":
    """Parse a number of draft tokens, or ``auto`` (an argparse type)."""
    return "auto" if text == "auto" else int(text)


def expansion(text: str) -> list[int]:
    """Parse ``2,2,1`` (an argparse type)."""
    return [int(part) for part in text.split(",")]


def bias(text: str) -> tuple[int, float]:
    """Parse ``ID=B`` (an argparse type)."""
    token, _, value = text.partition("=")
    return int(token), float(value)


def generation_options(
    parser: argparse.ArgumentParser, *, protocol: str, tokens: int, temperature: str
) -> None:
    """Add the options of generation. temperature: the default temperature, in words."""
    parser.add_argument(
        "--protocol",
        choices=(*names(), AUTO),
        default=protocol,
        help="drafting protocol; auto: the fastest for this link and pair (%(default)s)",
    )
    parser.add_argument(
        "--among",
        type=lambda text: text.split(","),
        metavar="P,P,…",
        help="protocol auto: choose from these protocols (default: all lossless ones)",
    )
    parser.add_argument(
        "--lossy", action="store_true", help="protocol auto: choose lossy protocols, too"
    )
    parser.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        help=f"protocol auto: the policy by which it chooses ({Auto.policy})",
    )
    parser.add_argument(
        "--rtt-threshold",
        type=positive,
        metavar="MS",
        help="policy threshold: above this RTT, all hidden states are sent at once (10)",
    )
    parser.add_argument(
        "--thrift",
        action="store_true",
        help="protocol auto: take, of the protocols that are no slower than stream, the "
        "cheapest for the edge",
    )
    parser.add_argument(
        "--window",
        type=window,
        metavar="N|auto",
        help="number of draft tokens per round; auto: draft until the drafter is no longer "
        "confident (4)",
    )
    parser.add_argument(
        "--expansion",
        type=expansion,
        metavar="K,K,…",
        help="protocol tree, instead of --window: number of candidates per node at each level, "
        "e.g. 2,2,1 (default: "
        "2,2,1,… as deep as the window)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=tokens, metavar="N",
        help="maximum number of tokens of the answer (%(default)s)" + ("" if tokens else "; 0: "
        "as many as the context holds"),
    )  # fmt: skip
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help=f"sampling temperature; 0 is greedy ({temperature})",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all tokens (default)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="probability mass of the nucleus; 1: all tokens (default)",
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P",
        help="drop tokens whose probability is below this share of the likeliest token's; 0: "
        "drop none",
    )  # fmt: skip
    parser.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="ID=B",
        help="add B, -100 to 100, to the logit of the target's token ID; may be repeated",
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="F",
        help="penalty factor for tokens that occur in the prompt or the answer; 1: off (default)",
    )  # fmt: skip
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="B",
        help="subtract B, -2 to 2, from a token's logit once for each occurrence in the answer",
    )  # fmt: skip
    parser.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="B",
        help="subtract B, -2 to 2, from the logit of each token that occurs in the answer",
    )  # fmt: skip
    constraint_options(parser)
    parser.add_argument(
        "--draft-top-k",
        type=int,
        metavar="K",
        help="truncate the drafter's distribution to K tokens: tslt's K (default: as the "
        "target's; with protocols tslt and tree, 64 if neither distribution is truncated)",
    )
    parser.add_argument(
        "--draft-top-p",
        type=float,
        metavar="P",
        help="truncate the drafter's distribution to a nucleus of this mass: tslt's ρ",
    )
    parser.add_argument(
        "--draft-temperature",
        type=float,
        metavar="T",
        help="temperature of the drafter (default: the target's)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed that makes a sampled answer repeatable"
    )
    protocol_options(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop at this text; may be repeated",
    )


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


def generation_of(args: argparse.Namespace) -> Options:
    """Return the generation options for `Device.stream`."""
    options = Options(
        protocol=protocol_of(args),
        window=args.window,
        expansion=args.expansion,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        logit_bias=dict(args.logit_bias),
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        grammar=constraint_of(args),
        draft_temperature=args.draft_temperature,
        draft_top_k=args.draft_top_k,
        draft_top_p=args.draft_top_p,
        seed=args.seed,
        stop=args.stop,
    )
    options.update(cast(Options, protocol_options_of(args)))
    return options


def protocol_of(args: argparse.Namespace) -> "str | Auto":
    """Return the protocol with its options.

    Raise `UnsupportedError` for an option without effect.
    """
    if args.protocol != AUTO:
        expect_effective(args.protocol, protocol_options_of(args), _flag)
    if args.protocol == AUTO:
        return Auto(
            among=args.among,
            lossy=args.lossy,
            policy=args.policy or Auto.policy,
            rtt_threshold_s=None if args.rtt_threshold is None else args.rtt_threshold * 1e-3,
            thrift=args.thrift,
        )
    if args.among or args.lossy or args.policy or args.thrift or args.rtt_threshold is not None:
        raise UnsupportedError(
            "--among, --lossy, --policy, --rtt-threshold and --thrift go with --protocol auto."
        )
    name: str = args.protocol
    return name
