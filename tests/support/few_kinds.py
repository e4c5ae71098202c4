"""Few kinds of tiny models in every process of a selftest, so that it takes a few seconds.

By ``PILOTFISH_PROTOCOLS=tests.support.few_kinds``, whose modules all processes import.
"""

from pilotfish.lab.selftest import models

KINDS = (models.TARGET, "lfm2")  # one of those that keep states

for _name in [*models.KINDS]:
    if _name not in KINDS:
        del models.KINDS[_name]
models.BOTH_ENDS = tuple(name for name in models.BOTH_ENDS if name in KINDS)
