"""Runs: what every run has: its directory, config, checkpoints, metrics, health and scores."""
