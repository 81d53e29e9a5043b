"""Trim, split and merge: new episodes, bit for bit what the old ones have; the old ones stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.moving_camera import moving_frames

from understudy.cli import main
from understudy.core import H264, ArraySpec, Jpeg, Png, Source, Spec, Step, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.episode import Episode
from understudy.core.examples import random_episode, small_spec
from understudy.core.step import frame_number_of
from understudy.replay import (
    EVERYTHING,
    EpisodePart,
    Reader,
    Sampler,
    Store,
    merge,
    origins,
    repair,
    split,
    trim,
    verify,
)
from understudy.replay.maintain import episode_parts

SPEC = small_spec()
WHOLE = random_episode(SPEC, 8, seed=3)


def write(store: Store, *, end: bool = True) -> None:
    writer = store.writer("w", SPEC)
    writer.begin(task="pick", kind="practice", success=True, labels={"origin": "x:1", "intervention_count": "9"})
    for index, step in enumerate(WHOLE.steps()):
        source = Source.HUMAN if index in (1, 2, 4, 6) else Source.POLICY
        writer.append(replace(step, source=source))
    if end:
        writer.end(WHOLE.last_observation)
    else:
        writer.flush()


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (2, 5), (3, 8), (7, 8)])
def test_the_part_is_kept_bit_for_bit(first: int, stop: int, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store)
        assert trim(store, 1, first, stop) == 2
    with Reader(tmp_path / "store") as reader:
        old, new = reader.episodes("1")
        part = reader.read(2)
        human = reader.read(1).source[first:stop] == Source.HUMAN
    assert old.deleted is None
    assert origins(old.info) == ()
    assert origins(new.info) == (EpisodePart(episode=1, first=first, stop=stop),)
    assert (new.state, new.num_steps, new.info.task, new.info.success) == ("ended", stop - first, "pick", True)
    assert new.info.kind == ("correction" if human.any() else "practice")
    assert new.info.labels["trimmed_from"] == f"episode 1, steps {first} to {stop - 1}"
    assert new.info.labels["origin"] == "x:1"  # a second import still finds it
    assert new.info.labels["intervention_steps"] == str(human.sum())
    takeovers = sum(bool(now) and not before for before, now in zip([False, *human], human, strict=False))
    assert new.info.labels["intervention_count"] == str(takeovers)
    columns = WHOLE.columns()
    for path, column in part.columns().items():
        if path in ("terminated", "truncated", "source"):
            continue
        more = path.startswith("observation")
        assert trees.equal_leaf(column, columns[path][first : stop + more]), path
    last = WHOLE.step(stop - 1)
    ends = (last.terminated, last.truncated) if stop == 8 else (False, True)
    assert (bool(part.terminated[-1]), bool(part.truncated[-1])) == ends
    assert not np.any(part.terminated[:-1] | part.truncated[:-1])
    assert verify(tmp_path / "store").ok


@pytest.mark.parametrize(("first", "stop"), [(0, 8), (-1, 3), (3, 3), (5, 2), (2, 9)])
def test_what_is_no_part_is_refused(first: int, stop: int, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store)
        with pytest.raises(StoreError, match="expected a part of episode 1, which has steps 0 to 7"):
            trim(store, 1, first, stop)
        with pytest.raises(StoreError):
            trim(store, 7, 0, 1)
    with Reader(tmp_path / "store") as reader:
        assert [record.deleted for record in reader.episodes("1")] == [None]


def test_an_episode_that_is_being_recorded_is_left_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write(store, end=False)
        with pytest.raises(StoreError, match="is still being recorded"):
            trim(store, 1, 0, 2)


# ---- encoded cameras

NUM_STEPS = 23
CAMERAS = StepSpec(
    observation=Spec(
        {
            "front": ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=H264(gop_size=10)),
            "wrist": ArraySpec(shape=(32, 48, 3), dtype="uint8", codec=H264(gop_size=4)),
            "side": ArraySpec(shape=(48, 64, 3), dtype="uint8", codec=Jpeg()),
            "depth": ArraySpec(shape=(6, 8), dtype="uint16", codec=Png()),
            "raw": ArraySpec(shape=(24, 24, 3), dtype="uint8"),
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    extras=Spec({"mask": ArraySpec(shape=(16, 16, 3), dtype="uint8", codec=H264(gop_size=3))}),
)


def write_cameras(store: Store, *, seed: int = 0, end: bool = True) -> None:
    """An episode in commits of 10, 10 and 4 rows: `wrist` has GOPs of 4, 4, 2, 4, 4, 2 and 4 frames."""
    frames = moving_frames(NUM_STEPS + 1, seed=seed)
    writer = store.writer("w", CAMERAS, commit_steps=12)
    writer.begin(task="pick", kind="demonstration", labels={"fps": "30"})

    def observation(i: int) -> dict[str, object]:
        depth = np.full((6, 8), 1000 * seed + i, np.uint16)
        return {
            "front": frames[i],
            "wrist": frames[-1 - i, :32, :48],
            "side": frames[i],
            "depth": depth,
            "raw": frames[i, :24, :24],
        }

    for i in range(NUM_STEPS):
        last = end and i == NUM_STEPS - 1
        writer.append(
            Step(
                observation=observation(i),
                action=np.float32([i, seed]),
                reward=float(i),
                terminated=last,
                extras={"mask": frames[i, :16, :16]},
            )
        )
    if end:
        writer.end(observation(NUM_STEPS), success=True)
    else:
        writer.cut()


def assert_part(new: Episode, old: Episode, first: int, stop: int) -> None:
    """Every column of the new episode is the part of the old one, the flags of the end excepted."""
    columns = old.columns()
    for path, column in new.columns().items():
        if path not in ("terminated", "truncated"):
            assert trees.equal_leaf(column, columns[path][first : stop + path.startswith("observation")]), path


def test_every_frame_of_a_random_cut_is_the_frame_of_the_source(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with Store.open(tmp_path / "store") as store:
        write_cameras(store)
        known = {1: (0, NUM_STEPS)}  # the steps of episode 1 that each has
        for number in range(2, 14):
            source = int(random.choice(list(known)))  # also parts of parts
            length = known[source][1] - known[source][0]
            if length < 3:
                source, length = 1, NUM_STEPS
            first, last = sorted(random.choice(length, 2, replace=False).tolist())
            if last - first + 1 == length:
                first += 1
            assert trim(store, source, first, last + 1) == number
            known[number] = (known[source][0] + first, known[source][0] + last + 1)
    with Reader(tmp_path / "store") as reader:
        whole = reader.read(1)
        for number, (first, stop) in known.items():
            assert_part(reader.read(number), whole, first, stop)
    assert verify(tmp_path / "store").ok
    with Sampler(tmp_path / "store", EVERYTHING, batch_size=200, seed=3) as sampler:
        sampler.follow()
        batch = sampler.sample()
    assert len(set(batch.episode.tolist())) > 8
    for row in range(200):
        index = known[int(batch.episode[row])][0] + int(batch.index[row])
        for name in ("front", "wrist", "side", "depth", "raw"):
            assert np.array_equal(batch.observation[name][row], whole.observation[name][index]), name
            assert np.array_equal(batch.next_observation[name][row], whole.observation[name][index + 1]), name


def test_packets_are_copied_and_a_cut_gop_keeps_those_before_the_cut(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write_cameras(store)
        trim(store, 1, 3, 20)
    with Reader(tmp_path / "store") as reader:
        _, old = reader.stored_rows(1)
        _, new = reader.stored_rows(2)
    front = [bytes(packet) for packet in old["observation/front"]]
    copied = [bytes(packet) for packet in new["observation/front"]]
    assert copied[0] == b"".join(front[:4])  # frames 0 to 2 are only there to decode frame 3
    assert copied[1:] == front[4:21]
    numbers = frame_number_of("observation/front")
    assert old[numbers].tolist() == [*range(10), *range(10), *range(4)]
    assert new[numbers].tolist() == [*range(7), *range(10), 0]
    for name in ("side", "depth"):
        same = zip(old[f"observation/{name}"][3:21], new[f"observation/{name}"], strict=True)
        assert all(np.array_equal(*pair) for pair in same)


def test_split_and_merge_give_the_episode_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path / "store") as store:
        write_cameras(store)
        assert split(store, 1, [5, 6, 17], delete_source=True) == [2, 3, 4, 5]
        assert merge(store, [2, 3, 4, 5]) == 6
        monkeypatch.setattr(episode_parts, "COMMIT_BYTES", 20_000)  # so that an episode is stored in several commits
        assert split(store, 6, [11]) == [7, 8]
        assert merge(store, [7, 8]) == 9
        assert store.restore([1]) == 1
    with Reader(tmp_path / "store") as reader:
        whole, *parts = (reader.read(number) for number in range(1, 10))
        infos = [reader.record(number).info for number in range(1, 10)]
        assert reader.record(9).state == "ended"
        assert len(reader.catalog.spans("episode = 9")) > 2
    for part, (first, stop) in zip(parts, [(0, 5), (5, 6), (6, 17), (17, 23)], strict=False):
        assert_part(part, whole, first, stop)
        assert part.truncated[-1] == (stop < 23)
    for merged in (parts[4], parts[7]):
        assert all(trees.equal_leaf(column, whole.columns()[path]) for path, column in merged.columns().items())
    assert [info.success for info in infos] == [True, None, None, None, True, True, None, True, True]
    assert [str(part) for part in origins(infos[3])] == ["episode 1, steps 6 to 16"]
    assert [part.episode for part in origins(infos[5])] == [2, 3, 4, 5]
    assert origins(infos[8]) == (EpisodePart(episode=7, first=0, stop=11), EpisodePart(episode=8, first=0, stop=12))
    assert verify(tmp_path / "store").ok


def test_damage_of_a_cut_gop_costs_only_that_gop(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", segment_bytes=2**20) as store:
        write_cameras(store)
        trim(store, 1, 3, 20, delete_source=True)
    with Reader(tmp_path / "store") as reader:
        span = reader.catalog.spans("episode = 2")[0]
        segment = reader.segment(int(span["segment"]))
        offset, length = segment.read_column("observation/front", int(span["first_row"]) + 2, 1)[0].tolist()
        path, at = segment.path, segment.layout.heap_offset + offset + 8 + length // 2
        before = reader.read(2)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert not verify(tmp_path / "store").ok
    assert repair(tmp_path / "store").after.ok
    with Reader(tmp_path / "store") as reader:
        rest = [reader.read(record.id) for record in reader.episodes("id > 1 and num_rows > 1")]
    assert [len(episode) for episode in rest] == [1, 10]  # rows 2 to 6 of the new episode are gone
    assert_part(rest[1], before, 7, 17)


def test_a_cut_episode_keeps_its_last_step(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write_cameras(store, end=False)
        trim(store, 1, 7, NUM_STEPS - 1)
    with Reader(tmp_path / "store") as reader:
        new, (_, rows), (_, old) = reader.record(2), reader.stored_rows(2), reader.stored_rows(1)
    assert (new.state, new.num_rows, new.num_steps) == ("cut", NUM_STEPS - 7, NUM_STEPS - 7)
    assert np.array_equal(rows["action"], old["action"][7:])


def test_what_does_not_follow_is_not_merged(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        write_cameras(store)
        split(store, 1, [9])
        write_cameras(store, seed=1)
        write_cameras(store, end=False)
        for episodes, wrong in {
            (2,): "expected two episodes or more",
            (2, 2): "each once",
            (1, 4): "terminated with the last step of episode 1",
            (3, 2): "terminated",
            (2, 4): "episode 4 does not follow episode 2: observation/.*bit by bit, got another",
            (5, 2): "the last observation of episode 5 is not known",
        }.items():
            with pytest.raises(StoreError, match=wrong):
                merge(store, episodes)
        store.label([3], {"fps": "50"})
        with pytest.raises(StoreError, match="label fps: expected '30', got '50'"):
            merge(store, [2, 3])
        for steps in ([], [0], [23], [5, 5], [7, 6]):
            with pytest.raises(StoreError, match="steps in order, each from 1 to 22"):
                split(store, 1, steps)
        writer = store.writer("other", SPEC)
        writer.begin()
        for step in WHOLE.steps():
            writer.append(replace(step, terminated=False))
        writer.cut(WHOLE.last_observation)
        with pytest.raises(StoreError, match="their fields differ"):
            merge(store, [2, 6])
    with Reader(tmp_path / "store") as reader:
        assert [record.id for record in reader.episodes()] == [1, 2, 3, 4, 5, 6]


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "store")
    with Store.open(path) as store:
        write(store)
    assert main(["split", path, "1", "--at", "3", "5"]) == 0
    assert main(["merge", path, "2", "3", "4", "--delete-source"]) == 0
    assert main(["trim", path, "1", "--first", "2", "--delete-source"]) == 0
    assert main(["trim", path, "5", "--stop", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "episode 2: 3 steps, from episode 1, steps 0 to 2",
        "episode 3: 2 steps, from episode 1, steps 3 to 4",
        "episode 4: 3 steps, from episode 1, steps 5 to 7",
        "episode 5: 8 steps, from episode 2, steps 0 to 2; episode 3, steps 0 to 1; episode 4, steps 0 to 2",
        "episode 6: 6 steps, from episode 1, steps 2 to 7",
        "episode 7: 2 steps, from episode 5, steps 0 to 1",
    ]
    with Reader(path) as reader:
        assert [record.id for record in reader.episodes()] == [5, 6, 7]
    assert main(["trim", path, "5", "--stop", "9"]) == 1
    assert "expected a part of episode 5" in capsys.readouterr().err
