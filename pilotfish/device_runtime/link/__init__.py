"""The device's connection to the edge: requests, losses, and measuring the link."""
