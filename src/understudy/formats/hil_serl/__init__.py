"""HIL-SERL's pickles of transitions, read without running them, and written for those who go back."""

from understudy.formats.hil_serl.format import FORMAT, HilSerlFormat

__all__ = ["FORMAT", "HilSerlFormat"]
