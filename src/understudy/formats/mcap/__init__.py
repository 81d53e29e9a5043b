"""MCAP: episodes to look at in Foxglove and with rosbag tools."""

from understudy.formats.mcap.format import FORMAT, McapFormat

__all__ = ["FORMAT", "McapFormat"]
