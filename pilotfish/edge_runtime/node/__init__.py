"""A node of an edge's target: `pilotfish edge worker`."""
