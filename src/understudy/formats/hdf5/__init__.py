"""Reads HDF5 files in a separate process, because a damaged file can crash the HDF5 library."""

from understudy.formats.hdf5.reader import Dataset, Group, Hdf5Reader

__all__ = ["Dataset", "Group", "Hdf5Reader"]
