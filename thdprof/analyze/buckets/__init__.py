"""What to capture: statistics of the micro-batches, costs, and the choice of buckets."""
