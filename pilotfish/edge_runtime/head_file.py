"""Read and write the two files of a decision head: its card, and its weights.

In:  NAME.json, a `HeadCard`; and NAME.safetensors, the weights, with their SHA-256 in the card. The
     tensors are w1 [h, n], b1 [h], w2 [h] and b2 [1], in float32 or float16. A head that reads
     hidden states also has mean and std [d_D + d_T]. n is the width of the input u (wisv (23)):
     d_D + d_T for hidden states or 2·buckets for tokens, and 4 more if the head reads the link.
Out: card and tensors, checked. A damaged, too large or contradictory file raises `HeadError`.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import HeadError, PilotfishError
from pilotfish.base.reading import read_content, reading_file, without_bom
from pilotfish.engines.cache import replace_file
from pilotfish.engines.manifest import Stored
from pilotfish.engines.manifest_file import FormatNumber
from pilotfish.speculation.channel import FEATURES
from pilotfish.wire.codecs.hidden import HiddenFormat

FORMAT: Final = 1
SHIPPED_HEADS = Path(__file__).parent / "heads"
DEFAULT_HEAD = "default"  # the shipped head: for the default target and the drafter default-28
CARD_BYTES = 1 << 16  # upper limit of a card's file (bytes)
WEIGHTS_BYTES = 4_000_000  # upper limit of a file of weights (bytes)
HIDDEN_WIDTH = 1024  # upper limit of h, the width of the hidden layer
BUCKETS = 1 << 16  # upper limit of hash buckets of token ids

Features = Literal["states", "tokens"]
Tensors = Mapping[str, NDArray[np.floating]]

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PerFeature = Annotated[list[float], msgspec.Meta(min_length=4, max_length=4)]
Value = Annotated[str, msgspec.Meta(max_length=256)] | float | bool | int | None


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of one model of the pair.

    origin, precision: as in the model's `Manifest`. hidden: size d of its hidden states.
    """

    model: Text
    origin: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    hidden: Annotated[int, msgspec.Meta(ge=3, le=65536)]
    precision: Stored


class LinkScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean and standard deviation of each link feature in training.

    clip: bound of the standardised features |c|.
    """

    names: tuple[Text, Text, Text, Text] = FEATURES
    mean: PerFeature
    std: PerFeature
    clip: Annotated[float, msgspec.Meta(gt=0)]

    def standardise(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the standardised features c of wisv (23), f64 [..., 4].

        NaN, an unknown feature, becomes 0, the mean.
        """
        deviations = (features - np.array(self.mean)) / np.array(self.std)
        return np.where(np.isnan(deviations), 0.0, np.clip(deviations, -self.clip, self.clip))


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effect of one threshold on held-out questions; None for a value that was not measured.

    logit: logit of the threshold; None for thresholds 0 and 1. forgiven: share of mismatches that
    are forgiven. accuracy: share of correct answers. accepted_length: tokens per round, wisv's AAL.
    """

    threshold: Share
    logit: float | None = None
    forgiven: Share
    accuracy: Share | None = None
    accepted_length: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of a head's training.

    auc: area under the ROC curve on held-out questions. options: all other settings.
    """

    questions: Count
    examples: Count
    task: Text
    seed: Count
    auc: Share | None = None
    options: Annotated[dict[Text, Value], msgspec.Meta(max_length=64)] = {}


class HeadCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of NAME.json.

    features: input of the head: "states" (h_D and h_T) or, for comparison, "tokens" (the draft
    token and the target's token, as hashed one-hot vectors). link: scale of the link's features;
    None: the head does not read the link. hidden: wire format of the drafter's states in training.
    threshold: recommended threshold of ρ (wisv (27)). sha256: digest of NAME.safetensors; empty
    until `DecisionHead.save` sets it.
    """

    format: Literal[1] = FORMAT
    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    drafter: ModelIdentity
    target: ModelIdentity
    features: Features = "states"
    link: LinkScale | None
    hidden: HiddenFormat = "int8"
    threshold: Share
    curve: Annotated[list[CurvePoint], msgspec.Meta(max_length=256)] = []
    training: Training
    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""

    @property
    def link_width(self) -> int:
        """Number of the link's features that the head reads: 4 or 0."""
        return 0 if self.link is None else len(FEATURES)


def read_head(path: Path) -> tuple[HeadCard, Tensors]:
    """Read and check the card at ``path``, NAME.json, and the tensors in NAME.safetensors.

    Raises:
        HeadError: for a file that is missing, too large, damaged, or of a newer version.
    """
    card = _decode_card(without_bom(read_bounded(path, CARD_BYTES)), str(path))
    weights = path.with_suffix(".safetensors")
    data = read_bounded(weights, WEIGHTS_BYTES)
    if hashlib.sha256(data).hexdigest() != card.sha256:
        raise HeadError(
            f"{weights} does not belong to {path.name} (its SHA-256 differs): copy both files "
            "again, or train the head again."
        )
    tensors = _load_tensors(data, weights)
    check_tensors(card, tensors)
    return card, tensors


def write_head(folder: Path, card: HeadCard, tensors: Tensors) -> tuple[Path, HeadCard]:
    """Write NAME.safetensors, then NAME.json; return the path of NAME.json and the written card.

    Each file appears whole or not at all. If the process stops between the two files of an existing
    head, `read_head` refuses the pair, since the digest in the card differs.

    Raises:
        HeadError: if a file would be larger than `read_head` allows, or cannot be written.
    """
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    card = msgspec.structs.replace(card, sha256=hashlib.sha256(data).hexdigest())
    text = msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"
    for size, most in ((len(data), WEIGHTS_BYTES), (len(text), CARD_BYTES)):
        if size > most:
            raise HeadError(
                f"The head {card.name} would need a file of {size} bytes, but at most {most} are "
                "allowed: make the head smaller."
            )
    path = folder / f"{card.name}.json"
    try:
        replace_file(folder / f"{card.name}.safetensors", data)
        replace_file(path, text)
    except OSError as error:
        raise HeadError(f"The head {card.name} cannot be written: {error}.") from error
    return path, card


def validate_card(card: HeadCard) -> HeadCard:
    """Return the card as `read_head` would; raise `HeadError` if a value is out of bounds."""
    return _decode_card(msgspec.json.encode(card), f"The card of the head {card.name}")


def check_tensors(card: HeadCard, tensors: Tensors) -> None:
    """Raise `HeadError` if names, shapes, types or values of the tensors do not fit the card."""
    expected = {"w1", "b1", "w2", "b2"} | ({"mean", "std"} if card.features == "states" else set())
    if tensors.keys() != expected:
        raise _weights_error(
            card, f"it has {_join_names(tensors)} instead of the tensors {_join_names(expected)}"
        )
    h, inputs = tensors["w1"].shape if tensors["w1"].ndim == 2 else (0, 0)
    if not 1 <= h <= HIDDEN_WIDTH:
        raise _weights_error(card, f"w1 must be [h, n] with h from 1 to {HIDDEN_WIDTH}")
    if card.features == "states":
        states = card.drafter.hidden + card.target.hidden
        shapes = {"w1": (h, states + card.link_width), "mean": (states,), "std": (states,)}
    else:
        buckets, odd = divmod(inputs - card.link_width, 2)
        if odd or not 1 <= buckets <= BUCKETS:
            raise _weights_error(
                card,
                f"w1 has {inputs} columns; it must have two for each of 1 to {BUCKETS} buckets",
            )
        shapes = {"w1": (h, inputs)}
    for name, shape in {**shapes, "b1": (h,), "w2": (h,), "b2": (1,)}.items():
        tensor = tensors[name]
        if tensor.dtype not in (np.float32, np.float16):
            raise _weights_error(
                card, f"{name} has the type {tensor.dtype}, not float32 or float16"
            )
        if tensor.shape != shape:
            raise _weights_error(
                card, f"{name} has the shape {list(tensor.shape)}, not {list(shape)}"
            )
        if not np.isfinite(tensor).all():
            raise _weights_error(card, f"{name} has a value that is not finite")
    if "std" in tensors and not (tensors["std"] > 0).all():
        raise _weights_error(card, "std has a value that is not positive")


def _decode_card(data: bytes, subject: str) -> HeadCard:
    advice = "copy the head again, or train it again"
    with reading_file(lambda problem: HeadError(f"{subject} is not valid ({problem}): {advice}.")):
        file_format = msgspec.json.decode(data, type=FormatNumber).format
        if file_format != FORMAT:
            raise HeadError(
                f"{subject} has format {file_format}, but this version reads format {FORMAT}: "
                "train the head again, or install the version that made it."
            )
        card = msgspec.json.decode(data, type=HeadCard)
    link = card.link
    if link is not None and link.names != FEATURES:
        raise HeadError(
            f"{subject} was trained for other link features than {', '.join(FEATURES)}: train the "
            "head again."
        )
    if link is not None and min(link.std) <= 0:
        raise HeadError(f"{subject} is not valid: link.std has a value that is not positive.")
    return card


def read_bounded(path: Path, max_bytes: int, kind: type[PilotfishError] = HeadError) -> bytes:
    """Read a file of at most ``max_bytes``; raise an error of class ``kind`` if that fails."""
    with reading_file(lambda problem: kind(f"{path} cannot be read: {problem}.")):
        try:
            return read_content(path, max_bytes)
        except FileNotFoundError:
            raise kind(f"There is no file {path}.") from None


def _load_tensors(data: bytes, path: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError) as error:  # KeyError: a dtype that numpy lacks
        raise HeadError(f"{path} is not a safetensors file that can be read: {error}.") from None


def _weights_error(card: HeadCard, problem: str) -> HeadError:
    return HeadError(f"The weights of the head {card.name} are not valid: {problem}.")


def _join_names(names: Mapping[str, object] | set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
