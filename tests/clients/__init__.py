"""Clients that people have, each as its registry gives it, against a service of this checkout."""
