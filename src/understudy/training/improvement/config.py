"""The options of a run that improves a policy. Importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from understudy.algorithms.recap import ValueTrainingConfig
from understudy.algorithms.sft import SFTUpdateConfig
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import AUTO
from understudy.training.runs.threads import check_threads

Method: TypeAlias = Literal["cloning", "filtered-cloning", "hg-dagger", "recap"]

METHODS: dict[str, str] = {
    "cloning": "all steps",
    "filtered-cloning": "successful episodes",
    "hg-dagger": "demonstrations and corrections",
    "recap": "all steps, told which are good",
}
SIMPLE: tuple[Method, ...] = ("cloning", "filtered-cloning", "hg-dagger")  # that need no value model


@dataclass(frozen=True, kw_only=True)
class RecapConfig:
    """How RECAP finds out which steps are good, and how the policy uses it."""

    advantage_steps: int = 6
    """Number of steps over which an advantage is measured."""
    good_share: float = 0.3
    """Share of the policy's own steps that are good, those with the highest advantages; the human's are all good."""
    failure_steps: int | None = None
    """Number of steps that a failure counts as; None is as many as the longest episode of the instruction."""
    guidance: float = 1.5
    """How far the policy moves towards what is good when it acts: 1 all the way, more goes beyond it."""
    value: ValueTrainingConfig = field(default_factory=ValueTrainingConfig)

    def __post_init__(self) -> None:
        if self.advantage_steps < 1:
            raise ConfigError(f"advantage_steps: expected a number from 1, got {self.advantage_steps}")
        if not 0 <= self.good_share <= 1:
            raise ConfigError(f"good_share: expected a share from 0 to 1, got {self.good_share}")
        if self.failure_steps is not None and self.failure_steps < 0:
            raise ConfigError(f"failure_steps: expected None or a number from 0, got {self.failure_steps}")


@dataclass(frozen=True, kw_only=True)
class ImproveConfig:
    """A run that improves a policy from recorded experience."""

    policy: str
    """Run whose policy is improved, of `understudy sft` or `understudy improve`."""
    experience: tuple[str, ...]
    """Directories of stores with episodes to learn from, such as those of `understudy rollout`."""
    by: Method = "hg-dagger"
    """What to learn from: cloning (all steps), filtered-cloning (successful episodes), hg-dagger (what humans did:
    demonstrations and corrections), or recap (all steps, with the policy told which of them are good)."""
    demos: str | None = None
    """Directory of a store with demonstrations; None takes those that the policy has learned from."""
    env: str | None = None
    """World to evaluate in, with its options; None is that of the policy's run."""
    updates: int | None = None
    """Number of updates of the whole run; None is as many as in the policy's run."""
    batch_size: int | None = None
    """Number of blocks of actions in a batch; None is as many as in the policy's run."""
    report_every: int = 100
    """Number of updates between two lines of metrics."""
    checkpoint_every: int = 500
    """Number of updates between two checkpoints."""
    keep_checkpoints: int = 2
    """Number of the newest checkpoints that are kept."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    device: str = AUTO
    """Device that torch trains on: cpu, cuda, cuda:1, or auto, which is a GPU where there is one and else the CPU."""
    threads: int | None = None
    """Number of CPU threads of torch; None: OMP_NUM_THREADS if it is set, else one per core, up to 8."""
    compare: bool = False
    """Also train by the other simple methods (cloning, filtered-cloning, hg-dagger), each in a run of its own inside
    this one, and compare all of them and the policy before."""
    evaluation: TaskEvaluationConfig = field(default_factory=lambda: TaskEvaluationConfig(sampling="sampled"))
    sft: SFTUpdateConfig = field(default_factory=SFTUpdateConfig)
    recap: RecapConfig = field(default_factory=RecapConfig)

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size", "report_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if not self.experience:
            raise ConfigError("experience: expected at least one store, got none; `understudy rollout` records one")
        check_threads(self.threads)
        if self.by != "recap" and self.recap != RecapConfig():
            raise ConfigError(f"recap: has no effect with by={self.by!r}; leave these options out, or use --by recap")
