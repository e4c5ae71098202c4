"""Measure pairs, make decision heads, train drafters, and check the providers of a machine."""
