"""Reads Minari datasets from their HDF5 files."""

from understudy.formats.minari.format import FORMAT, MinariFormat

__all__ = ["FORMAT", "MinariFormat"]
