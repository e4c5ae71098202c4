"""Improve a drafter for one target: collect the target's answers, train on them, measure."""
