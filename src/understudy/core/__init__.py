"""Trees of arrays, specs, steps, episodes, batches and errors: what every other package knows. Numpy only."""

from understudy.core.batch import BlockBatch, SequenceBatch, TransitionBatch
from understudy.core.episode import KINDS, SPLITS, Episode, EpisodeInfo, Kind, Split
from understudy.core.errors import (
    BacklogError,
    DamageError,
    DeliveryError,
    EpisodeError,
    FencedError,
    RefusedError,
    SequenceError,
    SpecError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    StoreFormatError,
    StoreLockedError,
    UnavailableError,
    UnderstudyError,
    WireError,
)
from understudy.core.spec import ArraySpec, Spec, text
from understudy.core.step import NO_VERSION, Source, Step, StepSpec
from understudy.core.tree import AnyTree, Nested, Tree

__all__ = [
    "KINDS",
    "NO_VERSION",
    "SPLITS",
    "AnyTree",
    "ArraySpec",
    "BacklogError",
    "BlockBatch",
    "DamageError",
    "DeliveryError",
    "Episode",
    "EpisodeError",
    "EpisodeInfo",
    "FencedError",
    "Kind",
    "Nested",
    "RefusedError",
    "SequenceBatch",
    "SequenceError",
    "Source",
    "Spec",
    "SpecError",
    "Split",
    "Step",
    "StepSpec",
    "StoreClosedError",
    "StoreError",
    "StoreFailedError",
    "StoreFormatError",
    "StoreLockedError",
    "TransitionBatch",
    "Tree",
    "UnavailableError",
    "UnderstudyError",
    "WireError",
    "text",
]
