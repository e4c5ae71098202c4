"""Emulate a link in front of an edge: slow, long, lossy, or by a trace."""
