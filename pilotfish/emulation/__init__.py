"""Emulate a link in front of an edge: slower, longer, lossy, or by a trace."""
