"""Demonstrations of robomimic and LIBERO in HDF5, both ways."""

from understudy.formats.robomimic.format import FORMAT, RobomimicFormat

__all__ = ["FORMAT", "RobomimicFormat"]
