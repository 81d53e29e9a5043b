"""Estimates of an on-policy run before it starts: memory of each GPU, time and cost."""
