"""Tests of `pilotfish doctor`."""
