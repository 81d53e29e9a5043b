"""Maintain: verify, repair, compact, back up and summarize a store."""
