"""Pickles of lists of arrays, read as data: nothing in a file is imported, called or built but numpy arrays."""

from understudy.formats.safe_pickle.unpickler import load_items
from understudy.formats.safe_pickle.write import dump_item

__all__ = ["dump_item", "load_items"]
