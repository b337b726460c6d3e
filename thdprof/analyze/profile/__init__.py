"""What a report is made of: counts of a run's micro-batches, their file, and joining several."""
