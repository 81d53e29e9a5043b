"""ActorPolicy: an encoder, a tanh-normal over the arm's numbers, and optionally a gripper with a critic of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from understudy.core import NO_VERSION, Spec, StepSpec, Tree
from understudy.policies import policy_file
from understudy.policies.actions import Actions
from understudy.policies.config import ActorConfig
from understudy.policies.encoders.observation_encoder import ObservationEncoder
from understudy.policies.mlp import MLP
from understudy.policies.protocol import Acted, Array, Evaluated, PolicyError
from understudy.policies.rlpd import tanh_normal
from understudy.policies.stats import Stats
from understudy.policies.transfer import to_tensor

KIND = "policy"
BASE_ACTION = "base_action"  # the field of an observation that a residual actor changes: [D] from -1 to 1


class Actor(nn.Module):
    """The networks of a policy: from observations to features, and from features to a distribution over actions."""

    def __init__(self, config: ActorConfig, spec: StepSpec, stats: Stats, device: torch.device):
        """Weights are undefined until `init_parameters` or `load_state_dict` fills them."""
        super().__init__()
        self.config = config
        self.spec = spec
        self.device = device
        self.encoder = ObservationEncoder(config.encoder, spec.observation, stats, device)
        self.actions = Actions(spec.action)
        self.gripper_config = config.gripper
        self.gripper_index = None if config.gripper is None else config.gripper.index(self.actions)
        self.arm_size = self.actions.size - (config.gripper is not None)
        sizes = (self.encoder.size, *config.hidden)
        self.actor = MLP((*sizes, 2 * self.arm_size), last_gain=0.01)
        self.gripper = None if config.gripper is None else MLP((*sizes, len(config.gripper.values)))
        arm = [index for index in range(self.actions.size) if index != self.gripper_index]
        self._arm = torch.tensor(arm, device=device)
        units = None if config.gripper is None else config.gripper.units(self.actions)
        self._units = None if units is None else torch.tensor(units, device=device)
        if config.residual_scale is not None and BASE_ACTION not in self.encoder.inputs.states:
            raise PolicyError(
                f"residual_scale: expected {BASE_ACTION!r} in what the network sees, got "
                f"{', '.join(self.encoder.inputs.leaves)}; train with a base policy, or set residual_scale to None"
            )
        self.to(device)

    def init_parameters(self, generator: torch.Generator) -> None:
        """New weights; the first actions lie around the middle of their bounds."""
        self.encoder.init_parameters(generator)
        self.actor.init_parameters(generator)
        if self.gripper is not None:
            self.gripper.init_parameters(generator)

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation of the arm's numbers, before tanh."""
        return self.distribution(self.encoder(observation))

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation [B, arm] of the normal before tanh."""
        mean, raw = self.actor(features).chunk(2, dim=-1)
        return mean, tanh_normal.bounded_log_std(raw, *self.config.log_std)

    def executed(self, observation: Mapping[str, Tensor], arm: Tensor) -> Tensor:
        """The arm's numbers [B, arm] that the world is to execute: the network's own, or its change of the base
        action."""
        if self.config.residual_scale is None:
            return arm
        return (self.base(observation) + self.config.residual_scale * arm).clamp(-1.0, 1.0)

    def base(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The arm's numbers [B, arm] of the base action."""
        return observation[BASE_ACTION][:, self._arm]

    def gripper_values(self, features: Tensor) -> Tensor:
        """Q [B, K] of each value the gripper can take."""
        assert self.gripper is not None
        values: Tensor = self.gripper(features)
        return values

    def split(self, unit: Tensor) -> tuple[Tensor, Tensor | None]:
        """Executed actions [B, D] from -1 to 1 as the arm's numbers [B, arm] and the gripper's nearest value [B]."""
        if self._units is None:
            return unit, None
        nearest = (unit[:, self.gripper_index, None] - self._units).abs().argmin(dim=-1)
        return unit[:, self._arm], nearest

    def join(self, arm: Tensor, choice: Tensor | None) -> Tensor:
        """The inverse of `split`."""
        if choice is None or self._units is None:
            return arm
        unit = arm.new_empty(len(arm), self.actions.size)
        unit[:, self._arm] = arm
        unit[:, self.gripper_index] = self._units[choice]
        return unit


class ActorPolicy:
    """A policy with its weights. They never change: `with_parameters` gives another policy."""

    def __init__(self, actor: Actor, *, version: int = NO_VERSION):
        """The policy takes over the actor: nobody else may change its weights."""
        self.actor = actor.requires_grad_(False)
        self.config = actor.config
        self.stats = actor.encoder.stats
        self.version = version
        self.device = actor.device
        self.spec = StepSpec(observation=actor.encoder.inputs.spec, action=actor.spec.action)  # what it sees and gives

    def act(self, observation: Tree, *, rng: np.random.Generator, deterministic: bool = False) -> Acted:
        """Choose. `rng` gives one number per arm number, then two per gripper if its epsilon is not 0."""
        actor = self.actor
        single = actor.encoder.inputs.is_single(observation)
        with torch.inference_mode():
            tensors = actor.encoder.inputs.tensors(observation, self.device, single=single)
            features = actor.encoder(tensors)
            mean, log_std = actor.distribution(features)
            pre_tanh = mean
            if not deterministic:
                noise = rng.standard_normal(tuple(mean.shape), np.float32)
                pre_tanh = mean + torch.exp(log_std) * to_tensor(noise, self.device)
            log_prob = tanh_normal.log_prob(pre_tanh, mean, log_std)
            replay = {"pre_tanh": pre_tanh}
            choice = None
            if actor.gripper_config is not None:
                values = actor.gripper_values(features)
                chosen = actor.gripper_config.choose(values.cpu().numpy(), None if deterministic else rng)
                choice = replay["gripper"] = to_tensor(chosen, self.device)
                log_prob = log_prob + actor.gripper_config.log_prob(values, choice)
            unit = actor.join(actor.executed(tensors, torch.tanh(pre_tanh)), choice).cpu().numpy()
        return Acted(
            action=actor.actions.from_unit(unit[0] if single else unit),
            replay={name: _row(tensor, single=single) for name, tensor in replay.items()},
            log_prob=_row(log_prob, single=single),
            value=None,
            version=self.version,
        )

    def evaluate(self, observation: Tree, replay: Mapping[str, Any]) -> Evaluated:
        return evaluate(self.actor, observation, replay)

    # ---- publishing, saving and loading

    def parameters(self) -> Tree:
        """All arrays, as they are published and saved: a nested dict of float32."""
        return policy_file.pack(policy_file.named_weights(self.actor), self.stats)

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole policy; of a frozen encoder it has the digest."""
        digest = self.actor.encoder.digest
        return {
            "kind": KIND,
            "version": self.version,
            "config": self.config.to_json(),
            "observation": self.spec.observation.to_json(),
            "action": self.spec.action.to_json(),
            **({} if digest is None else {"encoder_digest": digest}),
        }

    def with_parameters(self, parameters: Tree, *, version: int) -> ActorPolicy:
        """The policy with newer arrays of the same shapes."""
        return ActorPolicy.of(parameters, {**self.description(), "version": version}, device=self.device)

    @staticmethod
    def of(parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu") -> ActorPolicy:
        """The policy that `parameters` and `description` were taken of."""
        spec = StepSpec(
            observation=Spec.from_json(description["observation"]), action=Spec.from_json(description["action"])
        )
        weights, stats = policy_file.unpack(parameters)
        actor = Actor(ActorConfig.from_json(description["config"]), spec, stats, torch.device(device))
        policy_file.load_weights(actor, weights, description)
        return ActorPolicy(actor, version=int(description["version"]))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; after a crash there is the old file or the new one."""
        policy_file.write(path, self.description(), self.parameters())

    @staticmethod
    def load(path: str | Path, spec: StepSpec | None = None, *, device: str | torch.device = "cpu") -> ActorPolicy:
        """Read a file. Given the Spec of a world, refuse a policy that was trained for another."""
        return policy_file.load(
            path,
            KIND,
            lambda parameters, description: ActorPolicy.of(parameters, description, device=device),
            lambda policy: None if spec is None else policy.check_world(spec),
        )

    def check_world(self, spec: StepSpec) -> None:
        """Refuse a world that this policy cannot act in."""
        policy_file.check_world(self.spec, spec)


def evaluate(actor: Actor, observation: Tree, replay: Mapping[str, Any]) -> Evaluated:
    """Log-probs and entropies of earlier choices; gradients flow into the parameters that require them."""
    tensors = actor.encoder.inputs.tensors(observation, actor.device)
    features = actor.encoder(tensors)
    mean, log_std = actor.distribution(features)
    log_prob = tanh_normal.log_prob(_replayed(replay, "pre_tanh", actor), mean, log_std)
    entropy = tanh_normal.entropy(mean, log_std)
    if actor.gripper_config is not None:
        values = actor.gripper_values(features)
        log_prob = log_prob + actor.gripper_config.log_prob(values, _replayed(replay, "gripper", actor))
        entropy = entropy + actor.gripper_config.entropy
    return Evaluated(log_prob=log_prob, entropy=entropy, value=None)


def copy_of(actor: Actor) -> Actor:
    """An actor with the same weights in memory of its own."""
    copy = Actor(actor.config, actor.spec, actor.encoder.stats, actor.device)
    copy.load_state_dict(actor.state_dict())
    return copy


def _replayed(replay: Mapping[str, Any], name: str, actor: Actor) -> Tensor:
    if name not in replay:
        raise PolicyError(
            f"replay/{name}: expected what act() recorded, got {', '.join(replay) or 'nothing'}; store it"
        )
    value = replay[name]
    return value if isinstance(value, Tensor) else to_tensor(value, actor.device)


def _row(tensor: Tensor, *, single: bool) -> Array:
    array: Array = tensor.cpu().numpy()
    return np.asarray(array[0]) if single else array
