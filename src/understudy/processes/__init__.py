"""Processes: what a Source names, built and kept in an interpreter of its own, and every way in which that can end.

`inside.py` and `messages.py` are loaded over there, by Python 3.9 as well; the rest stays here.
"""
