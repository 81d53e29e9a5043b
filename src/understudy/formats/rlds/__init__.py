"""RLDS: episodes as TensorFlow Datasets keeps them, read and written without TensorFlow."""

from understudy.formats.rlds.dataset import open_dataset
from understudy.formats.rlds.format import FORMAT, RldsFormat
from understudy.formats.rlds.rows import RldsEpisodes, read_rlds

__all__ = ["FORMAT", "RldsEpisodes", "RldsFormat", "open_dataset", "read_rlds"]
