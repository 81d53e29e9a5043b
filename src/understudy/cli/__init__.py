"""The `understudy` command."""

from understudy.cli.main import main

__all__ = ["main"]
