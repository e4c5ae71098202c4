"""A request: the options of one answer, each declared once.

Flags, TOML keys, the fields of an HTTP body and the options in the message `begin` follow from the
fields of `Request`. Besides the keys of `base.settings.setting`, a field's metadata may have:

http: "body": it is a field of an HTTP body; "pilotfish": it is a field of the body's object
    ``pilotfish``. Other fields have an HTTP form of their own, or none (`service.body`).
axis: `field measure` can vary the option: "target" under every protocol, "drafter" under those that
    draft, "tree" under those whose windows may be trees (`lab.field.axes`).
wire: True: the edge needs the option, and `begin` has no field for it. It travels in the map
    ``options`` of `begin` if it differs from its default (`wire.begin`).

A field without a description has no flag of its own. The bounds apply everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypedDict,
    TypeVar,
)

from msgspec import Meta

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import (
    LEAST_FACTOR,
    MOST_BIAS,
    MOST_BIASED,
    MOST_FACTOR,
    MOST_PENALTY,
    Grammar,
    LogitsOptions,
)
from pilotfish.wire.checked_options import CheckedOptions
from pilotfish.wire.messages import MAX_LOGPROBS

if TYPE_CHECKING:
    from pilotfish.wire.protocols.options import ProtocolOptions

AUTO: Final = "auto"  # the protocol that stands for a choice among the protocols
_MOST_ITEMS = Meta(max_length=128)
_U31 = 2**31 - 1
_Parameters = TypeVar("_Parameters", Sampling, LogitsOptions)

MaxTokens: TypeAlias = Annotated[int, Meta(ge=1, le=_U31)]
StopTexts: TypeAlias = Annotated[
    Sequence[Annotated[str, Meta(max_length=1024)]], Meta(max_length=16)
]


class AutoOptions(CheckedOptions, frozen=True, kw_only=True):
    """Options of protocol "auto"; see `device_runtime.plan.Auto`."""

    among: (
        Annotated[
            Sequence[str],
            _MOST_ITEMS,
            setting(
                "protocol auto: choose from these protocols (default: all lossless ones)",
                form="names",
                metavar="P,P,…",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    lossy: Annotated[
        bool, setting("protocol auto: choose lossy protocols, too", http="pilotfish")
    ] = False
    policy: Annotated[
        str,
        setting(
            "protocol auto: the policy by which it chooses (predictive)",
            http="pilotfish",
        ),
    ] = "predictive"
    rtt_threshold_s: (
        Annotated[
            float,
            setting(
                "policy threshold: above this RTT, all hidden states are sent at once (10)",
                ge=0,
                le=3600,
                form="milliseconds",
                metavar="MS",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    thrift: Annotated[
        bool,
        setting(
            "protocol auto: take, of the protocols that are no slower than stream, the cheapest "
            "for the edge",
            http="pilotfish",
        ),
    ] = False


class Request(CheckedOptions, frozen=True, kw_only=True):
    """The options of one answer. `device_runtime.plan.plan` checks them.

    protocol: None: "auto", or "local" without an edge. auto: the options of protocol "auto".
    window: draft tokens per round (default: 4), or "auto": draft until the drafter's confidence is
    low. An edge may set a lower limit. expansion: the candidates per node at each level of a tree,
    ⟨k₁…k_L⟩, instead of a window. max_tokens: None: as many as the context holds. temperature,
    top_k, top_p, min_p: the target's sampling. draft_…: the drafter's sampling, by default the
    target's. If no top_k and top_p are set, ``tslt``, ``tree`` and ``adaptive`` draft with top_k
    64. They send up to V tokens of each distribution, 2¹⁸ in a window. A temperature of None is not
    stated (`device_runtime.default_temperature`). logit_bias, penalties, grammar: applied to both
    ends' logits (`LogitsOptions`). seed: 0 ≤ seed < 2⁶³; None: random. options: the protocols' own
    options, by name; options of other protocols have no effect. ignore_eos: the target's end
    tokens do not end the answer. stop_token_ids: further tokens that end it, as end tokens do.
    logprobs: return the log-probabilities of each token and of this number of likeliest tokens.
    prompt_logprobs: the same for the prompt's tokens, from unprocessed logits. prediction: text, or
    ids of the target, that the answer is expected to resemble: drafts are taken from it, and a
    wrong one changes no token under `ahead`, `greedy` and `coupled`, and no probability under the
    other lossless protocols. A lossy protocol may accept drafts of it that the target would not
    choose.
    """

    protocol: (
        Annotated[
            str,
            setting(
                "drafting protocol; auto: the fastest for this link and pair", http="pilotfish"
            ),
        ]
        | None
    ) = None
    auto: AutoOptions = AutoOptions()
    window: (
        Annotated[
            int | Literal["auto"],
            setting(
                "number of draft tokens per round; auto: draft until the drafter is no longer "
                "confident (4)",
                form="window",
                metavar="N|auto",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    expansion: (
        Annotated[
            Sequence[int],
            _MOST_ITEMS,
            setting(
                "protocol tree, instead of --window: number of candidates per node at each level, "
                "e.g. 2,2,1 (default: 2,2,1,… as deep as the window)",
                form="expansion",
                axis="tree",
                metavar="K,K,…",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    max_tokens: Annotated[MaxTokens, setting("maximum number of tokens of the answer")] | None = 128
    temperature: (
        Annotated[
            float,
            setting(
                "sampling temperature; 0 is greedy",
                ge=0,
                le=100,
                axis="target",
                metavar="T",
                http="body",
            ),
        ]
        | None
    ) = 0.0
    top_k: Annotated[
        int,
        setting(
            "sample from the K likeliest tokens; 0: from all tokens (default)",
            ge=0,
            le=_U31,
            axis="target",
            metavar="K",
            http="body",
        ),
    ] = 0
    top_p: Annotated[
        float,
        setting(
            "probability mass of the nucleus; 1: all tokens (default)",
            gt=0,
            le=1,
            axis="target",
            metavar="P",
            http="body",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        setting(
            "drop tokens whose probability is below this share of the likeliest token's; 0: drop "
            "none",
            ge=0,
            le=1,
            axis="target",
            metavar="P",
            http="body",
        ),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[
            Annotated[int, Meta(ge=0, le=_U31)],
            Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)],
        ],
        Meta(max_length=MOST_BIASED),
        setting(
            "add B, -100 to 100, to the logit of the target's token ID; may be repeated",
            form="bias",
            repeat=True,
            metavar="ID=B",
            http="body",
        ),
    ] = {}
    repetition_penalty: Annotated[
        float,
        setting(
            "penalty factor for tokens that occur in the prompt or the answer; 1: off (default)",
            ge=LEAST_FACTOR,
            le=MOST_FACTOR,
            metavar="F",
            http="body",
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        setting(
            "subtract B, -2 to 2, from a token's logit once for each occurrence in the answer",
            ge=-MOST_PENALTY,
            le=MOST_PENALTY,
            metavar="B",
            http="body",
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        setting(
            "subtract B, -2 to 2, from the logit of each token that occurs in the answer",
            ge=-MOST_PENALTY,
            le=MOST_PENALTY,
            metavar="B",
            http="body",
        ),
    ] = 0.0
    grammar: Grammar | None = None
    draft_top_k: (
        Annotated[
            int,
            setting(
                "truncate the drafter's distribution to K tokens: tslt's K (default: as the "
                "target's; if neither distribution is truncated, 64 with protocols tslt, tree and "
                "adaptive, and auto chooses K)",
                ge=0,
                le=_U31,
                axis="drafter",
                metavar="K",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    draft_top_p: (
        Annotated[
            float,
            setting(
                "truncate the drafter's distribution to a nucleus of this mass: tslt's ρ",
                gt=0,
                le=1,
                axis="drafter",
                metavar="P",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    draft_temperature: (
        Annotated[
            float,
            setting(
                "temperature of the drafter (default: the target's)",
                ge=0,
                le=100,
                axis="drafter",
                metavar="T",
                http="pilotfish",
            ),
        ]
        | None
    ) = None
    seed: (
        Annotated[
            int,
            setting("seed that makes a sampled answer repeatable", ge=0, le=2**63 - 1, http="body"),
        ]
        | None
    ) = None
    options: Mapping[str, Any] = {}
    stop: Annotated[
        StopTexts,
        setting("stop at this text; may be repeated", repeat=True, metavar="TEXT"),
    ] = ()
    ignore_eos: Annotated[bool, setting("", http="body")] = False
    stop_token_ids: Annotated[
        Sequence[Annotated[int, Meta(ge=0, le=_U31)]], _MOST_ITEMS, setting("", http="body")
    ] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: str | Sequence[int] = ""

    @classmethod
    def from_options(cls, options: "Options | Mapping[str, Any]") -> "Request":
        """Make a request of the Python API's keywords (`Options`).

        Keywords that are no fields become ``options``. Raises `UnsupportedError` for a value of a
        wrong type, for a bad schema, and for a schema beside a grammar.
        """
        values = dict(options)
        protocols = _options_of(values.pop("options", None))
        if isinstance(values.get("protocol"), AutoOptions):
            values |= {"protocol": AUTO, "auto": values["protocol"]}
        if (schema := values.pop("schema", None)) is not None:
            if values.get("grammar") is not None:
                raise UnsupportedError("Give a schema or a grammar for the answer, not both.")
            try:
                values["grammar"] = Grammar.from_schema(schema)
            except (TypeError, ValueError, RecursionError) as error:  # JSON lacks such a value
                raise UnsupportedError(f"{error}.") from error
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        for name in ("logit_bias", "prediction"):
            if name in values and values[name] is None:
                del values[name]
        for name in [name for name in values if name not in cls.__struct_fields__]:
            protocols[name] = values.pop(name)
        if not isinstance(values.get("auto", AutoOptions()), AutoOptions):
            raise UnsupportedError(f"auto must be an Auto, not {values['auto']!r}.")
        return cls(**values, options=protocols).with_plain_types()

    @property
    def sampling(self) -> Sampling:
        """The target's sampling parameters; raises `ValueError` for impossible or no values."""
        if self.temperature is None:
            raise ValueError("no temperature is stated")
        return self._parameters(Sampling)

    @property
    def logits_options(self) -> LogitsOptions:
        """The changes of the logits; raises `ValueError` for impossible values."""
        return self._parameters(LogitsOptions)

    def _parameters(self, kind: type[_Parameters]) -> _Parameters:
        """Return the parameters of this kind, whose fields have the names of options."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})


def _options_of(struct: "ProtocolOptions | None") -> dict[str, Any]:
    """Return the options of a protocol's struct; `UnsupportedError` for anything else."""
    if struct is None:
        return {}
    try:
        return struct.to_dict()
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"options must be a struct of a protocol's options, not {struct!r}."
        ) from error


class Options(TypedDict, total=False):
    """The fields of `Request` as keywords of the Python API, for type checkers.

    ``protocol`` "auto" stands for ``Auto()``. schema: a JSON schema in place of a grammar. The
    protocols' own options (`wire.protocols.option_types`) are further keywords or, for type
    checkers, a struct: ``options=RelaxationOptions(tau=0.3)``.
    """

    protocol: str | AutoOptions
    window: int | Literal["auto"] | None
    expansion: Sequence[int] | None
    max_tokens: int
    temperature: float | None
    top_k: int
    top_p: float
    min_p: float
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logprobs: int | None
    prompt_logprobs: int | None
    schema: Mapping[str, Any] | str | None
    grammar: Grammar | None
    draft_temperature: float | None
    draft_top_k: int | None
    draft_top_p: float | None
    seed: int | None
    stop: Sequence[str]
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    prediction: str | Sequence[int] | None
    options: "ProtocolOptions | None"


# Names that a protocol's own option cannot have.
OPTION_NAMES: Final = frozenset(
    (*Options.__annotations__, *AutoOptions.__struct_fields__, "auto", "owner")
)
