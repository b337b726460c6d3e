"""Profiles, of which reports are made: counts of the micro-batches of a run, their file, and the join of several."""
