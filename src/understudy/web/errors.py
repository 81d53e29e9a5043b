"""The errors of opening a server to others."""

from __future__ import annotations

from understudy.core.errors import UnderstudyError


class AccessError(UnderstudyError):
    """A server would let in people who must not come in, or its token cannot be used."""


class ListenError(UnderstudyError):
    """A server cannot listen at its address, or did not start."""
