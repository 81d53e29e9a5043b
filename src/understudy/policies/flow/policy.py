"""FlowPolicy: a small flow-matching policy as a BlockPolicy.

A sampled block is a chain: noise, and what each Euler step made of it, up to the block of actions. The chain is what
`act` records and what `evaluate` gives the log-probs of, one for each step of each action. The noise of the steps is
given (`noise_level`) or learned (`noise_bounds`). Without either the steps have no noise of their own: the noise that
the chain begins with decides the block, and the one log-prob of an action is that of this noise, which does not depend
on the weights.

A policy with `advantage` was told in training which blocks are good. It acts, and gives log-probs, with the velocity
v_0 + guidance (v_good - v_0), where v_0 is the velocity without knowing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from understudy.core import NO_VERSION, ArraySpec, Spec, SpecError, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import policy_file, transfer
from understudy.policies.actions import Actions
from understudy.policies.encoders.words import Words
from understudy.policies.flow import flow_matching
from understudy.policies.flow.config import FlowConfig
from understudy.policies.flow.model import (
    ADVANTAGE,
    BAD,
    FEATURES,
    GOOD,
    NOISY,
    TIME,
    UNKNOWN,
    WORDS,
    FlowModel,
    Output,
    Tensors,
    observed,
)
from understudy.policies.imitation import ImitationLoss, weighted_mean
from understudy.policies.inputs import Inputs
from understudy.policies.language_conditioned import (
    LanguageConditionedPolicy,
    check_rows,
    described_spec,
    fill,
    padded_batches,
)
from understudy.policies.protocol import Acted, Array, Evaluated, PolicyError, Sampling, check_noise
from understudy.policies.rtc.guidance import Guidance
from understudy.policies.stats import Stats
from understudy.policies.transfer import to_tensor

KIND = "flow"
CHAIN = "chain"

Forward: TypeAlias = Callable[[Tensors], Output]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Guide:
    """A Guidance as tensors."""

    wanted: Tensor  # [B, H, A], from -1 to 1
    weight: Tensor  # [B, H]
    inpaint: bool
    max_weight: float

    def rows(self, rows: Tensor) -> _Guide:
        return replace(self, wanted=self.wanted[rows], weight=self.weight[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """The Euler steps of some blocks."""

    chain: Tensor  # [B, K+1, H, A]
    velocity: Tensor  # [B, K, H, A]
    std: Tensor | None  # [B, K, H, A] of the noise, if it is learned
    value: Tensor | None  # [B]


class FlowPolicy(LanguageConditionedPolicy):
    """A policy with its model. A learner may train the model in place, and then raises `version`."""

    kind = KIND
    takes_guidance = True  # `act(..., guidance=)`

    def __init__(
        self, config: FlowConfig, spec: StepSpec, words: Words, model: FlowModel, *, version: int = NO_VERSION
    ):
        """The statistics and the device are those of the model."""
        self.config: FlowConfig = config
        self.version = version
        self.words = words
        self.actions = Actions(spec.action)
        self.model: FlowModel = model
        self.inputs: Inputs = model.encoder.inputs
        self.stats = model.encoder.stats
        self.device: torch.device = model.periods.device
        self.spec = StepSpec(observation=self.inputs.spec, action=spec.action)  # its inputs and outputs
        self.forward: Forward = model  # a learner puts its wrapper of the model (DDP) here
        self.imitation_options: tuple[str, ...] = ("advantage_dropout",) if config.advantage else ()

    @staticmethod
    def new(
        config: FlowConfig,
        spec: StepSpec,
        instructions: Sequence[str],
        stats: Stats | None = None,
        *,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> FlowPolicy:
        """A policy that knows only the words of these instructions; without statistics, numbers stay as they are."""
        words = Words.of(instructions, max_words=config.max_words)
        stats = stats or Stats.none(Inputs(spec.observation, config.encoder.inputs, config.encoder.image_size))
        model = FlowModel(config, spec, stats, num_words=len(words), device=torch.device("cpu"))
        model.init_parameters(torch.Generator().manual_seed(seed))  # on the CPU: the same weights for every device
        policy = FlowPolicy(config, spec, words, model)
        if torch.device(device).type == "cpu":
            return policy
        return FlowPolicy.of(policy.parameters(), policy.description(), device=device)

    # ---- a block policy

    @property
    def block_steps(self) -> int:
        return self.config.block_steps

    @property
    def log_prob_size(self) -> int:
        return self.config.num_inference_steps if self.config.has_noisy_steps else 1

    @property
    def replay_spec(self) -> Spec:
        shape = (self.config.num_inference_steps + 1, self.block_steps, self.actions.size)
        return Spec({CHAIN: ArraySpec(shape=shape, dtype="float32")})

    @property
    def noise_shape(self) -> tuple[int, int]:
        """H x A: what `act(..., noise=)` takes for each row."""
        return self.block_steps, self.actions.size

    @property
    def has_value(self) -> bool:
        return self.config.value_head

    @property
    def why_no_policy_gradient(self) -> str | None:
        """Without noise in the steps the log-probs do not depend on the weights."""
        if self.config.has_noisy_steps:
            return None
        return (
            "noise_level: this flow policy has 0, so that its log-probs do not depend on its weights and there is "
            "nothing to learn from; set --noise-level to more than 0, such as 0.5, or --noise-bounds 0.08 0.16"
        )

    def act(
        self,
        observation: Tree,
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
        noise: Array | None = None,
        guidance: Guidance | None = None,
    ) -> Acted:
        """Choose; `noise` [B, H, A] is what the chains begin with, else it is drawn, or 0 if greedy.

        Each row's generator gives H x A normal numbers unless `noise` is given, and then as many for each step with
        noise; none if greedy. Every number that is drawn is multiplied by the temperature. `guidance` leads the chains
        to continue other blocks; their log-probs are those of the same chains without it.
        """
        num, steps = check_rows(instructions, rngs), self.config.num_inference_steps
        shape = self.noise_shape
        is_noisy = self.config.has_noisy_steps and not sampling.greedy
        start = np.zeros((num, *shape), np.float32) if noise is None else check_noise(noise, (num, *shape))
        noises = np.zeros((num, steps, *shape), np.float32)
        scale = np.float32(sampling.temperature)
        for row, rng in enumerate(rngs):
            if noise is None and not sampling.greedy:
                start[row] = scale * rng.standard_normal(shape, np.float32)
            if is_noisy:
                noises[row] = scale * rng.standard_normal((steps, *shape), np.float32)
        tensors = self.tensors(observation, instructions)
        begun, added = to_tensor(start, self.device), to_tensor(noises, self.device) if is_noisy else None
        guide = None if guidance is None else self._guide(guidance, num)
        found = [
            self._act(tensors, begun, added, guide, rows, sampling)
            for rows in padded_batches(num, self.config.act_rows)
        ]
        parts = [list(part) for part in zip(*found, strict=True)]
        chain, log_prob = (np.concatenate(part)[:num] for part in parts[:2])
        return Acted(
            action=self.actions.from_unit(chain[:, -1]),
            replay={CHAIN: chain},
            log_prob=log_prob,
            value=np.concatenate(parts[2])[:num] if self.has_value else None,
            version=self.version,
        )

    def _guide(self, guidance: Guidance, num: int) -> _Guide:
        steps = self.block_steps
        wanted = self.actions.to_unit(
            trees.map_leaves(lambda leaf: np.reshape(leaf, (num * steps, *leaf.shape[2:])), guidance.previous),
            self.device,
        )
        return _Guide(
            wanted=wanted.view(num, steps, self.actions.size),
            weight=to_tensor(guidance.weights(steps), self.device),
            inpaint=guidance.method == "inpaint",
            max_weight=guidance.max_guidance_weight,
        )

    def _act(
        self,
        tensors: Tensors,
        start: Tensor,
        noises: Tensor | None,
        guide: _Guide | None,
        rows: Tensor,
        sampling: Sampling,
    ) -> tuple[Any, Any, Any]:
        """Chains, log-probs and values of `act_rows` rows."""
        rows = rows.to(self.device)
        part = {name: tensor[rows] for name, tensor in tensors.items()}
        added = None if noises is None else noises[rows]
        chosen = None if guide is None else guide.rows(rows)
        with torch.no_grad() if guide is not None else torch.inference_mode():  # guidance needs gradients
            found = self._run(part, start[rows], added, self.forward, chosen)
            log_prob = self._log_probs(found.chain, found.velocity, found.std, sampling)
        return (
            transfer.to_array(found.chain),
            transfer.to_array(log_prob),
            None if found.value is None else transfer.to_array(found.value),
        )

    def _run(
        self, tensors: Tensors, start: Tensor, noises: Tensor | None, forward: Forward, guide: _Guide | None = None
    ) -> _Run:
        """Chains from `start`; `noises` are [B, K, H, A]."""
        steps = self.config.num_inference_steps
        fixed = flow_matching.noise_stds(steps, self.config.noise_level)
        chain, velocities, stds = [start], [], []
        given: dict[str, Tensor] = dict(tensors)
        first_value: Tensor | None = None
        acting = partial(self._velocity, forward=forward)
        for number, time in enumerate(flow_matching.times(steps)):
            x = chain[-1]
            if guide is not None and guide.inpaint:
                kept = guide.weight[..., None] > 0
                x = chain[-1] = torch.where(kept, (1.0 - time) * start + time * guide.wanted, x)
            given[TIME] = torch.full((len(x),), time, device=x.device)
            if guide is None or guide.inpaint:
                velocity, value, features, std = acting({**given, NOISY: x.flatten(1)})
                moved = velocity = velocity.view(x.shape)
            else:
                (velocity, value, features, std), moved = _guided(acting, given, x, time, guide)
            if number == 0:
                first_value, given = value, {FEATURES: features}
            velocities.append(velocity)
            if std is not None:
                stds.append(std.view(x.shape))
            if noises is None:
                chain.append(x + moved / steps)
            elif std is not None:
                chain.append(x + moved / steps + stds[-1] * noises[:, number])
            else:
                mean = flow_matching.step_mean(x, moved, steps, time, fixed[number])
                chain.append(mean + fixed[number] * noises[:, number])
        return _Run(
            chain=torch.stack(chain, dim=1),
            velocity=torch.stack(velocities, dim=1),
            std=torch.stack(stds, dim=1) if stds else None,
            value=first_value,
        )

    def _velocity(self, given: Tensors, forward: Forward) -> Output:
        """What the policy acts with: the model's output, guided towards what is good if the model knows of it."""
        guidance = self.config.guidance
        if not self.config.advantage or guidance == 1.0:
            return forward({**given, **self._told(GOOD, given)})
        plain, value, features, std = forward({**given, **self._told(UNKNOWN, given)})
        good, *_ = forward({FEATURES: features, NOISY: given[NOISY], TIME: given[TIME], **self._told(GOOD, given)})
        return flow_matching.towards_good(plain, good, guidance), value, features, std

    def _told(self, what: int, given: Tensors) -> dict[str, Tensor]:
        """That all blocks are of one kind; nothing for a model that does not know of it."""
        if not self.config.advantage:
            return {}
        return {ADVANTAGE: torch.full((len(given[TIME]),), what, device=self.device)}

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
        chain = self._recorded(replay, len(instructions))
        steps = self.config.num_inference_steps
        given = self.tensors(observation, instructions)
        given[NOISY] = chain[:, :-1].flatten(0, 1).flatten(1)  # all steps in one pass
        given[TIME] = torch.tensor(flow_matching.times(steps), device=self.device).repeat(len(chain))
        velocity, value, _, std = self._velocity(given, module or self.forward)
        shape = chain[:, 1:].shape
        std = None if std is None else std.view(shape)
        return Evaluated(
            log_prob=self._log_probs(chain, velocity.view(shape), std, sampling),
            entropy=self._entropies(chain, std, sampling),
            value=value,
        )

    def _log_probs(self, chain: Tensor, velocity: Tensor, std: Tensor | None, sampling: Sampling) -> Tensor:
        """Of chains, as [B, H, D]."""
        if not self.config.has_noisy_steps:
            return flow_matching.noise_log_probs(chain[:, 0], sampling.temperature)[..., None]
        before, after = chain[:, :-1], chain[:, 1:]
        if std is None:
            mean, std = flow_matching.sde_steps(before, velocity, self.config.noise_level)
        else:
            mean = before + velocity / self.config.num_inference_steps
        return flow_matching.step_log_probs(after, mean, std * sampling.temperature)

    def _entropies(self, chain: Tensor, std: Tensor | None, sampling: Sampling) -> Tensor:
        """Of the noise of each step, as [B, H, D]: constants, unless it is learned."""
        if std is None:
            level, steps = self.config.noise_level, self.config.num_inference_steps
            each = flow_matching.noise_stds(steps, level) if level else [1.0]
            std = torch.tensor(each, device=self.device)[:, None, None].expand(chain[:, : len(each)].shape)
        return flow_matching.step_entropies(std * sampling.temperature)

    def prepared(self, observation: Tree) -> Tree:
        """The observations as `evaluate` takes them: nothing is slow there."""
        return observation

    def num_tokens(self, instruction: str) -> int:
        """Of one row in a forward pass: its steps."""
        del instruction
        return self.config.num_inference_steps

    def tensors(self, observation: Tree, instructions: Sequence[str]) -> dict[str, Tensor]:
        """The model's inputs for a batch of observations, without noisy blocks and times."""
        found = self.inputs.tensors(observation, self.device)
        num = len(next(iter(found.values())))
        if num != len(instructions):
            raise SpecError(f"instructions: expected {num}, one for each observation, got {len(instructions)}")
        seen = {observed(path): tensor for path, tensor in found.items()}
        return {**seen, WORDS: to_tensor(self.words.encode(instructions), self.device)}

    def _recorded(self, replay: Mapping[str, Any], num: int) -> Tensor:
        """The chains float32 [num, K+1, H, A] that `act` has recorded."""
        wanted = [num, *self.replay_spec.flat[CHAIN].fixed_shape]
        found = np.asarray(replay[CHAIN], np.float32) if CHAIN in replay else None
        if found is None or list(found.shape) != wanted:
            got = ", ".join(replay) or "nothing" if found is None else list(found.shape)
            raise PolicyError(
                f"replay/{CHAIN}: expected {wanted}, got {got}; store what act() recorded, of the same rows"
            )
        return to_tensor(found, self.device)

    # ---- imitation

    @property
    def image_names(self) -> tuple[str, ...]:
        return tuple(observed(camera) for camera in self.inputs.cameras)

    def imitation_loss(
        self,
        tensors: Tensors,
        action: Tensor,
        weight: Tensor,
        *,
        generator: torch.Generator,
        good: Tensor | None = None,
        advantage_dropout: float = 0.0,
    ) -> ImitationLoss:
        """Flow matching: new noise for each block, and a time that is uniform from 0 to 1.

        `good` [B] bool says which blocks are good, by default all; of a share `advantage_dropout` of them a model with
        `advantage` is not told, so that it also learns what all blocks have in common.
        """
        noise = torch.randn(action.shape, generator=generator, device=self.device)
        time = torch.rand(len(action), generator=generator, device=self.device)
        noisy = flow_matching.interpolated(noise, action, time)
        told: dict[str, Tensor] = {}
        if self.config.advantage:
            known = torch.full_like(time, GOOD, dtype=torch.int64) if good is None else torch.where(good, GOOD, BAD)
            dropped = torch.rand(len(action), generator=generator, device=self.device) < advantage_dropout
            told[ADVANTAGE] = torch.where(dropped, UNKNOWN, known)
        velocity, *_ = self.model({**tensors, NOISY: noisy.flatten(1), TIME: time, **told})
        errors = flow_matching.squared_errors(velocity.view(action.shape), noise, action)

        def report() -> dict[str, Tensor]:
            with torch.no_grad():
                found = self._run(tensors, torch.zeros_like(action), None, self.model)
                away = (found.chain[:, -1].clamp(-1.0, 1.0) - action).abs().mean(dim=-1)
            return {"error": weighted_mean(away, weight)}

        return ImitationLoss(loss=weighted_mean(errors, weight), report=report)

    def with_stats(self, stats: Stats) -> FlowPolicy:
        """The policy with other statistics of its inputs; they are put into the model, which it shares with this."""
        self.model.encoder.set_stats(stats)
        return FlowPolicy(self.config, self.spec, self.words, self.model, version=self.version)

    # ---- publishing, saving and loading

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole policy; of a frozen encoder it has the digest."""
        digest = self.model.encoder.digest
        return {**super().description(), **({} if digest is None else {"encoder_digest": digest})}

    def with_parameters(self, parameters: Tree, *, version: int) -> FlowPolicy:
        """The policy with newer arrays of the same shapes; this one stays as it is."""
        weights, stats = policy_file.unpack(parameters)
        model = copy.deepcopy(self.model)
        fill(model, weights)
        model.encoder.set_stats(stats)
        return FlowPolicy(self.config, self.spec, self.words, model, version=version)

    def with_value_head(self, *, seed: int) -> FlowPolicy:
        """The policy with a value head, new if it has none; the rest of it is a copy."""
        if self.has_value:
            return self.with_parameters(self.parameters(), version=self.version)
        return self._with_part(replace(self.config, value_head=True), seed=seed)

    def with_advantage(self, guidance: float) -> FlowPolicy:
        """The policy with a model that can be told what is good, and this guidance; the rest of it is a copy.

        A model that could not be told before acts as it did, until it has learned from good and bad blocks.
        """
        return self._with_part(replace(self.config, advantage=True, guidance=guidance), seed=0)

    def with_noise_level(self, noise_level: float) -> FlowPolicy:
        """The policy with another noise in its steps. It has the same model."""
        config = replace(self.config, noise_level=noise_level)
        return FlowPolicy(config, self.spec, self.words, self.model, version=self.version)

    def with_act_rows(self, act_rows: int) -> FlowPolicy:
        """The policy with another number of rows in each forward pass of `act`. It has the same model."""
        config = replace(self.config, act_rows=act_rows)
        return FlowPolicy(config, self.spec, self.words, self.model, version=self.version)

    def with_noise_bounds(self, bounds: tuple[float, float], *, seed: int) -> FlowPolicy:
        """The policy with a network for the noise of its steps, new if it has none; the rest of it is a copy."""
        return self._with_part(replace(self.config, noise_bounds=bounds, noise_level=0.0), seed=seed)

    def _with_part(self, config: FlowConfig, *, seed: int) -> FlowPolicy:
        """A copy with a model of this config; a part that this model does not have is new."""
        made = FlowPolicy.new(config, self.spec, self.words.known, self.stats, seed=seed, device=self.device).model
        made.load_state_dict(self.model.state_dict(), strict=False)
        return FlowPolicy(config, self.spec, self.words, made, version=self.version)

    @classmethod
    def of(cls, parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu") -> FlowPolicy:
        """The policy that `parameters` and `description` were taken of."""
        spec = described_spec(description)
        config = FlowConfig.from_json(description["config"])
        words = Words(description["words"], max_words=config.max_words)
        weights, stats = policy_file.unpack(parameters)
        model = FlowModel(config, spec, stats, num_words=len(words), device=torch.device(device))
        policy_file.check_digest(model.encoder.digest, description.get("encoder_digest"))
        fill(model, weights)
        return FlowPolicy(config, spec, words, model, version=int(description["version"]))


def _guided(forward: Forward, given: Tensors, x: Tensor, time: float, guide: _Guide) -> tuple[Output, Tensor]:
    """The model's output at x [B, H, A], and its velocity with guidance, all without gradients."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        velocity, value, features, std = forward({**given, NOISY: x.flatten(1)})
        velocity = velocity.view(x.shape)
        moved = flow_matching.guided(velocity, x, guide.wanted, guide.weight, time, guide.max_weight)
    found = velocity.detach(), None if value is None else value.detach(), features.detach()
    return (*found, None if std is None else std.detach()), moved
