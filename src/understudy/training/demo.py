"""Demo: the whole way in a few minutes, in the toy world: demonstrations, cloning them, practice, scores, films.

Its demonstrations are all from one corner of the table, so that copying them is not enough.

The directory is a run like any other, so that every command works on it:

config.json, store/, checkpoints/ ...  the run of RLPD; its store has the demonstrations, too
cloned/                                behaviour cloning of the same demonstrations, to compare with
*.gif                                  a demonstration, a correction, and both policies on the same start
demo.json                              the scores; written last, so it says that the demo is done
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from understudy.algorithms import CloningConfig, SACConfig
from understudy.core import Source
from understudy.durable import files
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import AlwaysScript, Takeover
from understudy.envs.toy.world import TASKS, start_state
from understudy.envs.world import World
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig
from understudy.replay import Reader, Store
from understudy.training.data.run_episode import run_episode
from understudy.training.offpolicy.cloning import CloningRunConfig, run_cloning
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig, policy_act
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.evaluate import EvaluationConfig, last_success_rate
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import CONFIG, Run, RunError
from understudy.training.runs.video import cameras_of, draw, film, write_video
from understudy.training.runs.wilson_interval import SuccessRate

TASK = "press_button"
ABOUT = TASKS[TASK][0]
ENV = f"toy:{TASK}?state=task"
CORNER = (-0.10, -0.05)  # metres: the target of each demonstration is to the left of and before it
DEMONSTRATIONS = 20
STEPS = 4_000
EPISODES = 100  # of each score
NOISE = 0.1  # of the script's hand
PARTS = 5  # into which practice is divided, to show how the human withdraws
FPS = 12

DEMONSTRATION, CORRECTION, BOTH, RESULT = "demonstration.gif", "correction.gif", "both.gif", "demo.json"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it."""

    cloned: SuccessRate
    learned: SuccessRate
    human: tuple[float, ...]  # the share of steps by the human, in each part of practice
    num_steps: int
    num_updates: int


class Demo:
    """The demo in a directory, new or begun before. Call its stages in their order; each takes up what is there."""

    def __init__(self, path: Path, *, seed: int | None = None, steps: int | None = None, episodes: int | None = None):
        """What is None is as it was begun, or as it usually is."""
        self.run = Run(path)
        self.cloned = Run(path / "cloned")
        self.is_new = not (path / CONFIG).exists()
        if self.is_new:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunError(f"{path}: is there already, and is no demo; choose another directory")
            self.config = demo_config(
                seed=seed or 0,
                steps=STEPS if steps is None else steps,
                episodes=EPISODES if episodes is None else episodes,
            )
            Run.create(path, "rlpd", self.config)
        else:
            self.config = self.run.config(RLPDConfig)
            self._check({"seed": seed, "steps": steps, "episodes": episodes})
        # The networks are small: a second thread costs more than it brings, and the second core stays free.
        torch.set_num_threads(1)

    def _check(self, asked: Mapping[str, int | None]) -> None:
        """That the run is a demo, and was begun as it is asked for now."""
        config, path = self.config, self.run.path
        begun = {"seed": config.seed, "steps": config.steps, "episodes": config.evaluation.episodes}
        if config != demo_config(**begun):
            raise RunError(f"{path}: is a run of its own, not a demo of this version; choose another directory")
        for name, value in asked.items():
            if value not in (None, begun[name]):
                raise RunError(
                    f"{name}: {path} was begun with {begun[name]}, got {value}; "
                    f"leave it out, or choose another directory"
                )

    @property
    def result(self) -> Result | None:
        """What came of it, if it is done."""
        path = self.run.path / RESULT
        try:
            said = json.loads(path.read_text())
            return Result(
                cloned=SuccessRate(**said["cloned"]),
                learned=SuccessRate(**said["learned"]),
                human=tuple(said["human"]),
                num_steps=said["num_steps"],
                num_updates=said["num_updates"],
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}: cannot be read ({error}); remove it, and run the demo again") from None

    # ---- the stages

    def record(self, progress: Callable[[int], None]) -> None:
        """Demonstrations by the world's script, each from another start in the corner; `progress` is told how many."""
        with open_world(ENV) as world, Store.open(self.run.store) as store:
            with Reader(self.run.store) as reader:
                there = {r.info.init_state for r in reader.episodes("kind = 'demonstration' and success = 1")}
            writer = store.writer("record", world.step_spec)
            for number, start in enumerate(self._corner(world), 1):
                if start not in there:
                    rng = np.random.default_rng([self.config.seed, start])
                    script = _script(world, rng)
                    options = {"task": TASK, "start": start}
                    run_episode(world, writer, takeover=script, kind="demonstration", seed=start, options=options)
                progress(number)

    def _corner(self, world: World) -> list[int]:
        """The starts of the demonstrations: some of training's, with the target in the corner."""
        starts = [start for start in world.suite.starts(world.task, "train") if _in_corner(start)]
        chosen: list[int] = np.random.default_rng(self.config.seed).permutation(starts)[:DEMONSTRATIONS].tolist()
        return chosen

    def clone(self, say: Callable[[str], None]) -> SuccessRate:
        """Imitate them: the baseline. It is short, so one that was killed on the way begins anew."""
        found = last_success_rate(self.cloned.metrics) if self.cloned.metrics.exists() else None
        if found is None:
            for left in (self.cloned.path / CONFIG, self.cloned.metrics):
                left.unlink(missing_ok=True)
            config = CloningRunConfig(
                env=ENV,
                demos=str(self.run.store),
                seed=self.config.seed,
                evaluation=self.config.evaluation,
                cloning=CloningConfig(actor=self.config.sac.actor),
            )
            with Run.create_or_remove(self.cloned.path, "cloning", config) as run:
                found = run_cloning(run, say).score
        return found

    def practise(self, watch: Callable[[RLPDProgress], None], told: Callable[[list[str]], None]) -> None:
        """Learn from them, from practice and from correction, until the steps are done."""
        with LocalRun(self.run, watch) as local:
            told(local.restored)
            local.go()

    def conclude(self) -> Result:
        """The scores of both, and how much the human had to do; kept in a file."""
        cloned, learned = (last_success_rate(run.metrics) for run in (self.cloned, self.run))
        assert cloned is not None
        assert learned is not None
        episodes = list(read_metrics(self.run.metrics, "episode"))
        parts = [part for part in np.array_split(np.array(episodes), PARTS) if len(part)]
        human = tuple(sum(e["human_steps"] for e in part) / sum(e["length"] for e in part) for part in parts)
        *_, last = read_metrics(self.run.metrics, "evaluation")
        result = Result(cloned=cloned, learned=learned, human=human, num_steps=last["step"], num_updates=last["update"])
        files.write_durably(self.run.path / RESULT, json.dumps(asdict(result), indent=1).encode())
        return result

    # ---- films

    def film_demonstration(self) -> tuple[Path, list[Array]]:
        """The first demonstration; its file, and the pictures of its front camera."""
        return self._film(DEMONSTRATION, "kind = 'demonstration' and success = 1", which=0)

    def film_correction(self) -> Path | None:
        """The episode in which the human had most to do after the policy had begun it, if there was any."""
        try:
            return self._film(CORRECTION, "kind = 'correction' and success = 1 and deleted is null", which=-1)[0]
        except LookupError:
            return None

    def _film(self, name: str, where: str, *, which: int) -> tuple[Path, list[Array]]:
        with Reader(self.run.store) as reader:
            records = sorted(reader.episodes(where), key=lambda r: r.num_human / r.num_steps)
            if not records:
                raise LookupError(where)
            episode = reader.read(records[which].id)
        path = self.run.path / name
        write_video(path, film(episode), fps=FPS)
        return path, list(episode.observation["front"])

    def film_both(self) -> Path:
        """Both policies on the same held-out start; one at which only the one that practised succeeds, if any."""
        with open_world(ENV) as world:
            start = self._telling_start()
            cloned, learned = (
                _play(world, ActorPolicy.load(run.policy, world.step_spec), start) for run in (self.cloned, self.run)
            )
        length = max(len(cloned), len(learned))
        one, other = ([*pictures, *[pictures[-1]] * (length - len(pictures))] for pictures in (cloned, learned))
        frames = [list(pair) for pair in zip(one, other, strict=True)]
        path = self.run.path / BOTH
        write_video(path, draw(frames, np.full(length - 1, Source.POLICY)), fps=FPS)
        return path

    def _telling_start(self) -> int:
        ends = []
        for run in (self.cloned, self.run):
            *_, last = read_metrics(run.metrics, "evaluation")
            ends.append({trial["start"]: trial["success"] for trial in last["trials"]})
        cloned, learned = ends
        telling = [start for start in learned if learned[start] and not cloned[start]]
        return int((telling or list(learned))[0])


def demo_config(*, seed: int, steps: int, episodes: int) -> RLPDConfig:
    """What the run is asked to do. The policy sees the numbers; the cameras are for people."""
    actor = ActorConfig(hidden=(128, 128), encoder=EncoderConfig(inputs=("state",)))
    return RLPDConfig(
        env=ENV,
        steps=steps,
        seed=seed,
        human=InterventionConfig(by="script"),
        eval_every=steps,
        checkpoint_every=250,
        evaluation=EvaluationConfig(episodes=episodes),
        sac=SACConfig(
            actor=actor,
            critic_hidden=(128, 128),
            actor_lr=1e-3,
            critic_lr=1e-3,
            temperature_lr=1e-3,
            tau=0.02,
            discount=0.95,
        ),
    )


def _in_corner(start: int) -> bool:
    x, y = start_state(TASK, start).button
    return x < CORNER[0] and y < CORNER[1]


def _script(world: World, rng: np.random.Generator) -> Takeover:
    return Takeover(AlwaysScript(lambda: world.advise(noise=NOISE, rng=rng).action), operator="script")


def _play(world: World, policy: ActorPolicy, start: int) -> list[Array]:
    """The front camera while a policy acts alone."""
    act = policy_act(policy, np.random.default_rng(0), deterministic=True)
    observation, _ = world.reset(seed=start, options={"task": TASK, "start": start})
    pictures, ended = cameras_of(observation)[:1], False
    while not ended:
        observation, _, terminated, truncated, _ = world.step(act(observation)[0])
        pictures += cameras_of(observation)[:1]
        ended = terminated or truncated
    return pictures
