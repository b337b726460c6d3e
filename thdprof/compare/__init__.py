"""Holding a plan against what happened, or against another plan."""
