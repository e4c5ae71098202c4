"""Node of an edge's target: the program `pilotfish edge worker`."""
