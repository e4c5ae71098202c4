"""``pilotfish export bridge``: what two artifacts' vocabularies share, and if that is enough."""

import argparse
import codecs
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pilotfish.base.settings import setting
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.cli.progress import Bars
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.manifest import Manifest

if TYPE_CHECKING:
    from pilotfish.device_runtime.bridge.pair_report import PairReport

_DESCRIPTION = """\
A drafter can draft for a target of another vocabulary: it proposes tokens that both have, from its
own distribution renormalised over these. The output stays the target's; what is not shared costs
speed. This says how much: how many tokens are shared and, on a text, two figures:

  coverage   the share of the target's tokens of the text that are shared, and that the drafter's
             head can say, if it was cut (--keep-tokens). No other can be drafted: acceptance is at
             most this, however good the drafter is.
  mass       the probability that the drafter, run over the text, has on shared tokens (average).
             The rest is what it would rather have said.

If coverage x mass is below 0.2 the pair is hopeless: a round would commit fewer than 1.25 tokens on
average, where the edge alone commits 1 without drafting. Above, it depends on how alike the models
are: measure it (pilotfish field measure). Nothing is run if the vocabularies are the same."""
_EXAMPLE = """\
example:
  pilotfish export model default --out drafter --precision int4
  pilotfish export model qwen2.5-coder-1.5b.gguf --out target --precision int4
  pilotfish export bridge drafter target
  pilotfish export bridge drafter target --text questions.txt --json - | jq .mass

exit codes: 0 worth trying, or the same vocabulary; 1 hopeless; 2 a text that is not UTF-8; 64 a
text without tokens; 66 no artifact; 69 nothing runs the drafter; 74 a text that cannot be read; 76
no token in common.
"""
_MOST_BYTES = 1 << 20  # of a text
_MOST_NAMED = 6  # special tokens
_HOPELESS = 1


class BridgeSettings(EngineSettings, frozen=True, kw_only=True):
    """What ``pilotfish export bridge`` is told."""

    draft: Annotated[Path, setting("the drafter's artifact", metavar="DRAFT", positional=True)]
    target: Annotated[Path, setting("the target's", metavar="TARGET", positional=True)]
    text: (
        Annotated[
            str,
            setting(
                "UTF-8 such as will be generated, '-' for stdin; of more than 1 MiB the beginning "
                "(default: 300 words of prose, chat, code, sums and German)",
                metavar="FILE",
            ),
        ]
        | None
    ) = None


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "bridge",
        help="what a drafter and a target of another vocabulary share",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add_flags(parser, BridgeSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, BridgeSettings)
    drafter, target = Artifact.open(settings.draft), Artifact.open(settings.target)
    ours, other = drafter.manifest, target.manifest
    if (ours.tokenizer_fingerprint, ours.vocab_size) == (
        other.tokenizer_fingerprint,
        other.vocab_size,
    ):
        _show(
            args,
            {"trivial": True, "hopeless": False, "shared": ours.vocab_size},
            _same(ours, other),
        )
        return 0
    from pilotfish.device_runtime.bridge.pair_report import (  # with it comes what runs a model
        SAMPLE,
        compare_vocabularies,
    )

    text = SAMPLE if settings.text is None else _read(settings.text, args.usage)
    with Bars() as bars:
        vocabularies = compare_vocabularies(
            drafter,
            target,
            text,
            provider=settings.provider,
            threads=settings.threads,
            progress=bars.show,
        )
    _show(
        args,
        {"trivial": False, "hopeless": vocabularies.hopeless} | asdict(vocabularies),
        _table(vocabularies),
    )
    if args.json != "-":
        Console(highlight=False).print(_verdict(vocabularies))
    return _HOPELESS if vocabularies.hopeless else 0


def _read(path: str, usage: Callable[[str], object]) -> str:
    """The text that was named; a character that is cut at its end is left out."""
    if path == "-":
        data = sys.stdin.buffer.read(_MOST_BYTES)
    else:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES)
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, len(data) < _MOST_BYTES)
    except UnicodeDecodeError as error:
        usage(f"--text {path} is not UTF-8: {error}")
        raise  # not reached: a wrong usage ends the command


def _show(args: argparse.Namespace, figures: dict[str, Any], told: "Table | str") -> None:
    if args.json:
        write_json(args.json, figures)
    if args.json != "-":
        Console(highlight=False).print(told)


def _same(own: Manifest, other: Manifest) -> str:
    padded = own.padded_vocab_size, other.padded_vocab_size
    apart = ""
    if padded[0] != padded[1]:
        apart = f", padded to {padded[0]:,} and {padded[1]:,}, which makes no difference"
    drafted = "every token can be drafted"
    if own.head_tokens is not None:
        drafted = f"the {own.head_tokens:,} tokens that the head was cut to can be drafted"
    return (
        f"The same vocabulary: {own.vocab_size:,} tokens{apart}. The bridge is trivial, and "
        f"{drafted}."
    )


def _table(found: "PairReport") -> Table:
    table = Table("", "", "", show_header=False)
    add = table.add_row
    add("drafter", f"{found.own_size:,} tokens", escape(found.drafter))
    add("target", f"{found.target_size:,} tokens", escape(found.target))
    of_own, of_target = found.shared / found.own_size, found.shared / found.target_size
    add(
        "shared",
        f"{found.shared:,} tokens",
        f"{of_own:.1%} of the drafter's, {of_target:.1%} of the target's",
    )
    add("of these special", f"{len(found.specials):,}", escape(_names(found)))
    add("end of a turn", *map(escape, _turn_end(found)))
    add(
        "coverage",
        f"{found.coverage:.1%}",
        f"of the text's {found.target_tokens:,} target tokens are shared: the most that "
        "acceptance can be",
    )
    add(
        "mass",
        f"{found.mass:.1%}",
        f"of the drafter's probability is on shared tokens (average over {found.positions:,})",
    )
    return table


def _names(found: "PairReport") -> str:
    names = list(found.specials)
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


def _turn_end(found: "PairReport") -> tuple[str, str]:
    """The token, and what is drafted for it."""
    end = found.turn_end
    if end is None:
        return "-", "the target has no end token"
    value = found.specials.get(end)
    if value is None:
        return end, "is never drafted: the edge ends every answer"
    return end, "both call it so" if value == end else f"the drafter's {value} is drafted for it"


def _verdict(found: "PairReport") -> str:
    left = f"coverage × mass = {found.coverage * found.mass:.2f}"
    if found.hopeless:
        return (
            f"Hopeless: {left}, below 0.2. Drafting would cost more than it saves; take a drafter "
            "whose tokenizer is closer to the target's."
        )
    return f"Worth trying: {left}. How alike the models are it does not say."
