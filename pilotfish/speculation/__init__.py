"""Pure maths of speculative decoding on numpy arrays: no I/O, no clocks, no models.

Everything here can be enumerated, and is: see ``tests/test_speculation_*.py``.
"""
