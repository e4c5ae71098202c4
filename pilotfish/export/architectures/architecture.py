"""An entry of the table of architectures: the differences of a class of checkpoints from Llama's.

Keys are those of Llama's config.json; `key_names` maps them to another class's names. A class does
not have the keys that its entry's `keys` lacks, so a configuration with such a key is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pilotfish.export.model_config import Activation, Form, Kind

LLAMA_FORM = Form()


class Stated(Protocol):
    """Looks up a configuration's value of a key, or the class's default."""

    def __call__(self, key: str) -> Any:
        """Return the value of one of Llama's keys."""
        ...


@dataclass(frozen=True, kw_only=True)
class Names:
    """A checkpoint's names and layouts of weights, if they differ from `export.weights`.

    Attributes:
        body: module that contains everything except the head; names may omit it.
        stack: module of the layers within the body.
        outer: module outside the layers → ours; within the body unless it is the head.
        modules: module of a layer → ours; * stands for an expert's number.
        tensors: tensor of a layer → ours, if more than its module's name differs.
        fused: module → our modules whose rows it concatenates, in this order.
        by_head: whether the rows of fused modules are grouped by head: q, k, v by key head (its
            queries, its k, its v); q and gate by head; parts of linear attention by key head.
        stacked: tensor of a layer with all experts → our tensors of each expert, in row order.
        columns: whether stacked tensors are [experts, in, out].
        alternating: whether the rows of several weights in a stacked tensor alternate.
        listed: module that is a list of weights, one per head → ours.
        transposed: whether linear modules are stored as [in, out].
        dropped: name suffixes of tensors that are computed or no weights.
        aside: name prefixes of modules that are not part of the model.
    """

    body: str = "model"
    stack: str = "layers"
    outer: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_head: bool = False
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: bool = False
    alternating: bool = False
    listed: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    dropped: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Properties of a class's mixtures of experts that its keys do not state.

    Attributes:
        normed: whether the softmax is over the chosen scores; None = by the key `norm_topk_prob`.
        shared_gate: whether the shared expert is weighted.
        lift: number added to the up projection (`Experts.lift`).
        switch: key that states whether there are experts; None = there always are.
        parallel_mlp: whether layers also have a dense feed-forward part (`Experts.parallel_mlp`).
    """

    normed: bool | None = None
    shared_gate: bool = False
    lift: float = 0.0
    switch: str | None = None
    parallel_mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """Differences of a class's GGUF files from the general names in `export.sources.gguf_names`.

    They come from llama.cpp's converter, and from facts that its code implies without a key.

    Attributes:
        name: value of `general.architecture`.
        when: key that distinguishes this class from others of that name; None = none of their keys.
        keys: GGUF's key → Llama's, if it differs from other classes.
        derive: function from values of Llama's keys to further ones.
        tensors: Llama's boolean key → our weight of the first layer whose presence makes it true.
        neutral: key with an effect → the values without one.
        interleaved: whether the two halves of each head alternate in the rows of q and k.
        modules, fused: as in `Names`.
    """

    name: str
    when: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    interleaved: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kind of checkpoint.

    Attributes:
        models: published models of this class, for display.
        keys: the class's keys with an effect → defaults; REQUIRED if a file must state the key.
        key_names: Llama's key → this class's name; "" if the class does not have it in its files.
        aliases: another name of a key in files → the class's name.
        echoes: redundant key in files → the key whose value it must equal.
        inert: keys of this class without effect on the text.
        neutral: key with an effect → the values without one.
        form: form of its layers.
        vary: function from the keys to changes of the form.
        biases: boolean key → modules that have a bias if it is true; "" = always.
        windows: layers with the sliding window: none; all; those in layer_types ("listed"); or
            those in layer_types, by default from max_window_layers on, if use_sliding_window is
            true ("switched").
        full_every: without layer_types, every n-th layer has no window.
        full_last: whether the last layer never has a window.
        shares_kv: whether the last layers may read the keys and values of earlier ones
            (`num_kv_shared_layers`).
        global_heads: whether layers without a window have heads of another width and number.
        score_scale: factor of q · k; None = by a key or the heads' width.
        unrotated: layers without rotation: none; all; those in no_rope_layers ("listed"); or, in
            models with windows, layers without one ("full").
        states: type of layer other than attention → `Layer.kind`.
        one_part: whether a layer has a token mixer or a feed-forward part, not both.
        with_experts: entry to use instead, unless the number of experts is 0.
        rope_by_type: whether rotary parameters are stated per type of layer; a `rope_scaling`
            then applies to full layers only.
        must_state: keys that a file must state, because their default belongs to another
            architecture.
        not_null: keys that a file may omit, but not set to null.
        activations: names of activations with another meaning in this class → that activation.
        rotations: supported kinds of rotary scaling; None = all.
        rope_states: keys that a table of rotary parameters must have.
        rope_default: rotary parameters if a file states none; with `rope_by_type`, a table per
            type. None = no scaling.
        mixture: properties of its mixtures of experts; None without any.
        grown_queries: whether queries grow with their position (Ministral 3).
        interleaved: whether rotated pairs of channels are neighbours.
        embed_root: whether embeddings are multiplied by √hidden.
        plus_one: whether norms multiply by 1 + weight.
        position_offset: row of the learned position table for position 0.
        names: names and layouts of its weights.
        gguf: properties of its GGUF files; None if they are not supported.
    """

    models: str
    keys: Mapping[str, Any]
    key_names: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    echoes: Mapping[str, str] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    form: Form = LLAMA_FORM
    vary: Callable[[Stated], Mapping[str, Any]] | None = None
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: Literal["none", "all", "listed", "switched"] = "none"
    full_every: int | None = None
    full_last: bool = False
    shares_kv: bool = False
    global_heads: bool = False
    score_scale: float | None = None
    unrotated: Literal["none", "all", "listed", "full"] = "none"
    states: Mapping[str, Kind] = field(default_factory=dict)
    one_part: bool = False
    rope_by_type: bool = False
    must_state: tuple[str, ...] = ()
    not_null: tuple[str, ...] = ()
    activations: Mapping[str, Activation] = field(default_factory=dict)
    rotations: tuple[str, ...] | None = None
    rope_states: tuple[str, ...] = ()
    rope_default: Mapping[str, Any] | None = None
    mixture: Mixture | None = None
    with_experts: Architecture | None = None
    grown_queries: bool = False
    interleaved: bool = False
    embed_root: bool = False
    plus_one: bool = False
    position_offset: int = 0
    names: Names = Names()
    gguf: Gguf | None = None


REQUIRED = object()
"""Default of a key that a file must state."""

ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
QKV = ATTENTION[:3]
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL = ATTENTION + MLP
GATE_UP = {"mlp.gate_up_proj": MLP[:2]}

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}

SIZES: Mapping[str, Any] = dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ),
    REQUIRED,
)
DECODER: Mapping[str, Any] = {
    **SIZES,
    "num_key_value_heads": None,  # the number of heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""Keys of nearly every class, with the most common defaults."""
