"""ActorPolicy: an encoder and a tanh-normal over the arm's numbers, and perhaps a gripper beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.core import NO_VERSION, Spec, StepSpec, Tree
from understudy.policies import policy_file as artefact
from understudy.policies import tanh_normal
from understudy.policies.actions import Actions
from understudy.policies.encoder import Encoder, EncoderConfig
from understudy.policies.gripper import Gripper
from understudy.policies.inputs import to_tensor
from understudy.policies.networks import Weights, init_mlp, mlp
from understudy.policies.protocol import Acted, Array, Evaluated, PolicyError
from understudy.policies.stats import Stats

KIND = "policy"


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The shape of an actor."""

    encoder: EncoderConfig = EncoderConfig()  # noqa: RUF009 (a frozen value)
    hidden: tuple[int, ...] = (256, 256)
    log_std: tuple[float, float] = (-5.0, 2.0)  # bounds of the log of the spread, before tanh
    gripper: Gripper | None = None

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise PolicyError(f"hidden: expected at least one positive number, got {self.hidden}")
        if not self.log_std[0] < self.log_std[1]:
            raise PolicyError(f"log_std: expected a lower and a higher bound, got {self.log_std}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ActorConfig:
        gripper = value["gripper"]
        return ActorConfig(
            encoder=EncoderConfig.from_json(value["encoder"]),
            hidden=tuple(value["hidden"]),
            log_std=(value["log_std"][0], value["log_std"][1]),
            gripper=None if gripper is None else Gripper(**{**gripper, "values": tuple(gripper["values"])}),
        )


class Actor:
    """The functions of an actor, without its weights: from features to a distribution, from choices to actions."""

    def __init__(self, config: ActorConfig, spec: StepSpec, stats: Stats, device: torch.device):
        self.config = config
        self.device = device
        self.encoder = Encoder(config.encoder, spec.observation, stats, device)
        self.actions = Actions(spec.action)
        self.gripper = config.gripper
        self.gripper_index = None if self.gripper is None else self.gripper.index(self.actions)
        self.arm_size = self.actions.size - (self.gripper is not None)
        arm = [index for index in range(self.actions.size) if index != self.gripper_index]
        self._arm = torch.tensor(arm, device=device)
        self._units = None if self.gripper is None else torch.tensor(self.gripper.units(self.actions), device=device)

    def init(self, generator: torch.Generator) -> Weights:
        """New weights; the first actions lie around the middle of their bounds."""
        sizes = (self.encoder.size, *self.config.hidden)
        weights = self.encoder.init(generator)
        weights |= init_mlp("actor", (*sizes, 2 * self.arm_size), generator, last_gain=0.01)
        if self.gripper is not None:
            weights |= init_mlp("gripper", (*sizes, len(self.gripper.values)), generator)
        return weights

    def distribution(self, weights: Mapping[str, Tensor], features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log of the spread [B, arm] of the normal below the tanh."""
        mean, raw = mlp(weights, "actor", features, len(self.config.hidden)).chunk(2, dim=-1)
        return mean, tanh_normal.bounded_log_std(raw, *self.config.log_std)

    def gripper_values(self, weights: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Q [B, K] of each value the gripper can take."""
        return mlp(weights, "gripper", features, len(self.config.hidden))

    def split(self, unit: Tensor) -> tuple[Tensor, Tensor | None]:
        """Executed actions [B, D] from -1 to 1 as the arm's numbers [B, arm] and the gripper's nearest value [B]."""
        if self._units is None:
            return unit, None
        nearest = (unit[:, self.gripper_index, None] - self._units).abs().argmin(dim=-1)
        return unit[:, self._arm], nearest

    def join(self, arm: Tensor, choice: Tensor | None) -> Tensor:
        """The other way."""
        if choice is None or self._units is None:
            return arm
        unit = arm.new_empty(len(arm), self.actions.size)
        unit[:, self._arm] = arm
        unit[:, self.gripper_index] = self._units[choice]
        return unit


class ActorPolicy:
    """A policy with its weights. They never change: `with_parameters` gives another policy."""

    def __init__(
        self,
        config: ActorConfig,
        spec: StepSpec,
        stats: Stats,
        weights: Mapping[str, Tensor],
        *,
        version: int = NO_VERSION,
        device: str | torch.device = "cpu",
    ):
        self.config = config
        self.stats = stats
        self.version = version
        self.device = torch.device(device)
        self.actor = Actor(config, spec, stats, self.device)
        self.spec = StepSpec(observation=self.actor.encoder.inputs.spec, action=spec.action)  # what it sees and gives
        like = self.actor.init(torch.Generator())
        artefact.check_weights(weights, like)
        self.weights = {name: weights[name].to(self.device, torch.float32) for name in like}

    def act(self, observation: Tree, *, rng: np.random.Generator, deterministic: bool = False) -> Acted:
        """Choose; `rng` gives one number per arm number, and two per gripper that strays, in this order."""
        actor = self.actor
        single = actor.encoder.inputs.is_single(observation)
        with torch.inference_mode():
            tensors = actor.encoder.inputs.tensors(observation, self.device, single=single)
            features = actor.encoder(self.weights, tensors)
            mean, log_std = actor.distribution(self.weights, features)
            pre_tanh = mean
            if not deterministic:
                noise = rng.standard_normal(tuple(mean.shape), np.float32)
                pre_tanh = mean + torch.exp(log_std) * to_tensor(noise, self.device)
            log_prob = tanh_normal.log_prob(pre_tanh, mean, log_std)
            replay = {"pre_tanh": pre_tanh}
            choice = None
            if actor.gripper is not None:
                values = actor.gripper_values(self.weights, features)
                chosen = actor.gripper.choose(values.cpu().numpy(), None if deterministic else rng)
                choice = replay["gripper"] = to_tensor(chosen, self.device)
                log_prob = log_prob + actor.gripper.log_prob(values, choice)
            unit = actor.join(torch.tanh(pre_tanh), choice).cpu().numpy()
        return Acted(
            action=actor.actions.from_unit(unit[0] if single else unit),
            replay={name: _row(tensor, single) for name, tensor in replay.items()},
            log_prob=_row(log_prob, single),
            value=None,
            version=self.version,
        )

    def evaluate(self, observation: Tree, replay: Mapping[str, Any]) -> Evaluated:
        return evaluate(self.actor, self.weights, observation, replay)

    # ---- elsewhere

    def parameters(self) -> Tree:
        """All arrays, as they are published and saved: a nested dict of float32."""
        return artefact.pack(self.weights, self.stats)

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole policy."""
        return {
            "kind": KIND,
            "version": self.version,
            "config": self.config.to_json(),
            "observation": self.spec.observation.to_json(),
            "action": self.spec.action.to_json(),
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
        weights, stats = artefact.unpack(parameters)
        config = ActorConfig.from_json(description["config"])
        return ActorPolicy(config, spec, stats, weights, version=int(description["version"]), device=device)

    def save(self, path: str | Path) -> None:
        """Into one safetensors file; a crash leaves the old file or the new one."""
        artefact.write(path, self.description(), self.parameters())

    @staticmethod
    def load(path: str | Path, spec: StepSpec | None = None, *, device: str | torch.device = "cpu") -> ActorPolicy:
        """From a file; with the Spec of the world it is to act in, refuse another than it was made for."""
        return artefact.load(
            path,
            KIND,
            lambda parameters, description: ActorPolicy.of(parameters, description, device=device),
            lambda policy: None if spec is None else policy.check_world(spec),
        )

    def check_world(self, spec: StepSpec) -> None:
        """Refuse a world that this policy cannot act in."""
        artefact.check_world(self.spec, spec)


def evaluate(actor: Actor, weights: Mapping[str, Tensor], observation: Tree, replay: Mapping[str, Any]) -> Evaluated:
    """What these weights think of earlier choices; gradients flow into those that ask for them."""
    tensors = actor.encoder.inputs.tensors(observation, actor.device)
    features = actor.encoder(weights, tensors)
    mean, log_std = actor.distribution(weights, features)
    log_prob = tanh_normal.log_prob(_replayed(replay, "pre_tanh", actor), mean, log_std)
    entropy = tanh_normal.entropy(mean, log_std)
    if actor.gripper is not None:
        values = actor.gripper_values(weights, features)
        log_prob = log_prob + actor.gripper.log_prob(values, _replayed(replay, "gripper", actor))
        entropy = entropy + actor.gripper.entropy
    return Evaluated(log_prob=log_prob, entropy=entropy, value=None)


def _replayed(replay: Mapping[str, Any], name: str, actor: Actor) -> Tensor:
    if name not in replay:
        raise PolicyError(
            f"replay/{name}: expected what act() recorded, got {', '.join(replay) or 'nothing'}; store it"
        )
    value = replay[name]
    return value if isinstance(value, Tensor) else to_tensor(value, actor.device)


def _row(tensor: Tensor, single: bool) -> Array:
    array: Array = tensor.cpu().numpy()
    return np.asarray(array[0]) if single else array
