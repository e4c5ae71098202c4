"""``pilotfish export model … --keep-tokens``: cut the head to the target's frequent tokens."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pilotfish.base.progress import FETCHING, ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli.extras import export_tools
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pilotfish.device_runtime.device import Device
    from pilotfish.export.sources import WeightSource

_TIMES, _TOKENS = 4, 128  # number of answers to each built-in prompt; maximum tokens of an answer
_CONTEXT = 2048  # maximum tokens of a prompt and its answer together
_FEW = 20_000  # with fewer counted tokens, most tokens are kept only because their ids are low
_Show = Callable[[str, int, "int | None"], None]


GROUP = setting(
    "Computes the logits of only N tokens, which makes a small model's passes shorter. The "
    "drafter reads the other tokens, but never drafts them. For drafters only. Keeps the "
    "tokens that are most frequent in the texts of --for, then the tokens with the lowest ids, "
    "and always the tokens that end answers and turns. Tokens that a target with another "
    "vocabulary lacks come last.",
    title="--keep-tokens",
)


class KeepSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``--keep-tokens``: the tokens to keep in a drafter's head."""

    keep_tokens: (
        Annotated[int, setting("cut the head to N tokens, such as 32768 (default: keep all)", ge=1)]
        | None
    ) = None
    texts: Annotated[
        tuple[str, ...],
        setting(
            "texts of the target: a text file, or answers in JSON lines (.jsonl). Or a target "
            "that generates texts: an artifact, or an edge's address. May be repeated",
            flag="for",
            metavar="TEXT|DIR|ADDRESS",
            repeat=True,
        ),
    ] = ()
    prompts: (
        Annotated[
            Path,
            setting(
                "prompts for a target, one per line or JSON lines (default: five built-in prompts, "
                "four times each)",
                metavar="FILE",
            ),
        ]
        | None
    ) = None
    keys: (
        Annotated[
            Path,
            setting(
                "folder with device.key and edge.pub, for an edge beyond loopback",
                form="keys",
                metavar="DIR",
            ),
        ]
        | None
    ) = None

    @property
    def problem(self) -> str:
        """Say what is wrong with the combination of options; "" if nothing is."""
        if self.keep_tokens is not None and not self.texts:
            return "--keep-tokens needs the target's texts: --for TEXT|DIR|ADDRESS"
        options = {"--for": self.texts, "--prompts": self.prompts, "--keys": self.keys}
        named = [name for name, value in options.items() if value]
        if named and self.keep_tokens is None:
            return f"{named[0]} goes with --keep-tokens"
        has_target = any(_is_target(text) for text in self.texts)
        return (
            "" if has_target or not named[1:] else f"{named[1]} needs a target, --for DIR|ADDRESS"
        )


class _TargetTexts(NamedTuple):
    """Texts of a target. shared: whether the target has each source token, bool [V]; None: all."""

    texts: list[str]
    shared: NDArray[np.bool_] | None


def choose_kept_tokens(source: "WeightSource", settings: KeepSettings) -> NDArray[np.int64]:
    """Return the source's tokens to keep, ascending, i64 [N]; print their share of the texts."""
    with export_tools():
        from pilotfish.export.head_tokens import choose_tokens, count_tokens, read_texts
    assert settings.keep_tokens is not None
    vocabulary = source.vocabulary
    counts = np.zeros(vocabulary.vocab_size, np.int64)
    choose_tokens(
        source, settings.keep_tokens, counts
    )  # called here so that a wrong number fails before the work
    targets: list[NDArray[np.bool_] | None] = []  # `shared` of each target
    with ProgressDisplay() as display:
        for text in settings.texts:
            if _is_target(text):
                target = _ask_target(source, vocabulary, text, settings, display.show)
                targets.append(target.shared)
                texts: Iterator[str] = iter(target.texts)
            else:
                texts = read_texts(Path(text))
            counted = _with_progress(texts, text, display.show)
            counts += count_tokens(counted, vocabulary.tokenizer, vocabulary.vocab_size)
    some = [shared for shared in targets if shared is not None]
    # None if a target has all tokens: then every token can be drafted
    useful = np.logical_or.reduce(some) if some and len(some) == len(targets) else None
    tokens = choose_tokens(source, settings.keep_tokens, counts, useful)
    _print_summary(counts, tokens, useful, vocabulary.vocab_size)
    return tokens


def _is_target(text: str) -> bool:
    return "://" in text or Path(text).is_dir()


def _with_progress(texts: Iterator[str], name: str, show: _Show) -> Iterator[str]:
    """Yield the texts, and show how much of the file has been read."""
    path = Path(name)
    size = path.stat().st_size if "://" not in name and path.is_file() else None
    done = 0
    for text in texts:
        yield text
        done += len(text)
        show("counting tokens", done if size is None else min(done, size), size)


def _print_summary(
    counts: NDArray[np.int64],
    kept_tokens: NDArray[np.int64],
    useful: NDArray[np.bool_] | None,
    size: int,
) -> None:
    """Print on stderr how many tokens are kept."""
    total = int(counts.sum())
    share = counts[kept_tokens].sum() / max(total, 1)
    lines = [
        f"kept {len(kept_tokens):,} of {size:,} tokens, {share:.2%} of the {total:,} tokens "
        "counted in the texts"
    ]
    if useful is not None:
        lines.append(f"the target, too, has {int(useful.sum()):,} of the {size:,} tokens")
    if total < _FEW:
        lines.append(
            "the texts are short, so most tokens are kept only because their ids are low: give "
            f"texts of at least {_FEW:,} tokens"
        )
    print(*(f"pilotfish: {line}" for line in lines), sep="\n", file=sys.stderr)


def _tokens_in_target(vocabulary: Vocabulary, target: Vocabulary) -> NDArray[np.bool_] | None:
    """Return which of our tokens the target has, bool [V]; None if the vocabularies are equal."""
    from pilotfish.bridge import Pair

    shared = Pair(vocabulary, target).shared
    if shared is None:
        return None
    in_target = np.zeros(vocabulary.vocab_size, np.bool_)
    in_target[shared.draft_ids] = True
    return in_target


# Generating a target's answers


def _ask_target(
    source: "WeightSource", vocabulary: Vocabulary, target: str, settings: KeepSettings, show: _Show
) -> _TargetTexts:
    """Generate texts with a target, on an edge or here."""
    from pilotfish.lab.prompts import BUILT_IN, read_prompts
    from pilotfish.wire.protocols import LOCAL, STREAM

    prompts = BUILT_IN * _TIMES if settings.prompts is None else read_prompts(settings.prompts)
    remote = "://" in target
    with _device(source, target, settings.keys, show) if remote else _alone(target) as device:
        shared = _tokens_in_target(
            vocabulary, device.vocabulary
        )  # before the answers, since it raises if no token is shared
        return _TargetTexts(_answers(device, prompts, STREAM if remote else LOCAL, show), shared)


def _answers(device: "Device", prompts: Sequence[str], protocol: str, show: _Show) -> list[str]:
    texts = []
    for seed, prompt in enumerate(prompts):
        show("the target answers", seed, len(prompts))
        answer = device.generate(
            prompt, protocol=protocol, temperature=1.0, seed=seed, max_tokens=_TOKENS
        )
        texts.append(answer.text)
    show("the target answers", len(prompts), len(prompts))
    return texts


@contextmanager
def _alone(target: str) -> "Iterator[Device]":
    """Open a device with the target as its model, without an edge."""
    from pilotfish.device_runtime.device import Device
    from pilotfish.engines.artifact import check_head

    artifact = Artifact.open(target)
    check_head(artifact)
    with Device(target) as device:
        yield device


@contextmanager
def _device(
    source: "WeightSource", edge: str, keys: Path | None, show: _Show
) -> "Iterator[Device]":
    """Open a device of this edge. One drafter layer suffices, because `stream` never drafts."""
    from pilotfish.device_runtime.device import Device
    from pilotfish.export.model import export_model

    def fetched(done: int, total: int) -> None:
        show(FETCHING, done, total)

    with tempfile.TemporaryDirectory(prefix="pilotfish-export-") as folder:
        layers = 1 if source.config.layers > 1 and not source.config.recurrent else None
        context = min(source.config.context, _CONTEXT)
        path = Path(folder) / "draft"
        artifact = export_model(source, path, first_layers=layers, context=context)
        with Device(artifact.path, edge, keys, on_fetch=fetched) as device:
            yield device
