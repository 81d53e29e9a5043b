"""Import and export of other projects' dataset formats, without their frameworks."""

from understudy.formats.format import (
    ORIGIN,
    DatasetReader,
    DatasetWriter,
    EncodedDataset,
    EncodedDatasetWriter,
    Field,
    Format,
    FormatError,
    NamedDataset,
    NotedDataset,
)
from understudy.formats.registry import FORMATS, DatasetPath, find_format, parse_dataset_path

__all__ = [
    "FORMATS",
    "ORIGIN",
    "DatasetPath",
    "DatasetReader",
    "DatasetWriter",
    "EncodedDataset",
    "EncodedDatasetWriter",
    "Field",
    "Format",
    "FormatError",
    "NamedDataset",
    "NotedDataset",
    "find_format",
    "parse_dataset_path",
]
