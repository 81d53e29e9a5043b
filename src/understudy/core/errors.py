"""The errors that several packages share. Each message names the field, what was expected, what was got, and a fix."""

from __future__ import annotations

from collections.abc import Sequence


class UnderstudyError(Exception):
    """Base of all errors that are meant for the user; commands print them as one sentence, without a traceback."""


class SpecError(UnderstudyError, ValueError):
    """A value does not fit its Spec; the message begins with the path of the field."""


class EpisodeError(UnderstudyError, ValueError):
    """Steps are in an order that no episode can have."""


class StoreError(UnderstudyError):
    """Base of the errors of the experience store."""


class StoreLockedError(StoreError):
    """Another process is writing to this store."""


class StoreFormatError(StoreError):
    """The directory is not a store, or this version cannot open it there."""


class StoreFailedError(StoreError):
    """Reading or writing a file failed; the store accepts no more commits until it is opened again."""


class StoreClosedError(StoreError):
    """The store was closed, or belongs to the process this one was forked from."""


class TooManyFilesError(StoreError):
    """The process may not open more files now; nothing is wrong with the store, and trying again may help."""


class DamageError(StoreError):
    """Bytes on disk are not the bytes that were written, or the disk does not give them back."""


class UnreadableError(DamageError):
    """The disk does not give bytes back."""


class SequenceError(StoreError):
    """A chunk does not follow the last one of its writer."""


class FencedError(SequenceError):
    """A newer process writes under this name; the older one may write no more."""

    def __init__(self, message: str, *, last_seq: int = -1, checks: Sequence[int] = ()):
        super().__init__(message)
        self.last_seq = last_seq  # of the chunks of the older one, the last that is stored
        self.checks = tuple(checks)  # and the checksums of its last ones, the newest last


class CopiedError(FencedError):
    """A copy of this writer is alive: another process sends other rows under the same incarnation."""


class DeliveryError(UnderstudyError):
    """Base of the errors between this process and a server."""


class UnavailableError(DeliveryError):
    """The server cannot be reached, or not now; trying again may help."""


class RefusedError(DeliveryError):
    """The server refuses this client or its request."""


class WireError(DeliveryError):
    """Bytes that are no message, or a damaged one."""


class BacklogError(DeliveryError):
    """Steps were appended faster than they could be recorded; this step was not accepted."""
