"""VLAPolicy: a VLAModel as a BlockPolicy. Instructions and observations become tokens, and tokens become actions.

A row does not depend on the other rows of its batch: every forward pass of `act` has `act_rows` rows, padded with
copies of the last one, and everything else is computed row by row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from understudy.core import NO_VERSION, Spec, SpecError, StepSpec, Tree
from understudy.policies import policy_file, transfer
from understudy.policies.actions import Actions
from understudy.policies.encoders.words import Words
from understudy.policies.imitation import ImitationLoss, weighted_mean
from understudy.policies.inputs import Inputs, is_camera
from understudy.policies.language_conditioned import (
    LanguageConditionedPolicy,
    check_rows,
    described_spec,
    fill,
    padded_batches,
)
from understudy.policies.protocol import Acted, Evaluated, PolicyError, Sampling
from understudy.policies.stats import Stats
from understudy.policies.tokens import TOKENS, TokenPolicy, weigh
from understudy.policies.transfer import to_tensor
from understudy.policies.vla import bins
from understudy.policies.vla.config import MAX_CAMERAS, VLAConfig
from understudy.policies.vla.model import PROPRIO, WORDS, Tensors, VLAModel, image
from understudy.policies.vla.soft_targets import soft_cross_entropy, soft_targets

KIND = "vla"

Forward: TypeAlias = Callable[[Tensors], tuple[Tensor, Tensor | None]]


class VLAPolicy(TokenPolicy, LanguageConditionedPolicy):
    """A policy with its model. A learner may train the model in place, and then raises `version`."""

    kind = KIND
    imitation_options: tuple[str, ...] = ("sigma",)

    def __init__(
        self,
        config: VLAConfig,
        spec: StepSpec,
        words: Words,
        stats: Stats,
        model: VLAModel,
        *,
        version: int = NO_VERSION,
        device: str | torch.device = "cpu",
    ):
        self.config: VLAConfig = config
        self.version = version
        self.device = torch.device(device)
        self.words = words
        self.stats = stats
        self.actions: Actions = Actions(spec.action)
        self.inputs = _inputs(config, spec.observation)
        stats.check(self.inputs)
        self.spec = StepSpec(observation=self.inputs.spec, action=spec.action)  # its inputs and outputs
        self.model: VLAModel = model.to(self.device)
        self.forward: Forward = self.model  # a learner puts its wrapper of the model (DDP) here
        self._mean, self._std = (
            torch.cat([torch.from_numpy(part[path]) for path in self.inputs.states]).to(self.device)
            if self.inputs.states
            else torch.zeros(0)
            for part in (stats.mean, stats.std)
        )

    @staticmethod
    def new(
        config: VLAConfig,
        spec: StepSpec,
        instructions: Sequence[str],
        stats: Stats | None = None,
        *,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> VLAPolicy:
        """A policy that knows only the words of these instructions; without statistics, numbers stay as they are."""
        config = resolved(config, spec.observation)
        words = Words.of(instructions, max_words=config.max_words)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _model(config, spec, words)
        stats = stats or Stats.none(_inputs(config, spec.observation))
        return VLAPolicy(config, spec, words, stats, model, device=device)

    # ---- a block policy

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        """Choose; each row's generator gives H x A numbers from [0, 1), or none if it is greedy."""
        num = check_rows(instructions, rngs)
        shape = (num, self.block_steps, self.actions.size)
        uniforms = None
        if not sampling.greedy:
            uniforms = torch.from_numpy(np.array([rng.random(shape[1:]) for rng in rngs]).reshape(shape))
        tensors = self.tensors(observation, instructions)
        found = [self._act(tensors, uniforms, rows, sampling) for rows in padded_batches(num, self.config.act_rows)]
        parts = [list(part) for part in zip(*found, strict=True)]
        tokens, log_prob = (np.concatenate(part)[:num] for part in parts[:2])
        return Acted(
            action=self.actions.from_unit(bins.to_unit(tokens, self.config.num_bins)),
            replay={TOKENS: tokens},
            log_prob=log_prob,
            value=np.concatenate(parts[2])[:num] if self.has_value else None,
            version=self.version,
        )

    @torch.inference_mode()
    def _act(self, tensors: Tensors, uniforms: Tensor | None, rows: Tensor, sampling: Sampling) -> tuple[Any, Any, Any]:
        """Tokens int32, log-probs and values of `act_rows` rows."""
        part = {name: tensor[rows.to(tensor.device)] for name, tensor in tensors.items()}
        logits, value = self.forward(part)
        log_probs = torch.log_softmax(logits / sampling.temperature, dim=-1)
        if uniforms is None:
            tokens = log_probs.argmax(dim=-1)
        else:
            tokens = bins.draw(log_probs, uniforms[rows].to(self.device))
        log_prob = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        return (
            transfer.to_array(tokens.to(torch.int32)),
            transfer.to_array(log_prob),
            None if value is None else transfer.to_array(value),
        )

    def evaluate(
        self,
        observation: Tree,
        instructions: Sequence[str],
        replay: Mapping[str, Any],
        *,
        sampling: Sampling,
        module: Forward | None = None,
    ) -> Evaluated:
        """Recompute earlier choices; `module` replaces the own model, such as one that is wrapped in DDP."""
        tokens = self._recorded(replay, len(instructions))
        logits, value = (module or self.forward)(self.tensors(observation, instructions))
        log_prob, entropy = weigh(logits, tokens, sampling)
        return Evaluated(log_prob=log_prob, entropy=entropy, value=value)

    def prepared(self, observation: Tree) -> Tree:
        """The observations as `evaluate` takes them: images of the cameras' size need nothing."""
        return observation

    def num_tokens(self, instruction: str) -> int:
        """Of one row in a forward pass; instructions are padded, so that all rows have as many."""
        del instruction
        return self.model.num_tokens

    def tensors(self, observation: Tree, instructions: Sequence[str]) -> dict[str, Tensor]:
        """The model's inputs for a batch of observations."""
        found = self.inputs.tensors(observation, self.device)
        tensors = {image(camera): found[camera] for camera in self.inputs.cameras}
        if self.inputs.states:
            state = torch.cat([found[path] for path in self.inputs.states], dim=1)
            tensors[PROPRIO] = (state - self._mean) / self._std
        tensors[WORDS] = to_tensor(self.words.encode(instructions), self.device)
        num = len(tensors[image(self.inputs.cameras[0])])
        if num != len(instructions):
            raise SpecError(f"instructions: expected {num}, one for each observation, got {len(instructions)}")
        return tensors

    # ---- imitation

    @property
    def image_names(self) -> tuple[str, ...]:
        return tuple(image(camera) for camera in self.inputs.cameras)

    def imitation_loss(
        self, tensors: Tensors, action: Tensor, weight: Tensor, *, generator: torch.Generator, sigma: float
    ) -> ImitationLoss:
        """Cross-entropy with a normal of `sigma` bins around each demonstrated number; nothing is drawn."""
        del generator
        num_bins = self.config.num_bins
        position = bins.to_position(action, num_bins)
        logits, _ = self.model(tensors)
        loss = soft_cross_entropy(logits, soft_targets(position, num_bins, sigma), weight)

        def report() -> dict[str, Tensor]:
            found = logits.detach()
            away = (found.argmax(dim=-1) - position).abs()
            log_probs = torch.log_softmax(found, dim=-1)
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
            return {
                "error": weighted_mean(away.mean(dim=-1), weight) * (2.0 / (num_bins - 1)),
                "entropy": weighted_mean(entropy.mean(dim=-1), weight),
            }

        return ImitationLoss(loss=loss, report=report)

    def with_stats(self, stats: Stats) -> VLAPolicy:
        """The policy with other statistics of its inputs. It has the same model."""
        return VLAPolicy(
            self.config, self.spec, self.words, stats, self.model, version=self.version, device=self.device
        )

    # ---- publishing, saving and loading

    def with_parameters(self, parameters: Tree, *, version: int) -> VLAPolicy:
        """The policy with newer arrays of the same shapes; this one stays as it is."""
        weights, stats = policy_file.unpack(parameters)
        model = copy.deepcopy(self.model)
        fill(model, weights)
        return VLAPolicy(self.config, self.spec, self.words, stats, model, version=version, device=self.device)

    def with_value_head(self, *, seed: int) -> VLAPolicy:
        """The policy with a value head, new if it has none; the rest of it is a copy."""
        if self.has_value:
            return self.with_parameters(self.parameters(), version=self.version)
        config = replace(self.config, value_head=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _model(config, self.spec, self.words)
        model.load_state_dict(self.model.state_dict(), strict=False)  # all but the head
        return VLAPolicy(config, self.spec, self.words, self.stats, model, version=self.version, device=self.device)

    @classmethod
    def of(cls, parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu") -> VLAPolicy:
        """The policy that `parameters` and `description` were taken of."""
        spec = described_spec(description)
        config = VLAConfig.from_json(description["config"])
        words = Words(description["words"], max_words=config.max_words)
        weights, stats = policy_file.unpack(parameters)
        with torch.random.fork_rng(devices=[]):  # the weights it draws are replaced
            model = _model(config, spec, words)
        fill(model, weights)
        return VLAPolicy(config, spec, words, stats, model, version=int(description["version"]), device=device)


def resolved(config: VLAConfig, observation: Spec) -> VLAConfig:
    """The config with the names of its cameras."""
    if config.cameras is not None:
        return config
    found = tuple(path for path, leaf in observation.flat.items() if is_camera(leaf))
    if not 1 <= len(found) <= MAX_CAMERAS:
        raise PolicyError(
            f"cameras: expected a world with one to three, got {len(found)} ({', '.join(found) or 'none'}); name them"
        )
    return replace(config, cameras=found)


def _inputs(config: VLAConfig, observation: Spec) -> Inputs:
    """The fields that a policy of this config sees, each of the kind that it takes them for."""
    assert config.cameras is not None
    inputs = Inputs(observation, (*config.cameras, *(config.use_proprio or ())))
    for name, wanted, found in (
        ("cameras", config.cameras, inputs.cameras),
        ("use_proprio", config.use_proprio or (), inputs.states),
    ):
        for path in wanted:
            if path not in found:
                what = "images" if name == "cameras" else "numbers"
                raise PolicyError(f"{name}: expected fields with {what}, got {path!r}, {inputs.leaves[path]}")
    return inputs


def _model(config: VLAConfig, spec: StepSpec, words: Words) -> VLAModel:
    inputs = _inputs(config, spec.observation)
    shapes = {inputs.leaves[camera].fixed_shape for camera in inputs.cameras}
    size = max(max(shape) for shape in shapes)
    if shapes != {(size, size, 3)}:
        raise PolicyError(
            f"cameras: expected square images of one size in three colours, got "
            f"{', '.join(f'{camera} {inputs.leaves[camera]}' for camera in inputs.cameras)}; choose some of them"
        )
    return VLAModel(
        config,
        image_size=size,
        proprio_size=inputs.state_size,
        action_size=Actions(spec.action).size,
        num_words=len(words),
    )
