"""Processes: run an object that a FactorySpec names in a subprocess, of any interpreter, and tell how that failed.

`child_main.py` and `messages.py` are loaded by the subprocess, which may be Python 3.9; the rest by the parent.
"""
