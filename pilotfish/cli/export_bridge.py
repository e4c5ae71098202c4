"""``pilotfish export bridge``: compare two artifacts' vocabularies for drafting."""

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

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli.default_models import drafter_folder, target_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.manifest import Manifest

if TYPE_CHECKING:
    from pilotfish.bridge.pair_report import PairReport

_DESCRIPTION = """\
A drafter can draft for a target with another vocabulary: it proposes shared tokens, from its own
distribution renormalised over them. The output stays the target's; unshared tokens cost speed. This
command reports the number of shared tokens and, on a text, two shares:

  coverage   the share of the text's target tokens that are shared and in the drafter's head, which
             may be cut (--keep-tokens). Other tokens cannot be drafted, so this bounds acceptance.
  mass       the drafter's average probability of shared tokens, run over the text.

Below coverage x mass = 0.2 the pair is hopeless: a round would commit fewer than 1.25 tokens on
average, and the edge alone commits 1 without drafting. Above 0.2 it depends on how alike the models
are: measure it (pilotfish field measure). If the vocabularies are equal, nothing is run."""
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
_MOST_BYTES = 1 << 20  # maximum number of bytes read from a text
_MOST_NAMED = 6  # maximum number of special tokens printed
_HOPELESS = 1


class BridgeSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings of ``pilotfish export bridge``."""

    draft: Annotated[
        Path, setting("the drafter, as for `device run`", metavar="DRAFT", positional=True)
    ]
    target: Annotated[
        Path, setting("the target, as for `edge serve`", metavar="TARGET", positional=True)
    ]
    text: (
        Annotated[
            str,
            setting(
                "UTF-8 text like the expected answers, '-' for stdin; only the first MiB is read "
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
        help="compare the vocabularies of a drafter and a target",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add_flags(parser, BridgeSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, BridgeSettings)
    drafter = Artifact.open(drafter_folder(settings.draft, settings.provider))
    target = Artifact.open(target_folder(settings.target, settings.provider))
    drafter_manifest, target_manifest = drafter.manifest, target.manifest
    if (drafter_manifest.tokenizer_fingerprint, drafter_manifest.vocab_size) == (
        target_manifest.tokenizer_fingerprint,
        target_manifest.vocab_size,
    ):
        _show(
            args,
            {"trivial": True, "hopeless": False, "shared": drafter_manifest.vocab_size},
            _same(drafter_manifest, target_manifest),
        )
        return 0
    from pilotfish.bridge.pair_report import (  # late: imports the engines
        SAMPLE,
        compare_vocabularies,
    )

    text = SAMPLE if settings.text is None else _read(settings.text, args.usage)
    with ProgressDisplay() as display:
        report = compare_vocabularies(
            drafter,
            target,
            text,
            provider=settings.provider,
            threads=settings.threads,
            progress=display.show,
        )
    _show(
        args,
        {"trivial": False, "hopeless": report.hopeless} | asdict(report),
        _table(report),
    )
    if args.json != "-":
        Console(highlight=False).print(_verdict(report))
    return _HOPELESS if report.hopeless else 0


def _read(path: str, usage: Callable[[str], object]) -> str:
    """Read the text at ``path``, up to the limit; leave out a character that the limit cuts."""
    if path == "-":
        data = sys.stdin.buffer.read(_MOST_BYTES)
    else:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES)
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, len(data) < _MOST_BYTES)
    except UnicodeDecodeError as error:
        usage(f"--text {path} is not UTF-8: {error}")
        raise  # never reached, since `usage` ends the command


def _show(args: argparse.Namespace, figures: dict[str, Any], output: "Table | str") -> None:
    if args.json:
        write_json(args.json, figures)
    if args.json != "-":
        Console(highlight=False).print(output)


def _same(drafter: Manifest, target: Manifest) -> str:
    padded = drafter.padded_vocab_size, target.padded_vocab_size
    apart = ""
    if padded[0] != padded[1]:
        apart = f", padded to {padded[0]:,} and {padded[1]:,}, which makes no difference"
    drafted = "every token can be drafted"
    if drafter.head_tokens is not None:
        drafted = (
            f"only the {drafter.head_tokens:,} tokens in the drafter's head can be drafted, since "
            "the head was cut"
        )
    return (
        f"The same vocabulary: {drafter.vocab_size:,} tokens{apart}. The bridge is trivial, and "
        f"{drafted}."
    )


def _table(report: "PairReport") -> Table:
    table = Table("", "", "", show_header=False)
    add = table.add_row
    add("drafter", f"{report.own_size:,} tokens", escape(report.drafter))
    add("target", f"{report.target_size:,} tokens", escape(report.target))
    drafter_share, target_share = (
        report.shared / report.own_size,
        report.shared / report.target_size,
    )
    add(
        "shared",
        f"{report.shared:,} tokens",
        f"{drafter_share:.1%} of the drafter's, {target_share:.1%} of the target's",
    )
    add("special of these", f"{len(report.specials):,}", escape(_names(report)))
    add("end of a turn", *map(escape, _turn_end(report)))
    add(
        "coverage",
        f"{report.coverage:.1%}",
        f"of the text's {report.target_tokens:,} target tokens are shared: the maximum of "
        f"acceptance",
    )
    add(
        "mass",
        f"{report.mass:.1%}",
        f"of the drafter's probability is on shared tokens (average over {report.positions:,})",
    )
    return table


def _names(report: "PairReport") -> str:
    names = list(report.specials)
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


def _turn_end(report: "PairReport") -> tuple[str, str]:
    """Return the target's end token, and what the drafter drafts for it."""
    end = report.turn_end
    if end is None:
        return "-", "the target has no end token"
    counterpart = report.specials.get(end)
    if counterpart is None:
        return end, "is never drafted, so the edge ends every answer"
    return (
        end,
        "both models have this end token"
        if counterpart == end
        else f"the drafter's {counterpart} is drafted for it",
    )


def _verdict(report: "PairReport") -> str:
    product = f"coverage × mass = {report.coverage * report.mass:.2f}"
    if report.hopeless:
        return (
            f"Hopeless: {product}, below 0.2. Drafting would cost more than it saves; take a "
            "drafter whose tokenizer is closer to the target's."
        )
    return f"Worth trying: {product}. This product does not show how alike the models are."
