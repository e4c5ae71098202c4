"""What distributions cost on the wire, and what their quantisation costs in acceptance.

    python benchmarks/wire.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

q̂, the truncated distribution of `tslt` and `tree`, on recorded rows of the default pair (both
models' logits along the target's own texts at temperature 1), encoded in windows of eight: "bytes"
are those of a distribution in the frame as sent, "paper" the K·(16 + ⌈log₂V⌉) bits of the papers,
"bits" those of a token sent. "beta" is the acceptance of the drafter's untruncated q, "top_k" that
of the truncated one before quantisation, "shipped" that of q̂; "delta_1e3" is shipped − top_k in
thousandths, what quantisation alone changes, "se_1e3" its standard error. "codec_us" is the median
of encoding and decoding one window.

P̃, the distribution that `dssd` sends down, in b bits a row: "paper" is V·16 bits; "beta" is the
acceptance against p, "shipped" that against P̃.

Then real rounds of `coupled` and `dssd` over an edge process: the bytes of a round with a window of
eight, all frames and their headers.

"noise" is what making and racing the shared noise costs the edge in a round of `coupled`; its
ratio is to the target's pass.

Goals: q̂ of 64 tokens in at most 0.6 of the papers' bytes, with the acceptance changed by at most
0.002, encoded and decoded in 100 µs a window; a round of `coupled` at most 64 bytes up, and both
ways at most half of `dssd`'s, and its noise at most 5 % of the pass.
"""

import sys
from importlib import import_module
from pathlib import Path


def step_aside() -> None:
    """Let ``import wire`` mean the package: scripts in this folder find this file first."""
    here, path = Path(__file__).resolve().parent, sys.path.copy()
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != here]
    del sys.modules[__name__]
    try:
        import_module(__name__)
    finally:
        sys.path[:] = path


if __name__ == "__main__":
    from _wire import main

    sys.exit(main(__doc__))
elif __name__ == "wire":
    step_aside()
