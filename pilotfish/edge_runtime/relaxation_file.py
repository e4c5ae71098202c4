"""Read and write the result of `pilotfish judge calibrate`: a relaxation and its effect.

In:  NAME.json. Out: a checked `RelaxationCard`; a damaged or too large file raises
     `RelaxationError`.
"""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from pilotfish.base.errors import PairMismatchError, RelaxationError
from pilotfish.base.reading import reading_file, without_bom
from pilotfish.edge_runtime.head_file import ModelIdentity, read_bounded
from pilotfish.engines.cache import replace_file
from pilotfish.engines.manifest import Manifest
from pilotfish.engines.manifest_file import FormatNumber
from pilotfish.speculation.adaptive import Relaxation
from pilotfish.wire.protocols.adaptive import Ratio, Share

FORMAT: Final = 1
CARD_BYTES = 1 << 16

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
AtLeastOne = Annotated[float, msgspec.Meta(ge=1)]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effect of a relaxation: means over all positions of the answers to some prompts.

    strict, relaxed: acceptance α without and with the relaxation. deviation: total variation from
    the target's law, which equals relaxed − strict. key: probability that a draft token is a key
    token. strict_tokens, relaxed_tokens: expected tokens per round without and with it.
    """

    prompts: Count
    positions: Count
    strict: Share
    relaxed: Share
    deviation: Share
    key: Share
    strict_tokens: AtLeastOne
    relaxed_tokens: AtLeastOne


class RelaxationCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of NAME.json.

    tau, lambda1 to lambda3: the relaxation. budget: upper limit of the deviation per position with
    which the relaxation was chosen. temperature: temperature of both ends. draft_top_k: top-k of
    the drafter; 0: all tokens. window: γ. chosen: outcome on the prompts used for the choice.
    kept_out: outcome on held-out prompts. prompts_sha256: digest of all prompts, each after its
    length in bytes as u32.
    """

    format: Literal[1] = FORMAT
    tau: Share
    lambda1: Ratio
    lambda2: Share
    lambda3: Share
    budget: Share
    temperature: Annotated[float, msgspec.Meta(gt=0, le=100)]
    draft_top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    window: Annotated[int, msgspec.Meta(ge=1, le=128)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    seed: Count
    drafter: ModelIdentity
    target: ModelIdentity
    prompts_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    chosen: Outcome
    kept_out: Outcome

    @property
    def relaxation(self) -> Relaxation:
        """Relaxation with the card's τ and λ₁ to λ₃."""
        return Relaxation(
            tau=self.tau, lambda1=self.lambda1, lambda2=self.lambda2, lambda3=self.lambda3
        )

    def check_target(self, target: Manifest, path: Path) -> None:
        """Raise `PairMismatchError` unless the card was calibrated with this target's weights."""
        if self.target.origin != target.origin:
            raise PairMismatchError(
                f"{path} was calibrated for the target {self.target.model} (weights "
                f"{self.target.origin}), not for {target.model} (weights {target.origin}): "
                "calibrate with this target, or give the edge no such file."
            )


def read_relaxation(path: Path) -> RelaxationCard:
    """Read the card at ``path``.

    Raises:
        RelaxationError: for a file that is missing, too large, damaged, or of a newer version.
    """
    data = without_bom(read_bounded(path, CARD_BYTES, RelaxationError))
    with reading_file(partial(_invalid, path)):
        file_format = msgspec.json.decode(data, type=FormatNumber).format
        if file_format != FORMAT:
            raise RelaxationError(
                f"{path} has format {file_format}, but this version reads format {FORMAT}: "
                "calibrate again, or install the version that made it."
            )
        return msgspec.json.decode(data, type=RelaxationCard)


def _invalid(path: Path, problem: str) -> RelaxationError:
    return RelaxationError(
        f"{path} is not a valid file of `pilotfish judge calibrate` ({problem}): calibrate again, "
        "or restore a copy of the file."
    )


def expect_writable(path: Path) -> None:
    """Raise `RelaxationError` if a card cannot be written at ``path``; call it before long work."""
    folder = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise RelaxationError(
            f"{path} cannot be written: name a file in a folder in which you may write."
        )


def write_relaxation(path: Path, card: RelaxationCard) -> None:
    """Write the card; the file appears whole or not at all.

    Raises:
        RelaxationError: if it cannot be written.
    """
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")
    except OSError as error:
        raise RelaxationError(f"{path} cannot be written: {error}.") from error
