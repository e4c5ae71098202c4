"""Drafting rules that a device and an edge's own drafter share."""
