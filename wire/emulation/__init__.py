"""Another link in front of an edge: slower, farther, lossier, or as a trace says."""
