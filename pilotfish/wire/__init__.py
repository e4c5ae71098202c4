"""The link between device and edge: messages, codecs, encrypted sockets, speculation protocols."""
