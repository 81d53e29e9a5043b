"""Random stores whose every row says which row it is, and the truth about them in plain Python."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import H264, ArraySpec, EpisodeInfo, Png, Resize, Source, Spec, Step, StepSpec
from understudy.core.resize import resize_frame
from understudy.replay import Store, compact
from understudy.replay.write.writer import Writer

SPEC = StepSpec(
    observation=Spec(
        {
            "camera": ArraySpec(shape=(20, 20, 3), dtype="uint8"),  # large: read by key
            "id": ArraySpec(shape=(2,), dtype="int64"),  # small: mapped
            "depth": ArraySpec(shape=(8, 10), dtype="uint16", codec=Png()),  # encoded, each frame by itself
            "video": ArraySpec(shape=(16, 16, 3), dtype="uint8", codec=H264(gop_size=4)),  # encoded in groups
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="int64")),
)


SIZES = {"camera": Resize((9, 10), crop=(0, 0, 18, 20)), "depth": Resize((4, 10)), "video": Resize((8, 4))}
LOSS = 3  # of grey levels, by H.264; neighbouring frames differ by 7


def observation_of(uid: int, index: int) -> dict[str, Any]:
    camera = np.full((20, 20, 3), (uid * 31 + index * 7) % 251, np.uint8)
    camera[0, 0] = uid % 256, index % 256, (index // 256) % 256
    depth = np.full((8, 10), (uid * 1000 + index) % 65521, np.uint16)
    video = np.full((16, 16, 3), 40 + (uid * 31 + index * 7) % 180, np.uint8)
    return {"camera": camera, "id": np.array([uid, index]), "depth": depth, "video": video}


@dataclass
class Truth:
    """An episode as it was written and committed."""

    uid: int
    kind: str
    split: str
    sources: list[Source] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_rows: int = 0  # committed
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    deleted: bool = False
    id: int = 0  # the store's number of it

    @property
    def num_transitions(self) -> int:
        return max(self.num_rows - 1, 0)


class World:
    """Several actors that interleave, human bursts, ends of every kind, deletions, compactions, restarts."""

    def __init__(self, path: Path, seed: int, num_actors: int = 3):
        self.path = path
        self.rng = random.Random(seed)
        self.episodes: dict[int, Truth] = {}
        self.num_actors = num_actors
        self.store = Store.open(path, segment_bytes=100_000)
        self._seen: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}  # what `check` has made, by the sizes
        self._begin_writers()

    def _begin_writers(self) -> None:
        self.writers: list[Writer] = [
            self.store.writer(f"actor-{n}", SPEC, commit_steps=self.rng.choice([1, 3, 8, 20]), background=False)
            for n in range(self.num_actors)
        ]
        self.current: list[Truth | None] = [None] * self.num_actors

    def live(self, num_events: int) -> None:
        """Let time pass."""
        for _ in range(num_events):
            event = self.rng.random()
            if event < 0.94:
                self._act(self.rng.randrange(self.num_actors))
            elif event < 0.96:
                self._delete()
            elif event < 0.97:
                compact(self.store, min_dead=self.rng.choice([0.0, 0.3]))
            elif event < 0.98:
                self._judge()
            elif event < 0.985:
                self._restart()
            else:
                self._restore()
        self.commit_all()

    def commit_all(self) -> None:
        for writer in self.writers:
            writer.flush()
        self._note_commits()

    def close(self) -> None:
        self.store.close()

    # ---- events

    def _act(self, actor: int) -> None:
        writer, episode = self.writers[actor], self.current[actor]
        if episode is None:
            episode = Truth(
                uid=len(self.episodes) + 1,
                kind="demonstration" if self.rng.random() < 0.2 else "practice",
                split="eval" if self.rng.random() < 0.1 else "train",
            )
            self.episodes[episode.uid] = episode
            self.current[actor] = episode
            writer.begin(EpisodeInfo(seed=episode.uid, kind=episode.kind, split=episode.split))
            self.human_until = 0
        index = len(episode.sources)
        if self.rng.random() < 0.05:
            episode.sources_burst = index + self.rng.randrange(1, 9)  # type: ignore[attr-defined]
        source = Source.HUMAN if index < getattr(episode, "sources_burst", 0) else Source.POLICY
        end = self.rng.random() < 0.06
        truncated = end and self.rng.random() < 0.5
        reward = float(self.rng.randrange(10))
        episode.sources.append(source)
        episode.rewards.append(reward)
        writer.append(
            Step(
                observation=observation_of(episode.uid, index),
                action=np.array([episode.uid, index]),
                reward=reward,
                terminated=end and not truncated,
                truncated=truncated,
                source=source,
                policy_version=index,
                proposal=np.array([-episode.uid, -index]) if source is Source.HUMAN else None,
            )
        )
        if end:
            episode.terminated, episode.truncated = not truncated, truncated
            episode.success = self.rng.random() < 0.7
            writer.end(observation_of(episode.uid, index + 1), success=episode.success)
            self.current[actor] = None
        elif self.rng.random() < 0.01:
            writer.cut()
            self.current[actor] = None
        self._note_commits()

    def _note_commits(self) -> None:
        for record in self.store.catalog.episodes("1"):
            episode = self.episodes[record.info.seed]
            episode.id, episode.num_rows = record.id, record.num_rows
            assert record.purged <= episode.deleted

    def _pick(self, deleted: bool) -> list[Truth]:
        known = [e for e in self.episodes.values() if e.id and e.deleted is deleted]
        return self.rng.sample(known, min(len(known), self.rng.randrange(3)))

    def _delete(self) -> None:
        for episode in self._pick(False):
            self.store.delete([episode.id])
            episode.deleted = True

    def _restore(self) -> None:
        for episode in self._pick(True):
            if not self.store.catalog.episode(episode.id).purged:
                self.store.restore([episode.id])
                episode.deleted = False

    def _judge(self) -> None:
        for episode in self._pick(False):
            if episode.terminated or episode.truncated:
                episode.success = self.rng.random() < 0.5
                self.store.set_success([episode.id], episode.success)

    def _restart(self) -> None:
        self.store.close()
        for episode in self.current:
            if episode is not None:  # what was not committed is gone
                del episode.sources[episode.num_rows :], episode.rewards[episode.num_rows :]
        self.store = Store.open(self.path, segment_bytes=100_000)
        self._begin_writers()

    # ---- the truth

    def steps(self, view: str) -> set[tuple[int, int]]:
        """The (episode, index) of every transition that is in a view, by going through all of them."""
        found = set()
        for episode in self.episodes.values():
            if episode.deleted or episode.split == "eval":
                continue
            for index in range(episode.num_transitions):
                human = episode.sources[index] is Source.HUMAN
                demonstration = episode.kind == "demonstration"
                if view == "online":
                    wanted = not demonstration
                elif view == "demo":
                    wanted = episode.success is not False if demonstration else human
                else:
                    wanted = True
                if wanted:
                    found.add((episode.id, index))
        return found

    def check(self, batch: Any, num_steps: int, discount: float, sizes: Mapping[str, Resize] | None = None) -> None:
        """Every field of a batch of transitions against what was written, in these sizes."""
        made = self._seen.setdefault(str(sizes), {})

        def seen(uid: int, index: int) -> dict[str, Any]:
            if (uid, index) not in made:
                found = observation_of(uid, index)
                small = {name: resize_frame(found[name], size) for name, size in (sizes or {}).items()}
                made[uid, index] = found | small
            return made[uid, index]

        by_id = {episode.id: episode for episode in self.episodes.values()}
        for b in range(len(batch)):
            episode, index = by_id[int(batch.episode[b])], int(batch.index[b])
            steps = min(num_steps, episode.num_transitions - index)
            assert batch.num_steps[b] == steps
            here, there = seen(episode.uid, index), seen(episode.uid, index + steps)
            for name in ("camera", "id", "depth"):
                assert np.array_equal(batch.observation[name][b], here[name]), (episode, index, name)
                assert np.array_equal(batch.next_observation[name][b], there[name]), (episode, index, name)
            assert np.abs(batch.observation["video"][b] - here["video"].astype(int)).max() <= LOSS
            assert np.abs(batch.next_observation["video"][b] - there["video"].astype(int)).max() <= LOSS
            assert batch.action[b].tolist() == [episode.uid, index]
            assert batch.source[b] == episode.sources[index]
            assert batch.policy_version[b] == index
            human = episode.sources[index] is Source.HUMAN
            assert batch.has_proposal[b] == human
            assert batch.proposal[b].tolist() == ([-episode.uid, -index] if human else [0, 0])
            total = sum(discount**k * r for k, r in enumerate(episode.rewards[index : index + steps]))
            assert abs(batch.reward[b] - total) < 1e-4
            last = index + steps == len(episode.sources)
            assert batch.terminated[b] == (last and episode.terminated)
            assert batch.truncated[b] == (last and episode.truncated)
