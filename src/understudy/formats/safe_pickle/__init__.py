"""Safe reading of pickles: a file can only create numpy arrays, numbers, text and containers, and never runs code."""

from understudy.formats.safe_pickle.unpickler import load_items
from understudy.formats.safe_pickle.write import dump_item

__all__ = ["dump_item", "load_items"]
