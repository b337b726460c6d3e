"""Comparisons of a plan: with the statistics of a run, and with another plan."""
