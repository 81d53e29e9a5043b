"""Trains robot policies from demonstrations, practice and human correction."""

__version__ = "0.1.0"
