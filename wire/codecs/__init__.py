"""Arrays as frames: token ids, truncated distributions, and distributions as integer counts."""

from wire.codecs.counts import decode_counts, encode_counts
from wire.codecs.ids import decode_ids, encode_ids
from wire.codecs.sparse import decode_sparse, encode_sparse

__all__ = [
    "decode_counts",
    "decode_ids",
    "decode_sparse",
    "encode_counts",
    "encode_ids",
    "encode_sparse",
]
