"""The errors that several packages know; each message says what, got, wanted and what to do next."""

from __future__ import annotations


class UnderstudyError(Exception):
    """Base of all errors that are meant for the person who runs the program."""


class SpecError(UnderstudyError, ValueError):
    """A value does not fit its Spec; the message begins with the path of the field."""


class EpisodeError(UnderstudyError, ValueError):
    """Steps were given in an order that no episode can have."""


class StoreError(UnderstudyError):
    """Base of the errors of the experience store."""


class StoreLockedError(StoreError):
    """Another process is writing to this store."""


class StoreFormatError(StoreError):
    """The directory is not a store, or one that this version cannot open here."""


class StoreFailedError(StoreError):
    """An input or output call failed; the store takes no more commits until it is opened again."""


class StoreClosedError(StoreError):
    """The store was closed, or belongs to the process this one was forked from."""


class DamageError(StoreError):
    """Bytes on disk are not the bytes that were written."""


class SequenceError(StoreError):
    """A chunk does not follow the last one of its writer."""


class FencedError(SequenceError):
    """A newer process writes under this name; the older one may write no more."""

    def __init__(self, message: str, *, last_seq: int = -1):
        super().__init__(message)
        self.last_seq = last_seq  # of the chunks of the older one, the last that is stored


class DeliveryError(UnderstudyError):
    """Base of the errors between this process and a server."""


class UnavailableError(DeliveryError):
    """The server cannot be reached, or not now; trying again may help."""


class RefusedError(DeliveryError):
    """The server does not let this client in, or does not know what it asks for."""


class WireError(DeliveryError):
    """Bytes that are not a message, or not the message that was sent."""


class BacklogError(DeliveryError):
    """More was written than could be recorded in time; the step was not taken."""
