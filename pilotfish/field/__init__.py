"""Measure generations, and report their cost and where the time goes."""
