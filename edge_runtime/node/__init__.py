"""A node of some edge's target: `pilotfish edge worker`."""
