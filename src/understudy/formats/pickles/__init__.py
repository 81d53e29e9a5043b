"""Pickles of lists of arrays, read as data: nothing in a file is imported, called or built but numpy arrays."""

from understudy.formats.pickles.unpickler import load_items
from understudy.formats.pickles.write import dump_item

__all__ = ["dump_item", "load_items"]
