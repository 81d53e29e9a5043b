"""Durable: the one way to write files that must survive a crash, and the lock of the process that writes."""
