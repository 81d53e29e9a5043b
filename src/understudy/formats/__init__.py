"""Formats of others, read and written without their frameworks."""

from understudy.formats.format import ORIGIN, EpisodeSource, EpisodeTarget, Field, Format, FormatError, Named
from understudy.formats.registry import KNOWN, Place, find_format, find_place

__all__ = [
    "KNOWN",
    "ORIGIN",
    "EpisodeSource",
    "EpisodeTarget",
    "Field",
    "Format",
    "FormatError",
    "Named",
    "Place",
    "find_format",
    "find_place",
]
