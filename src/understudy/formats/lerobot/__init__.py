"""LeRobot datasets, v2.1 and v3: parquet tables, and cameras as video or images. lerobot itself is not needed."""

from understudy.formats.format import FormatError


class MissingError(FormatError, ImportError):
    """A library that this format needs is not installed."""


try:
    from understudy.formats.lerobot.format import FORMAT
except ModuleNotFoundError as error:
    raise MissingError(f"lerobot: needs {error.name}; run `pip install 'understudy-robotics[lerobot]'`") from error

__all__ = ["FORMAT"]
