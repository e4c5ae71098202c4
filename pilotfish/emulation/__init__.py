"""Emulate a network link to an edge: slow, long, lossy, or with the rates of a trace."""
