"""The device's side of the connection to the edge."""
