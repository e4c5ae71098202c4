"""Encode arrays as frames: token ids, truncated distributions, a worker's top K, distributions as
integer counts, hidden states.
"""

from pilotfish.wire.codecs.counts import decode_counts, encode_counts
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS, decode_hidden, encode_hidden, hidden_bytes
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.codecs.sparse import decode_sparse, encode_sparse
from pilotfish.wire.codecs.topk import TOPK_FORMATS, decode_topk, encode_topk

__all__ = [
    "HIDDEN_FORMATS",
    "TOPK_FORMATS",
    "decode_counts",
    "decode_hidden",
    "decode_ids",
    "decode_sparse",
    "decode_topk",
    "encode_counts",
    "encode_hidden",
    "encode_ids",
    "encode_sparse",
    "encode_topk",
    "hidden_bytes",
]
