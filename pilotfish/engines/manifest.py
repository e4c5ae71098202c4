"""`manifest.json`: facts about an artifact that a program needs before it loads the graph.

`engines.manifest_file` reads and checks the file; `Manifest.encode` returns the bytes to write.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from pilotfish.engines.stage_range import StageRange

MANIFEST_NAME = "manifest.json"
GRAPH_NAME = "model.onnx"
GGUF_NAME = "model.gguf"  # the file that replaces the graph if llama.cpp runs the model
# a file next to the graph, written by ONNX Runtime GenAI's builder
GENAI_NAME = "genai_config.json"
HEAD_NAME = "head.onnx"  # a first stage's graph from hidden states to logits
HEAD_TOKENS_NAME = "head_tokens.bin"  # for a cut head: token id of each row of the head
TOKENIZER_NAME = "tokenizer.json"
FORMAT = 1

Precision = Literal["fp32", "fp16", "int8", "int4", "stored"]
STORED: Literal["stored"] = "stored"  # every weight in the format of the checkpoint
# Precision of the output projection, where it differs from the other weights'. With 4 bits the
# output projection loses a drafter more acceptance than any other layer, and 8 bits take hardly
# more time.
HEADS: dict[Precision, Precision] = {"int4": "int8"}
# Precision in a manifest. "gguf": the precision of the GGUF file's blocks, of any type; "genai":
# the precision of the graph from ONNX Runtime GenAI's builder.
Stored = Literal[Precision, "gguf", "genai"]
LLAMACPP: Literal["llamacpp"] = "llamacpp"
GENAI: Literal["genai"] = "genai"
Dialect = Literal["opset24", "opset17", "contrib", "tensorrt", "llamacpp", "genai"]
OPSET24 = 24  # opset of the graphs of the dialects opset24 and tensorrt
Positive = Annotated[int, msgspec.Meta(ge=1)]
MOST_LAYERS = 4096
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The origin of the weights.

    `location` is a hub id, a file name or a directory name; it is not a path, because a path would
    reveal details of the machine. `sha256` has the hash of each file that was read. `first_layers`
    is the number of layers that remain in a shortened model, `skipped_layers` are the indices of
    the layers that were left out of a model. `ignored_keys` are configuration keys that the
    exporter did not know: it was asked to ignore them, or transformers ignores them. `left_out`
    lists the parts of a multimodal checkpoint outside its text model, and special tokens without an
    embedding.
    """

    kind: Literal["default", "gguf", "directory", "hub", "random"]
    location: str
    revision: str | None = None
    sha256: dict[str, Sha256] = {}
    ignored_keys: list[str] = []
    left_out: list[str] = []
    first_layers: Positive | None = None
    skipped_layers: list[Annotated[int, msgspec.Meta(ge=0)]] = []


class Dimensions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the model; `context` is the number of positions that it supports."""

    layers: Layers
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    intermediate: Size
    context: Size


class RecurrentStates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recurrent states, which some layers keep per slot instead of keys and values.

    `layers` are the indices of these layers, from 0. Each of them keeps `width` numbers per token,
    which a convolution over `taps` tokens reads; if `heads` > 0, it also keeps a state [heads,
    key_dim, value_dim]. `window` is the number of tokens that a rollback can drop without running
    other tokens again. A model with recurrent states cannot read token trees. See `engines.states`.
    """

    layers: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    taps: Annotated[int, msgspec.Meta(ge=2, le=16)]
    width: Positive
    heads: Annotated[int, msgspec.Meta(ge=0)] = 0
    key_dim: Annotated[int, msgspec.Meta(ge=0)] = 0
    value_dim: Annotated[int, msgspec.Meta(ge=0)] = 0
    window: Positive


class CachedLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a layer's keys and values per token; `layer` counts from 0."""

    layer: Annotated[int, msgspec.Meta(ge=0)]
    kv_heads: Positive
    head_dim: Positive


class PrecisionCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effect of rounding weights and activations, measured on a text of `tokens` tokens.

    p is the next-token distribution of the model in float32, q the artifact's, both at temperature
    1. `kl` is the mean of KL(p ‖ q) in nats, `acceptance` the mean of Σ min(p, q).
    """

    kl: Annotated[float, msgspec.Meta(ge=0)]
    acceptance: Annotated[float, msgspec.Meta(ge=0, le=1)]
    tokens: Positive


# fields that `Manifest.encode` omits if they are None
_OPTIONAL = (
    "window", "states", "caches", "cost", "head_tokens", "mask_token", "drafts_per_pass",
    "special_tokens", "calibrated_matrices",
)  # fmt: skip


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `manifest.json`.

    `vocab_size` is the number of the tokenizer's tokens; `padded_vocab_size` is the width of the
    logits in the graph. `tokenizer_fingerprint` is a hash of the token strings in the order of
    their ids, so it is equal for equal vocabularies from different files. `head` is the precision
    of the output projection; None if it equals `precision`. `chat_templates` are further templates
    by name; "tool_use" replaces `chat_template` in chats with tools. `special_tokens` are the
    tokens that templates may name, such as bos_token; None if the exporter did not store them: then
    `bos_id` and `eos_ids` determine them. `warnings` are the export's warnings, a sentence each.

    An artifact of the dialect llamacpp has no graph: `opset` is None and `kv_dtype` has no effect.
    `stage` is None for a whole model; in a stage, `files` lists the stage's files, and all other
    fields describe the whole model. `window` is the size (positions) of the smallest attention
    window of any layer; None without windows. `states` describes the layers with recurrent states;
    None if there are none. `caches` lists the layers that store keys and values; None if these are
    all layers without states, in the shape of `dimensions`. `cost` is the cost of the precision;
    None if it was not measured. `trees` is whether the graph has a mask for token trees,
    `hidden_states` whether it returns hidden states; only graphs of the dialect genai may lack
    these. `head_tokens` is the number of logits of a cut head; None for a whole head. A model with
    a cut head still reads all tokens. `mask_token` is the token that stands for an unknown token in
    a model trained to draft several tokens in one pass; None for other models. It may be a padding
    row of the embedding, beyond `vocab_size`. `drafts_per_pass` is the number of drafts that it was
    trained to make in a pass; None if the checkpoint does not state it. `calibrated_matrices` is
    the number of matrices that were rounded to 4 bits by their inputs on a built-in text; None if
    there are none.
    """

    format: int = FORMAT
    model: str
    source: Source
    architecture: str
    precision: Stored
    head: Precision | None = None
    dialect: Dialect
    opset: Positive | None
    dimensions: Dimensions
    vocab_size: Size
    padded_vocab_size: Size
    kv_dtype: Literal["float32", "float16"]
    bos_id: TokenId | None
    eos_ids: list[TokenId]
    chat_template: str | None
    chat_templates: dict[str, str] = {}
    special_tokens: dict[str, str] | None = None
    warnings: list[str] = []
    tokenizer_fingerprint: Sha256
    files: dict[str, Sha256]
    stage: StageRange | None = None
    window: Positive | None = None
    states: RecurrentStates | None = None
    caches: list[CachedLayer] | None = None
    cost: PrecisionCost | None = None
    trees: bool = True
    hidden_states: bool = True
    head_tokens: Size | None = None
    mask_token: TokenId | None = None
    drafts_per_pass: Positive | None = None
    calibrated_matrices: Positive | None = None

    @property
    def readable_tokens(self) -> int:
        """The number of token ids that the graph may read: the vocabulary, and the mask token."""
        return max(self.vocab_size, 0 if self.mask_token is None else 1 + self.mask_token)

    @property
    def why_chains_only(self) -> str | None:
        """The reason why the model reads no token trees, as a predicate.

        None if the model reads trees.
        """
        if self.states is not None:
            return "has recurrent states, which follow one chain of tokens"
        return None if self.trees else "has a graph without a mask for token trees"

    @property
    def layers(self) -> int:
        """The number of layers in the graph: of the stage, or of the whole model."""
        return self.dimensions.layers if self.stage is None else self.stage.layers

    @property
    def cached(self) -> list[CachedLayer]:
        """The layers of the graph that store keys and values, numbered within the graph."""
        if self.caches is not None:
            first = 0 if self.stage is None else self.stage.first_layer
            stage_layers = range(first, first + self.layers)
            return [
                msgspec.structs.replace(each, layer=each.layer - first)
                for each in self.caches
                if each.layer in stage_layers
            ]
        without = set() if self.states is None else set(self.states.layers)
        sizes = self.dimensions
        return [
            CachedLayer(layer=layer, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim)
            for layer in range(self.layers)
            if layer not in without
        ]

    @property
    def shares_caches(self) -> bool:
        """Whether some layers read the keys and values of other layers."""
        listed = self.caches is not None and self.states is None
        return listed and len(self.cached) < self.layers

    @property
    def digest(self) -> str:
        """The artifact's identity, 16 hex digits: a hash of the names and hashes of its files."""
        listed = "".join(f"{name} {value}\n" for name, value in sorted(self.files.items()))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    @property
    def origin(self) -> str:
        """The weights' identity, 16 hex digits, equal for all precisions and dialects.

        It is a hash of the source files' SHA-256s in the order of the file names; the names are not
        hashed. For random weights, which have no files, it is a hash of source and dimensions. A
        model that was shortened to its first layers, or without some layers, has another origin
        than the whole model.
        """
        source = self.source
        hashes = [value for _, value in sorted(source.sha256.items())]
        if hashes and source.first_layers is not None:
            hashes.append(f"first {source.first_layers} layers")
        if hashes and source.skipped_layers:
            hashes.append(f"without layers {source.skipped_layers}")
        facts = (source.kind, source.location, source.revision, self.dimensions)
        return hashlib.sha256(msgspec.json.encode(hashes or facts)).hexdigest()[:16]

    def encode(self) -> bytes:
        """Encode the manifest as indented JSON, the content of `manifest.json`."""
        fields = msgspec.to_builtins(self)
        if self.stage is None:
            # fields without content are omitted, so that the bytes equal those of older versions
            del fields["stage"]
        if self.head is None:
            del fields["head"]
        for name in ("chat_templates", "warnings"):
            if not fields[name]:
                del fields[name]
        if self.source.first_layers is None:
            del fields["source"]["first_layers"]
        for name in ("ignored_keys", "left_out", "skipped_layers"):
            if not fields["source"][name]:
                del fields["source"][name]
        for name in _OPTIONAL:
            if fields[name] is None:
                del fields[name]
        for name in ("trees", "hidden_states"):
            if fields[name]:
                del fields[name]
        return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"
