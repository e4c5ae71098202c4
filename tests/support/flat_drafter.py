"""A drafter without a model, whose distributions are nearly uniform."""

import numpy as np

from pilotfish.bridge import TrivialBridge
from pilotfish.drafting.text_drafter import TextDrafter
from pilotfish.drafting.window import Drafter, Level


class FlatDrafter(TextDrafter):
    """Predicts nearly uniform distributions, of which no token is negligible."""

    def __init__(self, vocab_size):
        Drafter.__init__(self)  # no memory of texts
        self.bridge = TrivialBridge(vocab_size)

    def _open(self, committed, expansion, protocol):
        return expansion

    def _level(self, tree, *, unread):
        shape = len(tree.level), self.bridge.vocab_size
        return Level(np.random.default_rng(len(tree)).random(shape).astype(np.float32))
