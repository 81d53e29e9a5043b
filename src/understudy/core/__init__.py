"""The nouns: trees, specs, steps, episodes, batches and errors. Numpy only."""

from understudy.core.batch import SequenceBatch, TransitionBatch
from understudy.core.episode import KINDS, SPLITS, Episode, EpisodeInfo, Kind, Split
from understudy.core.errors import (
    DamageError,
    EpisodeError,
    SequenceError,
    SpecError,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    StoreFormatError,
    StoreLockedError,
    UnderstudyError,
)
from understudy.core.spec import ArraySpec, Spec, text
from understudy.core.step import NO_VERSION, Source, Step, StepSpec
from understudy.core.tree import Tree

__all__ = [
    "KINDS",
    "NO_VERSION",
    "SPLITS",
    "ArraySpec",
    "DamageError",
    "Episode",
    "EpisodeError",
    "EpisodeInfo",
    "Kind",
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
    "UnderstudyError",
    "text",
]
