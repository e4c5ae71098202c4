"""Many devices at one edge: N devices replay recorded drafts, and their answers are timed."""
