"""The type of an architecture: how a class of checkpoints differs from Llama.

Keys are named as in Llama's config.json; `key_names` maps them to the class's names. The keys that
a class of transformers has, and their defaults, are data (`export.architectures.known_keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pilotfish.export.architectures.known_keys import KnownKeys
from pilotfish.export.model_config import Activation, Form, Kind

LLAMA_FORM = Form()
ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
QKV = ATTENTION[:3]
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL = ATTENTION + MLP
# The boolean keys of most classes → modules that have a bias if the key is true.
BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ATTENTION,
    "mlp_bias": MLP,
    "use_bias": ALL,
}


class Stated(Protocol):
    """A function that looks up a key in a configuration, or else the class's default."""

    def __call__(self, key: str) -> Any:
        """Return the value of a key, given by Llama's name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Names:
    """A class's names and layouts of weights, where they differ from ours (`export.weights`).

    "→ ours" means: a table from the checkpoint's names to our names.

    Attributes:
        body: name of the module that contains everything except the head; weight names may omit it.
        stack: name of the list of layers within the body.
        outer: module outside the layers → ours. All these modules except the head are in the body.
        modules: module of a layer → ours; * stands for an expert's number.
        tensors: tensor of a layer → ours, if the name differs in more than the module.
        fused: fused module → our modules, in the order in which it concatenates their rows.
        by_head: whether the rows of fused modules are grouped by head. q, k and v are grouped by
        key head (its queries, its k, its v), q and gate by query head, the parts of linear
        attention by key head.
        stacked: tensor that holds all experts of a layer → our tensors of an expert, in row order.
        columns: whether stacked tensors are [experts, in, out] instead of [experts, out, in]; None
        = files differ, and the shape tells.
        alternating: whether the rows of an expert's weights alternate in a stacked tensor.
        listed: module with a list of weights, one per head → ours.
        transposed: whether linear modules are stored as [in, out].
        dropped: name suffixes of tensors that are not weights, or can be computed.
        aside: name prefixes of modules that are not part of the model. The layers that the key
        `num_nextn_predict_layers` counts, after the last layer, are not part of it either.
    """

    body: str = "model"
    stack: str = "layers"
    outer: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_head: bool = False
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: bool | None = False
    alternating: bool = False
    listed: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    dropped: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Properties of a class's mixtures of experts that no key states.

    Attributes:
        normed: whether the chosen scores are divided by their sum; None = the key `norm_topk_prob`
        decides.
        scores, biased, epsilon: as in `Experts`; the key `use_expert_bias` may override `biased`.
        shared_gate: whether the shared expert's output is multiplied by a gate.
        lift: number added to the up projection (`Experts.lift`).
        switch: key that states whether there are experts; None = there are always experts.
        parallel_mlp: whether layers also have a dense feed-forward part (`Experts.parallel_mlp`).
    """

    normed: bool | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    biased: bool = False
    epsilon: float = 0.0
    shared_gate: bool = False
    lift: float = 0.0
    switch: str | None = None
    parallel_mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """A class's GGUF files: the exceptions from the names in `export.sources.gguf_names`.

    They follow llama.cpp's converter, and facts in llama.cpp's code that no key states.

    Attributes:
        name: value of `general.architecture`.
        when: key that only this class has, among the classes with this `name`; None = the class
        that has none of these keys.
        keys: GGUF's key → Llama's key, where this class differs from other classes.
        derive: function that computes values of further keys from the values of Llama's keys.
        tensors: Llama's boolean key → our name of a weight; the key is true if layer 0 has that
        weight.
        neutral: key with an effect → its values that have no effect.
        interleaved: whether the two halves of each head alternate in the rows of q and k.
        tiled: whether the heads of values in linear attention are grouped by their number within
        the group of a key head (`export.sources.gguf_order`).
        modules, fused, by_head: as in `Names`.
    """

    name: str
    when: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    interleaved: bool = False
    tiled: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_head: bool = False


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of checkpoints.

    Attributes:
        models: published models of this class, for display.
        keys: keys with an effect whose default the data does not have → their defaults; REQUIRED if
        a file must state the key.
        known: the class's keys, from the data.
        key_names: Llama's key → this class's name of it; "" if files never have the key.
        neutral: key with an effect that is not supported → its values that are accepted, besides
        the class's default.
        unused: keys with an effect only on layers that models of this entry do not have.
        form: parts of the layers.
        vary: function that returns changes of `form`, given the keys' values.
        biases: boolean key → modules that have a bias if the key is true; key "" = always. Keys
        that the class does not have are left out.
        windows: layers with the sliding window: none; all; by layer_types ("listed"); or, if
        use_sliding_window is true, by layer_types or from max_window_layers on ("switched"). With
        `full_every`, the latter are those before max_window_layers that this key leaves.
        full_every: n: if layer_types is absent, every n-th layer has no window.
        full_first: whether these are layers 0, n, 2n …, instead of n − 1, 2n − 1 ….
        full_last: whether the last layer never has a window.
        score_scale: factor by which q · k is multiplied; None = a key or the heads' width
            determines it.
        unrotated: layers without rotation: none; all; by no_rope_layers ("listed"); or, in models
        with windows, the layers without a window ("full").
        states: name in layer_types of a layer other than attention → `Layer.kind`.
        one_part: whether a layer has either a token mixer or a feed-forward part.
        with_experts: entry that replaces this one if the number of experts is not 0.
        rope_by_type: whether rotary parameters are stated per type of layer. If so, `rope_scaling`
        applies only to layers without a window.
        not_null: keys that a file may omit, but not set to null.
        activations: name of an activation that has another meaning in this class → its meaning.
        rotations: supported kinds of rotary scaling; None = all.
        rope_states: keys that a table of rotary parameters must have.
        rope_default: rotary parameters for a file that states none; with `rope_by_type`, one table
            per type. None = no scaling.
        reads_alpha: whether the scaling `dynamic` multiplies θ by a power of the key alpha.
        mixture: properties of the mixtures of experts; None if there are none.
        interleaved: whether neighbouring channels are rotated as a pair.
        embed_root: whether embeddings are multiplied by √hidden.
        plus_one: whether norms multiply by 1 + weight.
        position_offset: row of the learned position table for position 0.
        names: names and layouts of the class's weights.
        gguf: properties of the class's GGUF files; None if they are not supported.
    """

    models: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    known: KnownKeys = field(default_factory=KnownKeys)
    key_names: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    form: Form = LLAMA_FORM
    vary: Callable[[Stated], Mapping[str, Any]] | None = None
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BIASES)
    windows: Literal["none", "all", "listed", "switched"] = "none"
    full_every: int | None = None
    full_first: bool = False
    full_last: bool = False
    score_scale: float | None = None
    unrotated: Literal["none", "all", "listed", "full"] = "none"
    states: Mapping[str, Kind] = field(default_factory=dict)
    one_part: bool = False
    rope_by_type: bool = False
    not_null: tuple[str, ...] = ()
    activations: Mapping[str, Activation] = field(default_factory=dict)
    rotations: tuple[str, ...] | None = None
    rope_states: tuple[str, ...] = ()
    rope_default: Mapping[str, Any] | None = None
    reads_alpha: bool = False
    mixture: Mixture | None = None
    with_experts: Architecture | None = None
    interleaved: bool = False
    embed_root: bool = False
    plus_one: bool = False
    position_offset: int = 0
    names: Names = Names()
    gguf: Gguf | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """The class's defaults of SIZES."""
        defaults = self.known.defaults
        return {key: defaults[key] for key in SIZES if key in defaults}

    @property
    def global_heads(self) -> bool:
        """Whether layers without a window have another number and width of heads (Gemma 4)."""
        return "global_head_dim" in self.keys

    def with_keys(self, known: KnownKeys) -> Architecture:
        """Add the class's keys, under Llama's names, to the keys of this entry."""
        names = {theirs: ours for ours, theirs in self.key_names.items()}
        keys = {
            names.get(key, key): default
            for key, default in known.defaults.items()
            if key not in self.neutral
        }
        if self.windows != "none" and "layer_types" in known.others:
            keys["layer_types"] = None
        stated = [key for key in SIZES if key not in MAY_BE_ABSENT]
        keys |= {key: REQUIRED for key in stated if keys.get(key) is not None}
        keys |= self.keys
        experts = self.with_experts
        return replace(
            self,
            keys=keys,
            biases={key: self.biases[key] for key in self.biases if key == "" or key in keys},
            known=known,
            with_experts=experts.with_keys(known) if experts else None,
        )


REQUIRED = object()
"""Default of a key that a file must state."""

GATE_UP = {"mlp.gate_up_proj": MLP[:2]}


def stack_experts(gate_up: str, down: str, kind: str = "weight") -> dict[str, tuple[str, ...]]:
    """Return `Names.stacked` for two tensors: gate and up of each expert, and down."""
    gate, up, last = (f"mlp.experts.*.{name[4:]}.{kind}" for name in MLP)
    return {gate_up: (gate, up), down: (last,)}


def number_parts(theirs: str, ours: str) -> dict[str, str]:
    """Return `Names.modules` for a feed-forward part with the modules w1 (gate), w2, w3 (up)."""
    parts = (f"{ours}.{part}_proj" for part in ("gate", "down", "up"))
    return {f"{theirs}.w{i}": part for i, part in enumerate(parts, 1)}


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Keys that a wrapper's text_config may omit, and that other files must state, although
transformers has defaults: a file without them is incomplete."""
MAY_BE_ABSENT = ("max_position_embeddings",)
"""Those that text models' files may omit, too: Llama 1's files do, which have the default."""
HEAD_DIM: Mapping[str, Any] = {"head_dim": None}
"""The width of heads, for classes that read it without declaring it."""
