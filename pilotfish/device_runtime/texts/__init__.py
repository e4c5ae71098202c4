"""The earlier texts of a device, by owner and vocabulary, in memory and on disk."""
