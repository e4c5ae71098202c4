"""The link between device and edge: messages, codecs, encrypted sockets, and the protocols of a round."""
