"""Demo: the whole workflow in a few minutes in the toy world: demonstrations, cloning, RLPD, evaluation, videos.

All demonstrations are from one corner of the table, so that imitating them is not enough.

The directory is a run like any other, so every command works on it:

config.json, store/, checkpoints/ ...  the run of RLPD; its store also has the demonstrations
cloned/                                behaviour cloning of the same demonstrations, for comparison
*.gif                                  a demonstration, a correction, and both policies on the same start
demo.json                              the success rates; written last, when the demo is finished
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.algorithms import CloningConfig, SACConfig
from understudy.core import Source
from understudy.durable import files
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import AlwaysScript, Takeover
from understudy.envs.toy.tasks import TASKS
from understudy.envs.toy.world import start_state
from understudy.envs.world import World
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig
from understudy.processes.stop import StopRequest
from understudy.replay import Reader, Store
from understudy.training.data.run_episode import run_episode
from understudy.training.offpolicy.cloning import CloningRunConfig, run_cloning
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig, policy_act
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.evaluate import EvaluationConfig, last_success_rate
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import CONFIG, Run, RunError
from understudy.training.runs.video import cameras_of, draw_episode, draw_frames, write_video
from understudy.training.runs.wilson_interval import SuccessRate

TASK = "press_button"
ABOUT = TASKS[TASK][0]
ENV = f"toy:{TASK}?state=task"
CORNER = (-0.10, -0.05)  # x, y in metres; the target of each demonstration is below both
DEMONSTRATIONS = 20
STEPS = 4_000
EPISODES = 100  # of each evaluation
NOISE = 0.1  # added to the script's actions
PARTS = 5  # of the online episodes, to show how the intervention rate falls
FPS = 12

DEMONSTRATION, CORRECTION, BOTH, RESULT = "demonstration.gif", "correction.gif", "both.gif", "demo.json"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The outcome of the demo."""

    cloned: SuccessRate
    learned: SuccessRate
    intervention_rates: tuple[float, ...]  # share of the human's steps in each part of the online episodes
    num_steps: int
    num_updates: int


class Demo:
    """The demo in a directory, new or to be continued. Call its stages in order; each continues what is there."""

    def __init__(self, path: Path, *, seed: int | None = None, steps: int | None = None, episodes: int | None = None):
        """Options that are None have the value the demo was started with, or their default."""
        self.run = Run(path)
        self.cloned = Run(path / "cloned")
        self.is_new = not (path / CONFIG).exists()
        if self.is_new:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunError(f"{path}: exists already and is not a demo; choose another directory")
            self.config = demo_config(
                seed=seed or 0,
                steps=STEPS if steps is None else steps,
                episodes=EPISODES if episodes is None else episodes,
            )
            Run.create(path, "rlpd", self.config)
        else:
            self.config = self.run.config(RLPDConfig)
            self._check({"seed": seed, "steps": steps, "episodes": episodes})

    def _check(self, asked: Mapping[str, int | None]) -> None:
        """Raise unless the run is a demo that was started with these options."""
        config, path = self.config, self.run.path
        started = {"seed": config.seed, "steps": config.steps, "episodes": config.evaluation.episodes}
        if config != demo_config(**started):
            raise RunError(f"{path}: is a run, but not a demo of this version; choose another directory")
        for name, value in asked.items():
            if value not in (None, started[name]):
                raise RunError(
                    f"{name}: {path} was started with {started[name]}, got {value}; "
                    f"leave it out, or choose another directory"
                )

    @property
    def result(self) -> DemoResult | None:
        """The outcome, or None if the demo is not finished."""
        path = self.run.path / RESULT
        try:
            saved = json.loads(path.read_text())
            return DemoResult(
                cloned=SuccessRate(**saved["cloned"]),
                learned=SuccessRate(**saved["learned"]),
                intervention_rates=tuple(saved["intervention_rates"]),
                num_steps=saved["num_steps"],
                num_updates=saved["num_updates"],
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}: cannot be read ({error}); remove it, and run the demo again") from None

    # ---- the stages

    def record(self, progress: Callable[[int], None], stop: StopRequest | None = None) -> None:
        """Record demonstrations by the world's script from starts in the corner; `progress` gets their number."""
        with open_world(ENV) as world, Store.open(self.run.store) as store:
            with Reader(self.run.store) as reader:
                there = {r.info.init_state for r in reader.episodes("kind = 'demonstration' and success = 1")}
            writer = store.writer("record", world.step_spec)
            for number, start in enumerate(self._corner(world), 1):
                if stop is not None:
                    stop.check()
                if start not in there:
                    rng = np.random.default_rng([self.config.seed, start])
                    script = _script(world, rng)
                    options = {"task": TASK, "start": start}
                    run_episode(world, writer, takeover=script, kind="demonstration", seed=start, options=options)
                progress(number)

    def _corner(self, world: World) -> list[int]:
        """The starts of the demonstrations: training starts with the target in the corner."""
        starts = [start for start in world.suite.starts(world.task, "train") if _in_corner(start)]
        chosen: list[int] = np.random.default_rng(self.config.seed).permutation(starts)[:DEMONSTRATIONS].tolist()
        return chosen

    def clone(self, say: Callable[[str], None], stop: StopRequest | None = None) -> SuccessRate:
        """Behaviour cloning, the baseline."""
        found = last_success_rate(self.cloned.metrics) if self.cloned.metrics.exists() else None
        if found is None and any(self.cloned.checkpoints.glob("*")):
            return run_cloning(self.cloned, say, stop=stop).success_rate
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
                found = run_cloning(run, say, stop=stop).success_rate
        return found

    def train(
        self,
        watch: Callable[[RLPDProgress], None],
        on_restored: Callable[[list[str]], None],
        stop: StopRequest | None = None,
    ) -> None:
        """Train RLPD on demonstrations, online experience and interventions until the steps are finished."""
        with LocalRun(self.run, watch, stop=stop) as local:
            on_restored(local.restored)
            local.run()

    def conclude(self) -> DemoResult:
        """Save and return the success rates of both policies and the intervention rates."""
        cloned, learned = (last_success_rate(run.metrics) for run in (self.cloned, self.run))
        assert cloned is not None
        assert learned is not None
        episodes = list(read_metrics(self.run.metrics, "episode"))
        parts = [part for part in np.array_split(np.array(episodes), PARTS) if len(part)]
        rates = tuple(sum(e["intervention_steps"] for e in part) / sum(e["length"] for e in part) for part in parts)
        *_, last = read_metrics(self.run.metrics, "evaluation")
        result = DemoResult(
            cloned=cloned,
            learned=learned,
            intervention_rates=rates,
            num_steps=last["step"],
            num_updates=last["update"],
        )
        files.write_durably(self.run.path / RESULT, json.dumps(asdict(result), indent=1).encode())
        return result

    # ---- videos

    def video_of_demonstration(self) -> tuple[Path, list[Array]]:
        """Write a video of the first demonstration; returns its path and the images of its front camera."""
        return self._video(DEMONSTRATION, "kind = 'demonstration' and success = 1", which=0)

    def video_of_correction(self) -> Path | None:
        """Write a video of the correction with the highest intervention rate; None if there was no correction."""
        try:
            return self._video(CORRECTION, "kind = 'correction' and success = 1 and deleted is null", which=-1)[0]
        except LookupError:
            return None

    def _video(self, name: str, where: str, *, which: int) -> tuple[Path, list[Array]]:
        with Reader(self.run.store) as reader:
            records = sorted(reader.episodes(where), key=lambda r: r.num_human / r.num_steps)
            if not records:
                raise LookupError(where)
            episode = reader.read(records[which].id)
        path = self.run.path / name
        write_video(path, draw_episode(episode), fps=FPS)
        return path, list(episode.observation["front"])

    def video_of_both(self) -> Path:
        """Write a video of both policies on one held-out start, where only RLPD succeeds if there is such a start."""
        with open_world(ENV) as world:
            start = self._start_that_differs()
            cloned, learned = (
                _run_policy(world, ActorPolicy.load(run.policy, world.step_spec), start)
                for run in (self.cloned, self.run)
            )
        length = max(len(cloned), len(learned))
        one, other = ([*images, *[images[-1]] * (length - len(images))] for images in (cloned, learned))
        frames = [list(pair) for pair in zip(one, other, strict=True)]
        path = self.run.path / BOTH
        write_video(path, draw_frames(frames, np.full(length - 1, Source.POLICY)), fps=FPS)
        return path

    def _start_that_differs(self) -> int:
        ends = []
        for run in (self.cloned, self.run):
            *_, last = read_metrics(run.metrics, "evaluation")
            ends.append({one["start"]: one["success"] for one in last["episode_results"]})
        cloned, learned = ends
        differing = [start for start in learned if learned[start] and not cloned[start]]
        return int((differing or list(learned))[0])


def demo_config(*, seed: int, steps: int, episodes: int) -> RLPDConfig:
    """The config of the run. The policy sees the state; the cameras are for the videos."""
    actor = ActorConfig(hidden=(128, 128), encoder=EncoderConfig(inputs=("state",)))
    return RLPDConfig(
        env=ENV,
        steps=steps,
        seed=seed,
        intervention=InterventionConfig(source="script"),
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
    return Takeover(AlwaysScript(lambda: world.expert_action(noise=NOISE, rng=rng).action), operator="script")


def _run_policy(world: World, policy: ActorPolicy, start: int) -> list[Array]:
    """The images of the front camera while a policy acts."""
    act = policy_act(policy, np.random.default_rng(0), deterministic=True)
    observation, _ = world.reset(seed=start, options={"task": TASK, "start": start})
    images, ended = cameras_of(observation)[:1], False
    while not ended:
        observation, _, terminated, truncated, _ = world.step(act(observation)[0])
        images += cameras_of(observation)[:1]
        ended = terminated or truncated
    return images
