"""The boards that Pilotfish knows: their data, what they can run, and what to expect of it."""
