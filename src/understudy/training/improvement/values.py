"""Values: a value model learns how recorded episodes went on, and says which of their steps are worth repeating.

It is the first stage of a run of RECAP. Its estimates go to a file beside each store (`Estimates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.algorithms.recap import returns
from understudy.core import Source, Tree
from understudy.core import tree as trees
from understudy.policies.config import ValueConfig
from understudy.policies.protocol import Array
from understudy.processes.stop import StopRequest
from understudy.replay import Clause, Estimates, Reader, View
from understudy.replay.read.estimates import estimates_path, fingerprint
from understudy.training.improvement.config import RecapConfig
from understudy.training.improvement.experience import FAILED, SUCCEEDED, Experience, Part
from understudy.training.onpolicy.sft import Demonstrations, newest_state, resize_of
from understudy.training.runs.fingerprint import digest_of_arrays
from understudy.training.runs.health import Health
from understudy.training.runs.imitation_loop import ImitationLoop, Schedule
from understudy.training.runs.metrics import MetricLog
from understudy.training.runs.run import Run

if TYPE_CHECKING:
    from understudy.algorithms.recap import ValueSteps
    from understudy.policies.value_model import ValueModel

CHECKPOINTS = "value"  # in the directory of the run's checkpoints
FILE = "value.safetensors"
ROWS = 256  # observations in one forward pass

OUTCOMES = {  # by the name of a part: whether its episodes succeeded
    "succeeded": View(name="succeeded", clauses=(Clause(where=SUCCEEDED),)),
    "failed": View(name="failed", clauses=(Clause(where=FAILED),)),
}


class ReturnSteps:
    """Steps of all episodes with an outcome, each with its return."""

    def __init__(self, experience: Experience, failure_steps: int | None):
        self.experience = experience
        self._failure_steps = failure_steps
        self._longest: dict[str, int] = {}  # number of steps, by instruction
        self._returns: dict[tuple[int, int], Array] = {}  # by part and episode

    def settle(self) -> None:
        """Find the longest episode of each instruction; call it when the commits of the stores are known."""
        for part in self.experience.parts:
            for episode in part.steps.episodes():
                instruction = part.steps.instruction(episode)
                num_steps = part.steps.num_steps(episode)
                self._longest[instruction] = max(self._longest.get(instruction, 0), num_steps)

    def failure_steps(self, instruction: str) -> int:
        """The number of steps that a failure counts as."""
        return self._longest[instruction] if self._failure_steps is None else self._failure_steps

    def step_cost(self, instruction: str) -> float:
        """What a step takes from the return."""
        return 1.0 / (self._longest[instruction] + self.failure_steps(instruction))

    def returns(self, part: Part, episode: int) -> Array:
        """[T + 1]: of each step of an episode, and of its end."""
        key = (id(part), episode)
        if key not in self._returns:
            instruction = part.steps.instruction(episode)
            self._returns[key] = returns.returns(
                part.steps.num_steps(episode),
                success=part.name == "succeeded",
                failure_steps=self.failure_steps(instruction),
                longest=self._longest[instruction],
            )
        return self._returns[key]

    def __len__(self) -> int:
        return len(self.experience)

    def sample(self) -> ValueSteps:
        """The next batch."""
        from understudy.algorithms.recap import ValueSteps

        observations, instructions, values = [], [], []
        for part, batch in self.experience.draw():
            observations.append(trees.flatten(batch.observation))
            pairs = list(zip(batch.episode.tolist(), batch.index.tolist(), strict=True))
            instructions += [part.steps.instruction(episode) for episode, _ in pairs]
            values += [self.returns(part, episode)[index] for episode, index in pairs]
        joined = {path: np.concatenate([one[path][:, 0] for one in observations]) for path in observations[0]}
        return ValueSteps(
            observation=trees.unflatten(joined), instruction=tuple(instructions), value=np.array(values, np.float32)
        )

    def state(self) -> Mapping[str, Any]:
        return self.experience.state()


@dataclass(frozen=True, kw_only=True)
class ValueStage:
    """The stage of a run in which its value model learns, and judges the stores."""

    run: Run
    config: RecapConfig
    schedule: Schedule  # `updates` are those of the value model
    seed: int
    device: str
    log: MetricLog
    health: Health
    stop: StopRequest

    def estimates(
        self,
        policy: Any,
        stores: Sequence[Path],
        open_reader: Callable[[Path], Reader],
        say: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> dict[Path, Estimates]:
        """Learn from these stores, from the newest checkpoint if there is one, and judge them."""
        parts = [
            Part(
                name=name,
                steps=Demonstrations(
                    open_reader(store),
                    view,
                    block_steps=1,
                    batch_size=self.config.value.batch_size,
                    seed=self.seed + (number << 32),
                    resize=resize_of(policy),
                ),
            )
            for number, (store, name, view) in enumerate(
                (store, name, view) for store in stores for name, view in OUTCOMES.items()
            )
        ]
        data = ReturnSteps(Experience(parts, batch_size=self.config.value.batch_size), self.config.failure_steps)
        try:
            model = self._learn(policy, data, say, progress)
            say("judging steps")
            return self._judge(model, data, stores)
        finally:
            data.experience.close()

    def _learn(
        self, policy: Any, data: ReturnSteps, say: Callable[[str], None], progress: Callable[[int, int], None]
    ) -> ValueModel:
        from understudy.algorithms.recap import ValueTraining
        from understudy.policies.value_model import ValueModel

        checkpoints = self.run.checkpoints / CHECKPOINTS
        saved = newest_state(checkpoints)
        if saved is None:
            for part in data.experience.parts:
                part.steps.follow()
        else:
            data.experience.restore(saved.facts["demos"])
        data.settle()
        model = ValueModel.new(
            ValueConfig(hidden=self.config.value.hidden, num_bins=returns.NUM_BINS),
            policy.config.encoder,
            policy.spec.observation,
            policy.stats,
            policy.words,
            seed=self.seed,
            device=self.device,
        )
        training = ValueTraining(self.config.value, model, seed=self.seed)
        if saved is not None:
            training.restore(saved.state)
        loop = ImitationLoop(
            self.run,
            self.schedule,
            training,
            data,
            log=self.log,
            health=self.health,
            stop=self.stop,
            kind="value",
            checkpoints=checkpoints,
        )
        with loop.saving_when_stopped():
            loop.run_updates(lambda text: say(f"value model: {text}"), progress, doing="learning values")
        found = training.model(version=training.num_updates)
        found.save(self.run.path / FILE)
        return found

    # ---- judging

    def _judge(self, model: ValueModel, data: ReturnSteps, stores: Sequence[Path]) -> dict[Path, Estimates]:
        """The estimates of each store, from its file if they are known."""
        digest = digest_of_arrays(model.parameters())
        options = {
            **{name: value for name, value in asdict(self.config).items() if name not in ("value", "guidance")},
            "stores": len(stores),
        }
        parts = {store: data.experience.parts[2 * number : 2 * number + 2] for number, store in enumerate(stores)}
        found: dict[Path, Estimates] = {}
        for store, (first, _) in parts.items():
            commit, store_id = first.steps.commit, first.steps.store_id
            path = estimates_path(store, fingerprint(store_id=store_id, commit=commit, model=digest, options=options))
            if path.exists():
                found[store] = Estimates.read(path)
        if len(found) < len(stores):  # what is good is decided among the steps of all stores
            found = self._estimate(model, data, parts, digest, options)
            for store, estimates in found.items():
                estimates.write(store)
        return found

    def _estimate(
        self,
        model: ValueModel,
        data: ReturnSteps,
        parts: Mapping[Path, Sequence[Part]],
        digest: str,
        options: Mapping[str, Any],
    ) -> dict[Path, Estimates]:
        judged = {
            store: sorted(
                (self._episode(model, data, part, episode) for part in some for episode in part.steps.episodes()),
                key=lambda one: one.episode,
            )
            for store, some in parts.items()
        }
        everything = [one for some in judged.values() for one in some]
        least: dict[str, float] = {}  # the lowest advantage of a good step, by instruction
        for instruction in {one.instruction for one in everything}:
            own = [one.advantage[one.competes] for one in everything if one.instruction == instruction]
            among = np.concatenate(own)
            chosen = returns.best(among, self.config.good_share)
            least[instruction] = float(among[chosen].min()) if chosen.any() else float("inf")
        return {
            store: Estimates(
                store_id=parts[store][0].steps.store_id,
                commit=parts[store][0].steps.commit,
                model=digest,
                options=options,
                episode=np.array([one.episode for one in some], np.int64),
                num_steps=np.array([len(one.value) for one in some], np.int64),
                value=_joined([one.value for one in some], np.float32),
                advantage=_joined([one.advantage for one in some], np.float32),
                good=_joined([~one.competes | (one.advantage >= least[one.instruction]) for one in some], bool),
            )
            for store, some in judged.items()
        }

    def _episode(self, model: ValueModel, data: ReturnSteps, part: Part, number: int) -> _JudgedEpisode:
        self.stop.check()
        self.health.progress("judging steps")
        episode = part.steps.read(number)
        num_steps, instruction = part.steps.num_steps(number), part.steps.instruction(number)
        value = np.concatenate(
            [
                model.values(_rows(episode.observation, rows), [instruction] * (rows.stop - rows.start))
                for rows in (slice(first, min(first + ROWS, num_steps)) for first in range(0, num_steps, ROWS))
            ]
        )
        advantage = returns.advantages(
            value,
            end=float(data.returns(part, number)[-1]),
            num_steps=self.config.advantage_steps,
            step_cost=data.step_cost(instruction),
        )
        shown = episode.info.kind == "demonstration" and part.name == "succeeded"
        return _JudgedEpisode(
            episode=number,
            instruction=instruction,
            value=value,
            advantage=advantage,
            competes=(episode.source != Source.HUMAN) & (not shown),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _JudgedEpisode:
    episode: int
    instruction: str
    value: Array  # [T]
    advantage: Array  # [T]
    competes: Array  # [T] bool: it is good only if it is among the best; a human's step always is


def _rows(observation: Tree, rows: slice) -> Tree:
    return trees.map_leaves(lambda leaf: leaf[rows], observation)


def _joined(arrays: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
