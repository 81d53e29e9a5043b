"""Trees of arrays, specs, steps, episodes, batches and errors: what every other package knows. Numpy only."""

from understudy.core.batch import BlockBatch, SequenceBatch, TransitionBatch
from understudy.core.codec import H264, Codec, Jpeg, Png
from understudy.core.episode import KINDS, SPLITS, Episode, EpisodeInfo, Kind, Split
from understudy.core.errors import (
    BacklogError,
    CopiedError,
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
    TooManyFilesError,
    UnavailableError,
    UnderstudyError,
    UnreadableError,
    WireError,
)
from understudy.core.resize import Resize
from understudy.core.sensors import Sensor, SensorReading, Sensors
from understudy.core.spec import ArraySpec, Spec, text
from understudy.core.step import NO_VERSION, Source, Step, StepSpec
from understudy.core.times import SensorCounts, ages, timed_spec
from understudy.core.tree import AnyTree, Nested, Tree

__all__ = [
    "H264",
    "KINDS",
    "NO_VERSION",
    "SPLITS",
    "AnyTree",
    "ArraySpec",
    "BacklogError",
    "BlockBatch",
    "Codec",
    "CopiedError",
    "DamageError",
    "DeliveryError",
    "Episode",
    "EpisodeError",
    "EpisodeInfo",
    "FencedError",
    "Jpeg",
    "Kind",
    "Nested",
    "Png",
    "RefusedError",
    "Resize",
    "Sensor",
    "SensorCounts",
    "SensorReading",
    "Sensors",
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
    "TooManyFilesError",
    "TransitionBatch",
    "Tree",
    "UnavailableError",
    "UnderstudyError",
    "UnreadableError",
    "WireError",
    "ages",
    "text",
    "timed_spec",
]
