"""HDF5 files of others, read by a process of their own."""

from understudy.formats.hdf5.reader import Dataset, Group, Hdf5Reader

__all__ = ["Dataset", "Group", "Hdf5Reader"]
