"""Measure answers on real devices and links, and report their latency, bytes and acceptance."""
