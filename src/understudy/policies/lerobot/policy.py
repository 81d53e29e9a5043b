"""LeRobotPolicy: a policy that lerobot trained, as a BlockPolicy whose code runs in lerobot's own interpreter."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from understudy.core import StepSpec, Tree
from understudy.policies.lerobot.checkpoint import LeRobotCheckpoint, action_fields
from understudy.policies.lerobot.config import LeRobotConfig
from understudy.policies.subprocess import Limits, PolicyFactory, SubprocessPolicy

FACTORY = "understudy.policies.lerobot.child:LeRobotBlocks"
OFFLINE = "HF_HUB_OFFLINE"


class LeRobotPolicy(SubprocessPolicy):
    """ACT, diffusion policy, SmolVLA, pi0 or pi0.5. It acts, and gives no gradients. Close it."""

    def __init__(
        self,
        path: str | Path,
        spec: StepSpec,
        config: LeRobotConfig | None = None,
        *,
        device: str = "cpu",
        limits: Limits | None = None,
    ):
        """Start the interpreter and load the policy there, for a world with this Spec."""
        self.config = config or LeRobotConfig()
        self.checkpoint = LeRobotCheckpoint.read(Path(path).absolute())
        self.checkpoint.check_action(spec.action)
        options = {
            "path": os.fspath(self.checkpoint.path),
            "kind": self.checkpoint.kind,
            "inputs": self.checkpoint.inputs(spec.observation, self.config),
            "action": action_fields(spec.action),
            "block_steps": self.checkpoint.executed_steps(self.config),
            "tokenizer": self.config.tokenizer,
            "device": device,
        }
        # Nothing is downloaded unless the user asks for it.
        variables = {OFFLINE: os.environ.get(OFFLINE, "1")}
        made = PolicyFactory(factory=FACTORY, options=options, python=self.config.interpreter, env=variables)
        super().__init__(made, spec, limits=limits)

    @classmethod
    def load(
        cls, path: str | Path, spec: StepSpec, config: LeRobotConfig | None = None, *, device: object = "cpu"
    ) -> LeRobotPolicy:
        """The policy in a directory `pretrained_model`; see `LeRobotPolicy`."""
        return cls(path, spec, config, device=str(device))

    def parameters(self) -> Tree:
        """A digest of each of its files, for fingerprints; the weights themselves stay in the other process."""
        found = {}
        for file in sorted(self.checkpoint.path.iterdir()):
            if file.is_file():
                with file.open("rb") as stream:
                    found[file.name] = np.frombuffer(hashlib.file_digest(stream, "sha256").digest(), np.uint8)
        return found
