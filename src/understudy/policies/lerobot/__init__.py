"""lerobot: policies that lerobot trained, in an interpreter of their own that has lerobot.

It imports nothing: the other interpreter loads `child.py` through it, which needs numpy, torch and lerobot only.
"""
