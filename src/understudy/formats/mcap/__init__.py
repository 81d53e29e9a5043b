"""Reads MCAP recordings, and writes episodes as MCAP for Foxglove and rosbag tools."""

from understudy.formats.mcap.format import FORMAT, McapFormat

__all__ = ["FORMAT", "McapFormat"]
