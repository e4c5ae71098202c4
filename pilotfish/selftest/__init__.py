"""Try every provider of this machine against the CPU, and say what differs.

Models of random weights (`models`) and the default model are exported as each provider can run
them (`shelf`, `providers`). In a process of its own (`trying`), each provider is given passes whose
answers the plainest use of the CPU knows too (`checks`), runs both ends of the protocols
(`protocols`), and is timed (`timing`). A crash or a hang is a finding like others (`running`).
"""
