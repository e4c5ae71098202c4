"""Measuring and reporting: what a generation cost, and where its time went."""
