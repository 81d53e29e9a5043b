"""Reads ROS 2 bags (.db3 or .mcap with metadata.yaml) without a ROS installation."""

from understudy.formats.rosbag2.format import FORMAT, Rosbag2Format

__all__ = ["FORMAT", "Rosbag2Format"]
