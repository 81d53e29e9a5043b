"""HIL-SERL's pickles of transitions: read without running code in them, and written."""

from understudy.formats.hil_serl.format import FORMAT, HilSerlFormat

__all__ = ["FORMAT", "HilSerlFormat"]
