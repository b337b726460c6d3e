"""The choice of buckets to capture, from statistics of the micro-batches and measured costs."""
