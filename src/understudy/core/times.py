"""Times: where a step keeps when its parts were captured, and how old they were.

| extras | what it is |
|---|---|
| `time/tick`, `monotonic/tick` | when the row was made |
| `time/FIELD`, `monotonic/FIELD` | when the value of a field in this row was captured: `time/observation/front` |
| `samples/FIELD` | all values of a fast sensor since the row before, [n, ...] |
| `samples_time/FIELD`, `samples_monotonic/FIELD` | when each of these was captured, [n] |

Times are int64 nanoseconds: `time` since 1970, by the wall clock, which may jump; `monotonic` by a clock of one
machine, which never does. A row has the latest value at or before its tick.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from understudy.core import tree as trees
from understudy.core.errors import SpecError
from understudy.core.spec import ArraySpec, Spec
from understudy.core.step import StepSpec
from understudy.core.suggestion import did_you_mean
from understudy.core.tree import Tree

TIME, MONOTONIC, SAMPLES = "time", "monotonic", "samples"  # below `extras`
SAMPLES_TIME, SAMPLES_MONOTONIC = "samples_time", "samples_monotonic"
CLOCKS = (TIME, MONOTONIC)
TICK = "tick"
SENSORS = "sensors"  # label of an episode: JSON of SensorCounts, by field
LATE_STEPS = "late_steps"  # label of an episode: steps that took longer than the period of its control rate


@dataclass(frozen=True, kw_only=True)
class SensorCounts:
    """What became of the samples of a sensor during an episode."""

    received: int = 0
    dropped: int = 0  # that should have come by its rate, and did not
    late: int = 0  # rows whose newest sample was older than one and a half periods
    unused: int = 0  # samples that are in no row: a newer one came before the next tick
    oldest_ms: float = 0.0  # age of the oldest sample that a row has

    def __add__(self, other: SensorCounts) -> SensorCounts:
        return SensorCounts(
            received=self.received + other.received,
            dropped=self.dropped + other.dropped,
            late=self.late + other.late,
            unused=self.unused + other.unused,
            oldest_ms=max(self.oldest_ms, other.oldest_ms),
        )


def timed_spec(spec: StepSpec, fields: Collection[str], samples: Collection[str] = ()) -> StepSpec:
    """The spec with the times of these fields in its extras, such as "observation/front".

    Of the fields in `samples` all values between two rows are kept.
    """
    time = ArraySpec(shape=(), dtype="int64")
    added = {f"{clock}/{TICK}": time for clock in CLOCKS}
    for path in fields:
        if path not in spec.columns:
            advice = did_you_mean(path, spec.columns, f"it has {_names(spec)}")
            raise SpecError(f"{path}: expected a field of the spec, got none of this name; {advice}")
        added |= {f"{clock}/{path}": time for clock in CLOCKS}
    for path in samples:
        if path not in fields or spec.columns[path].ragged or spec.columns[path].codec is not None:
            raise SpecError(
                f"{path}: expected one of the timed fields, of a fixed shape and without a codec, to keep all samples "
                f"of, got another; leave it out of the samples"
            )
        leaf = replace(spec.columns[path], shape=(None, *spec.columns[path].shape))
        times = ArraySpec(shape=(None,), dtype="int64")
        added |= {f"{SAMPLES}/{path}": leaf, f"{SAMPLES_TIME}/{path}": times, f"{SAMPLES_MONOTONIC}/{path}": times}
    taken = sorted(added.keys() & spec.extras.flat.keys())
    if taken:
        raise SpecError(f"extras/{taken[0]}: the spec has this field already; give the spec without times")
    return replace(spec, extras=Spec(trees.unflatten({**spec.extras.flat, **added})))


def _names(spec: StepSpec) -> str:
    return ", ".join(path for path in spec.columns if path.partition("/")[0] in ("observation", "action"))


def ages(extras: Tree, clock: str = TIME) -> dict[str, Any]:
    """How old each timed field was when its row was made, in nanoseconds, by field.

    `extras` are those of a step, an episode or a batch; the ages have their shape.
    """
    flat = trees.flatten(extras)
    tick = flat.get(f"{clock}/{TICK}")
    if tick is None:
        return {}
    fields = {path.partition("/")[2]: at for path, at in flat.items() if path.partition("/")[0] == clock}
    return {path: np.asarray(tick) - np.asarray(at) for path, at in fields.items() if path != TICK}


def counts_to_label(counts: Mapping[str, SensorCounts]) -> str:
    return json.dumps({path: asdict(count) for path, count in counts.items()})


def counts_of(labels: Mapping[str, str]) -> dict[str, SensorCounts]:
    """The counts of an episode's sensors; {} if it has none, or others wrote the label."""
    try:
        found = json.loads(labels.get(SENSORS, "{}"))
        return {str(path): SensorCounts(**given) for path, given in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
