"""Recordings of robots (MCAP files and ROS 2 bags) as episodes: topics become fields, ticks become rows."""

from understudy.formats.bags.reader import BagReader

__all__ = ["BagReader"]
