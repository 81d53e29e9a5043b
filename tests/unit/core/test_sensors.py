"""Sensors at their own rates: the latest sample in each row, all samples of a fast one, times, ages and counts."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.cli import main
from understudy.core import (
    H264,
    ArraySpec,
    EpisodeError,
    Sensor,
    SensorCounts,
    Sensors,
    Spec,
    SpecError,
    Step,
    StepSpec,
    ages,
    sensors,
    text,
    timed_spec,
)
from understudy.core.times import counts_of
from understudy.dashboard.api.episode_rows import steps_of
from understudy.dashboard.api.targets import Target
from understudy.replay import EVERYTHING, Reader, Sampler, Store, summarize, trim

MS = 1_000_000
SPEC = StepSpec(
    observation=Spec(
        {
            "front": ArraySpec(shape=(8, 8, 3), dtype="uint8"),
            "joints": ArraySpec(shape=(2,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
)


class Clock:
    """The two clocks of a machine, which the test moves."""

    def __init__(self) -> None:
        self.monotonic, self.wall = 5_000 * MS, 1_700_000_000_000 * MS

    def monotonic_ns(self) -> int:
        return self.monotonic

    def time_ns(self) -> int:
        return self.wall

    def advance(self, ms: float) -> None:
        self.monotonic += int(ms * MS)
        self.wall += int(ms * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sensors, "time", made)
    return made


def usual() -> Sensors:
    return Sensors({"front": Sensor(hz=30), "joints": Sensor(hz=200, keep_all=True)})


def frame(number: int) -> np.ndarray[Any, Any]:
    return np.full((8, 8, 3), number, np.uint8)


def test_a_row_has_the_latest_sample_of_each_sensor_and_all_of_a_fast_one(clock: Clock) -> None:
    arm = usual()
    arm.put("front", frame(1))
    arm.put("joints", np.float32([0, 0]))
    arm.begin()
    arm.read()
    start = clock.monotonic
    for i in range(1, 8):
        clock.advance(5)
        arm.put("joints", np.float32([i, -i]))
        if i == 4:
            arm.put("front", frame(2), monotonic_ns=start + 18 * MS)  # captured 2 ms before it came
    clock.advance(1)
    seen = arm.read()
    assert isinstance(seen.extras, dict)
    assert np.array_equal(seen.observation["front"], frame(2))
    assert seen.observation["joints"].tolist() == [7, -7]
    assert seen.age_ns == {"observation/front": 18 * MS, "observation/joints": 1 * MS}
    assert seen.extras["monotonic"]["tick"] == start + 36 * MS
    assert seen.extras["monotonic"]["observation"]["front"] == start + 18 * MS
    assert seen.extras["time"]["tick"] - seen.extras["time"]["observation"]["front"] == 18 * MS
    assert seen.extras["samples"]["observation"]["joints"].tolist() == [[i, -i] for i in range(1, 8)]
    assert (seen.extras["samples_monotonic"]["observation"]["joints"] - start).tolist() == [
        5 * MS * i for i in range(1, 8)
    ]
    assert ages(seen.extras) == ages(seen.extras, "monotonic") == seen.age_ns
    again = arm.read()
    assert isinstance(again.extras, dict)
    assert again.extras["samples"]["observation"]["joints"].shape == (0, 2)
    assert np.array_equal(again.observation["front"], frame(2))


def test_what_is_missing_late_or_in_no_row_is_counted(clock: Clock) -> None:
    arm = Sensors({"front": Sensor(hz=100), "joints": Sensor(), "wrist": Sensor(hz=100)})
    for name in ("front", "joints", "wrist"):
        arm.put(name, frame(0))
    arm.begin()
    for name, pauses in {"front": [10, 40, 10, 9], "joints": [10, 500], "wrist": [12]}.items():
        before = clock.monotonic
        for pause in pauses:
            clock.advance(pause)
            arm.put(name, frame(1))
        clock.monotonic = before
    clock.advance(600)
    arm.read()
    assert arm.counts == {
        "observation/front": SensorCounts(received=4, dropped=3, late=1, unused=3, oldest_ms=531),
        "observation/joints": SensorCounts(received=2, unused=1, oldest_ms=90),
        "observation/wrist": SensorCounts(received=1, late=1, oldest_ms=588),
    }
    assert counts_of(arm.labels()) == arm.counts
    arm.begin()
    assert set(arm.counts.values()) == {SensorCounts()}


def test_times_and_samples_are_stored_and_sampled(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = usual()
    spec = arm.timed_spec(SPEC)
    joints = []
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", spec)
        for _ in range(2):
            arm.put("front", frame(0), monotonic_ns=clock.monotonic)
            arm.put("joints", np.float32([0, 0]), monotonic_ns=clock.monotonic)
            arm.begin()
            writer.begin(task="t", labels={"fps": "20"})
            for i in range(10):
                for j in range(10):
                    clock.advance(5)
                    arm.put("joints", np.float32([i, j]))
                    joints.append([i, j])
                arm.put("front", frame(i), monotonic_ns=clock.monotonic - 3 * MS)
                clock.advance(1)
                seen = arm.read()
                writer.append(
                    Step(
                        observation=seen.observation,
                        action=np.zeros(2, np.float32),
                        reward=0.0,
                        truncated=i == 9,
                        extras=seen.extras,
                    )
                )
            writer.end(arm.read().observation, labels={"fps": "20", **arm.labels()})
            clock.advance(100)
        trim(store, 1, 0, 5)
    with Reader(tmp_path / "store") as reader:
        episode = reader.read(2)
        labels = reader.record(3).info.labels
        assert (labels["fps"], "sensors" in labels) == ("20", False)  # a part has not all of the samples
    stored = [value.tolist() for rows in episode.extras["samples"]["observation"]["joints"] for value in rows]
    assert stored == joints[:100]
    assert (ages(episode.extras)["observation/front"] == 4 * MS).all()
    with Sampler(tmp_path / "store", EVERYTHING, batch_size=16, seed=0) as sampler:
        sampler.follow()
        batch = sampler.sample()
    assert (ages(batch.extras)["observation/front"] == 4 * MS).all()
    assert (ages(batch.extras, "monotonic")["observation/joints"] == 1 * MS).all()
    target = Target(tmp_path / "store", "s")
    shown = steps_of(target, 2)["curves"]
    target.close()
    assert shown["extras/age of front in ms"] == {"size": 1, "values": [[4.0] * 10]}
    assert shown["extras/age of joints in ms"] == {"size": 1, "values": [[1.0] * 10]}
    assert not any("tick" in path for path in shown)  # nobody reads nanoseconds since 1970
    found = summarize(tmp_path / "store").sensors
    assert found["observation/joints"] == SensorCounts(received=200, oldest_ms=1.0)
    # At 30 Hz the camera should have given a frame between the two of each 51 ms.
    assert found["observation/front"] == SensorCounts(received=20, dropped=18, late=0, oldest_ms=4.0)
    assert main(["info", str(tmp_path / "store")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "observation/front: 20 samples, 18 dropped, 0 rows with a late one, 0 in no row; the oldest" in said
    assert main(["info", str(tmp_path / "store"), "--as-json"]) == 0
    assert json.loads(capsys.readouterr().out)["sensors"]["observation/joints"]["received"] == 200


def test_no_sample_of_a_fast_thread_is_lost_or_doubled() -> None:
    arm = usual()
    arm.put("front", frame(0))

    def drive() -> None:
        for i in range(400):
            arm.put("joints", np.float32([i, 0]))
            if i % 7 == 0:
                time.sleep(0.0005)

    thread = threading.Thread(target=drive)
    thread.start()
    arm.wait(5)
    rows = []
    while thread.is_alive():
        rows.append(arm.read())
    thread.join()
    rows.append(arm.read())
    got = [int(v[0]) for row in rows for v in row.extras["samples"]["observation"]["joints"]]  # type: ignore[index]
    assert got == list(range(400))
    assert arm.counts["observation/joints"].received == 400


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = usual()
    with pytest.raises(SpecError, match="wrist: expected one of the sensors front, joints"):
        arm.put("wrist", frame(0))
    with pytest.raises(SpecError, match=r"got another; did you mean .?joints"):
        arm.put("joint", frame(0))
    with pytest.raises(EpisodeError, match="front: has given no sample yet; call wait"):
        arm.read()
    arm.put("front", frame(0), monotonic_ns=1000)
    with pytest.raises(EpisodeError, match=r"joints: no sample within 0.01 s"):
        arm.wait(0.01)
    with pytest.raises(EpisodeError, match="expected a capture time after 1000 ns"):
        arm.put("front", frame(0), monotonic_ns=1000)
    with pytest.raises(EpisodeError, match="expected a capture time up to now"):
        arm.put("front", frame(0), monotonic_ns=time.monotonic_ns() + 10**12)
    with pytest.raises(SpecError, match="hz: expected samples per second above 0, got 0"):
        Sensor(hz=0)
    with pytest.raises(SpecError, match="sensors: expected at least one"):
        Sensors({})
    with pytest.raises(SpecError, match="observation/joints: is only in the spec"):
        Sensors({"front": Sensor()}).timed_spec(SPEC)
    with pytest.raises(SpecError, match="observation/wrist: is only in the sensors"):
        Sensors({"front": Sensor(), "joints": Sensor(), "wrist": Sensor()}).timed_spec(SPEC)
    with pytest.raises(SpecError, match="extras/monotonic/observation/front: the spec has this field already"):
        timed_spec(timed_spec(SPEC, ["observation/front"]), ["observation/front"])
    with pytest.raises(SpecError, match="observation/side: expected a field of the spec"):
        timed_spec(SPEC, ["observation/side"])
    camera = Spec({"front": ArraySpec(shape=(8, 8, 3), dtype="uint8", codec=H264()), "prompt": text()})
    for name in ("front", "prompt"):
        with pytest.raises(SpecError, match="of a fixed shape and without a codec"):
            timed_spec(
                StepSpec(observation=camera, action=SPEC.action), [f"observation/{name}"], [f"observation/{name}"]
            )
    assert ages({"log_prob": np.zeros(3)}) == {}
    assert counts_of({"sensors": "[1]"}) == counts_of({"sensors": '{"a": {"x": 1}}'}) == counts_of({}) == {}


def test_a_loop_that_stalls_keeps_a_bounded_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "MAX_SAMPLES", 10)
    arm = Sensors({"joints": Sensor(keep_all=True)})
    for i in range(15):
        arm.put("joints", np.float32([i]))
    row: Any = arm.read().extras
    assert row["samples"]["observation"]["joints"].ravel().tolist() == list(range(5, 15))
    assert arm.counts["observation/joints"].unused == 5
