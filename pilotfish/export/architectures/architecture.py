"""What an entry of the table of architectures says: how a kind of checkpoint differs from Llama's.

Keys are those of Llama's config.json; `called` says what another class calls them. A key that is in
no entry's `keys` is unknown to that class, so a configuration that states it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pilotfish.export.model_config import Activation, Form, Kind

LLAMA_FORM = Form()


class Stated(Protocol):
    """Looks up what a configuration states, or the class's default."""

    def __call__(self, key: str) -> Any:
        """Return the value of one of Llama's keys."""
        ...


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a checkpoint calls its weights, where that is not what `export.weights` does.

    Attributes:
        body: module that holds all but the head; it may be absent from the names.
        stack: module of the layers within it.
        outer: a module outside the layers → ours; in the body unless it is the head.
        modules: a module of a layer → ours; * stands for a number, an expert's.
        tensors: a tensor of a layer → ours, where more than its module is called otherwise.
        fused: a module whose rows are those of several of ours, in this order.
        by_head: the rows of a fused q, k and v are of a key head each: its queries, its k, its v;
            those of a fused q and gate of a head each; those of a fused part of linear attention
            of one of its key heads each.
        stacked: a tensor of a layer that holds those of all experts → ours of each, whose rows
            stand in this order.
        columns: stacked tensors are [experts, in, out].
        alternating: rows of several weights in a stacked tensor take turns.
        listed: a module that is a list of weights, one for each head → ours.
        transposed: linear modules are stored [in, out].
        dropped: names that end so are computed, or no weights.
        aside: modules beside the body that are no part of the model.
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
    """What a class of experts has, besides the numbers that its keys state.

    Attributes:
        normed: the softmax is over the chosen scores; None = `norm_topk_prob` says it.
        shared_gate: the part that all tokens use is weighted.
        lift: what is added to the up projection (`Experts.lift`).
        switch: the key that says whether there are any; None = there are.
        beside: layers have a feed-forward part of their own, too (`Experts.parallel_mlp`).
    """

    normed: bool | None = None
    shared_gate: bool = False
    lift: float = 0.0
    switch: str | None = None
    parallel_mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """How a class's GGUF files differ from what `export.sources.gguf_names` has for all.

    What llama.cpp's converter changes, and what its code knows without the file saying it.

    Attributes:
        name: `general.architecture`.
        when: the key that another class of that name has not; None = of the rest.
        keys: GGUF's key → Llama's, where it is another one than in other classes.
        given: Llama's keys that follow from those of the file.
        tensors: Llama's key → our weight of the first layer whose presence says that it is true.
        neutral: keys with an effect, and the values at which they have none.
        interleaved: rows of q and k are interleaved: the two halves of each head take turns.
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
        models: published ones that are of this class.
        keys: the class's keys with an effect → their defaults; REQUIRED where a file must state it.
        called: Llama's key → this class's.
        also: another name that files use for a key → the class's.
        echoes: key without effect that files write beside another one → that one, which it must
            equal.
        inert: keys of this class without effect on the text.
        neutral: keys with an effect, and the values at which they have none.
        form: of its layers.
        vary: changes of the form that keys decide.
        biases: key → the modules that have a bias if it is true; "" stands for always.
        windows: which layers the sliding window holds for: none, all, those that layer_types names,
            or those and behind max_window_layers, if use_sliding_window is true ("switched").
        full_every: without layer_types, each so many-th layer sees everything.
        full_last: the last layer does, whatever is stated.
        shares: the last layers may read keys and values of earlier ones (`num_kv_shared_layers`).
        global_heads: the layers that see everything have heads of their own width and number.
        scores: factor of q · k; None = keys or the heads' width say it.
        unrotated: which layers are not rotated: none, all, those that no_rope_layers lists, or,
            where there is a window, those without one.
        states: type of layers other than attention → what they are (`config.Layer.kind`).
        one_part: layers mix tokens or are a feed-forward part, not both.
        with_experts: the entry that counts instead unless the number of experts is 0.
        rope_by_type: rotary parameters are given by type of layer, and a `rope_scaling` is of the
            full layers alone.
        must_state: keys whose default is of another architecture, so that a file must state them.
        not_null: keys that a file may leave out, but not state as null.
        activations: names of pointwise functions that mean another one in this class.
        rotations: kinds of rotary scaling that it takes; None = all.
        rope_states: keys that a stated table of rotary parameters must have.
        rope_default: rotary parameters where a file states none, if not the plain ones of θ; a
            table for each type where `rope_by_type`.
        mixture: of experts, if there are any.
        grown_queries: queries grow with their position (Ministral 3).
        interleaved: rotated pairs of channels are neighbours.
        embed_root: embeddings are multiplied by √hidden.
        plus_one: norms multiply by 1 + weight.
        position_offset: row of the learned positions that position 0 uses.
        names: of its weights.
        gguf: its GGUF files, if they are read.
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
    "num_key_value_heads": None,  # as many as heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""What nearly every class has, with the commonest defaults."""
