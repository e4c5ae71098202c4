"""Mathematics of speculative decoding on numpy arrays: no I/O, no clocks, no models.

The tests enumerate all random outcomes of these functions on small examples.
"""
