"""The device's link to an edge: attempts to connect, liveness of a connection, measurements."""
