"""The device: a small model that drafts, and the session loop that has its drafts verified."""
