"""Durable: the one way to write files that must survive a crash, and the lock of the one process that writes.

Every durable write in the package goes through `durable.files`; no other module calls `os.fsync` or `os.replace`.
"""
