"""Emulate a network link to an edge: a low rate, a high delay, losses, or the rates of a trace."""
