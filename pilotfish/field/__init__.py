"""Measure generations and report what they cost and where the time went."""
