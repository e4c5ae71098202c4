"""The link: attempts to connect, liveness of a connection, measurements."""
