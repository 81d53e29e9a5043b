"""Sensors: samples of several sensors at their own rates become rows, each with the latest sample of every sensor.

    sensors = Sensors({"front": Sensor(hz=30), "joints": Sensor(hz=200, keep_all=True)})
    spec = sensors.timed_spec(spec)
    ...
    sensors.put("front", frame)  # in the thread of the camera
    sensors.put("joints", positions)  # in that of the arm
    ...
    sensors.begin()
    seen = sensors.read()  # in the control loop, for each step
    writer.append(Step(observation=seen.observation, action=action, reward=0.0, extras=seen.extras))
    ...
    writer.end(sensors.read().observation, labels={"fps": "30", **sensors.labels()})

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| of a sensor, in `put` | - | - | - |
| control loop, in `read` | the samples since its last call | - | - |
| `wait` | - | a sensor without a sample | `put` |
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from understudy.core import times
from understudy.core import tree as trees
from understudy.core.errors import EpisodeError, SpecError
from understudy.core.step import StepSpec
from understudy.core.suggestion import did_you_mean
from understudy.core.times import SensorCounts
from understudy.core.tree import Tree

MAX_SAMPLES = 100_000  # between two rows; older ones are dropped and counted
LATE_PERIODS = 1.5


@dataclass(frozen=True, kw_only=True)
class Sensor:
    """A sensor of an observation. Without its rate, nothing of it is counted as dropped or late."""

    hz: float | None = None  # samples per second that it should give
    keep_all: bool = False  # every sample is kept, and not only that of the row

    def __post_init__(self) -> None:
        if self.hz is not None and not self.hz > 0:
            raise SpecError(f"hz: expected samples per second above 0, got {self.hz:g}; leave it out if it is unknown")

    @property
    def period_ns(self) -> float | None:
        return None if self.hz is None else 1e9 / self.hz


@dataclass(frozen=True, kw_only=True)
class SensorReading:
    """What a step has of the sensors: the latest sample of each, its times and its age."""

    observation: Tree
    extras: Tree
    age_ns: Mapping[str, int]  # by field: "observation/front"


class Sensors:
    """The sensors of an observation, by the names of its fields. For any number of threads."""

    def __init__(self, sensors: Mapping[str, Sensor]):
        if not sensors:
            raise SpecError("sensors: expected at least one, got none; name the fields of the observation")
        self._changed = threading.Condition()
        self._streams = {name: _Stream(sensor) for name, sensor in sensors.items()}

    def timed_spec(self, spec: StepSpec) -> StepSpec:
        """The spec with the times of all sensors, and the samples of those that keep all."""
        missing = sorted(spec.observation.flat.keys() ^ self._streams.keys())
        if missing:
            raise SpecError(
                f"observation/{missing[0]}: is only in the {'sensors' if missing[0] in self._streams else 'spec'}; "
                f"name a sensor for each field of the observation"
            )
        paths = [_path(name) for name in self._streams]
        return times.timed_spec(spec, paths, [_path(n) for n, one in self._streams.items() if one.sensor.keep_all])

    def put(self, name: str, value: Any, *, monotonic_ns: int | None = None, wall_ns: int | None = None) -> None:
        """Take a sample, which is copied. Its times are those of its capture; without them, now."""
        if name not in self._streams:
            advice = did_you_mean(name, self._streams, "check its name")
            raise SpecError(f"{name}: expected one of the sensors {', '.join(self._streams)}, got another; {advice}")
        now = time.monotonic_ns()
        captured = now if monotonic_ns is None else monotonic_ns
        if captured > now:
            raise EpisodeError(
                f"{name}: expected a capture time up to now, {now} ns of the monotonic clock, got {captured}; give "
                f"time.monotonic_ns() of this machine, or leave it out"
            )
        wall = time.time_ns() - (now - captured) if wall_ns is None else wall_ns
        sample = _Sample(value if isinstance(value, str) else np.array(value), captured, wall)
        with self._changed:
            self._streams[name].put(name, sample)
            self._changed.notify_all()

    def wait(self, timeout_s: float = 10.0) -> None:
        """Wait until every sensor has given a sample; an EpisodeError that names those that have not."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._silent(), timeout_s):
                raise EpisodeError(
                    f"{', '.join(self._silent())}: no sample within {timeout_s:g} s; check that the sensor is "
                    f"connected and that its thread calls put"
                )

    def _silent(self) -> list[str]:
        return [name for name, stream in self._streams.items() if stream.latest is None]

    def begin(self) -> None:
        """Begin an episode: counts start at 0, and samples from before are not in its first row's `samples`."""
        with self._changed:
            for stream in self._streams.values():
                stream.begin()

    def read(self) -> SensorReading:
        """The latest sample of each sensor, and all since the last call of those that keep all."""
        with self._changed:
            silent = self._silent()
            if silent:
                raise EpisodeError(f"{silent[0]}: has given no sample yet; call wait() before the episode begins")
            now, wall = time.monotonic_ns(), time.time_ns()
            extras: dict[str, Any] = {f"{times.MONOTONIC}/{times.TICK}": now, f"{times.TIME}/{times.TICK}": wall}
            observation: dict[str, Any] = {}
            age_ns: dict[str, int] = {}
            for name, stream in self._streams.items():
                path, latest = _path(name), stream.latest
                assert latest is not None
                observation[name], age_ns[path] = latest.value, now - latest.monotonic_ns
                extras |= {f"{times.MONOTONIC}/{path}": latest.monotonic_ns, f"{times.TIME}/{path}": latest.wall_ns}
                extras |= stream.take(path, now)
        whole: dict[str, Any] = {path: np.asarray(value) for path, value in extras.items()}
        return SensorReading(observation=trees.unflatten(observation), extras=trees.unflatten(whole), age_ns=age_ns)

    @property
    def counts(self) -> dict[str, SensorCounts]:
        """What became of the samples since `begin`, by field."""
        with self._changed:
            return {_path(name): stream.counts for name, stream in self._streams.items()}

    def labels(self) -> dict[str, str]:
        """The counts as a label of the episode, which `understudy info` and the page show."""
        return {times.SENSORS: times.counts_to_label(self.counts)}


class _Sample(NamedTuple):
    value: Any
    monotonic_ns: int
    wall_ns: int


@dataclass
class _Stream:
    """The samples of one sensor."""

    sensor: Sensor
    latest: _Sample | None = None
    counts: SensorCounts = SensorCounts()  # noqa: RUF009 (a frozen value)
    _new: deque[_Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))  # since the last row

    def begin(self) -> None:
        self.counts = SensorCounts()
        self._new.clear()

    def put(self, name: str, sample: _Sample) -> None:
        before = self.latest
        if before is not None and sample.monotonic_ns <= before.monotonic_ns:
            raise EpisodeError(
                f"{name}: expected a capture time after {before.monotonic_ns} ns, that of the sample before, got "
                f"{sample.monotonic_ns}; give samples in their order, each once"
            )
        period, dropped, unused = self.sensor.period_ns, 0, 0
        if period is not None and before is not None:
            dropped = max(round((sample.monotonic_ns - before.monotonic_ns) / period) - 1, 0)
        if self.sensor.keep_all:
            unused = int(len(self._new) == MAX_SAMPLES)
        elif self._new:
            unused = 1
            self._new.clear()
        self._new.append(sample)
        self.latest = sample
        self.counts += SensorCounts(received=1, dropped=dropped, unused=unused)

    def take(self, path: str, now_ns: int) -> dict[str, Any]:
        """Count a row; the samples since the one before, if all are kept."""
        assert self.latest is not None
        age_ns, period = now_ns - self.latest.monotonic_ns, self.sensor.period_ns
        late = int(period is not None and age_ns > LATE_PERIODS * period)
        self.counts += SensorCounts(late=late, oldest_ms=age_ns / 1e6)
        samples = list(self._new)
        self._new.clear()
        if not self.sensor.keep_all:
            return {}
        like = np.asarray(self.latest.value)
        values = np.array([sample.value for sample in samples], like.dtype)
        return {
            f"{times.SAMPLES}/{path}": values.reshape(len(samples), *like.shape),
            f"{times.SAMPLES_TIME}/{path}": np.array([sample.wall_ns for sample in samples], np.int64),
            f"{times.SAMPLES_MONOTONIC}/{path}": np.array([sample.monotonic_ns for sample in samples], np.int64),
        }


def _path(name: str) -> str:
    return trees.join("observation", name)
