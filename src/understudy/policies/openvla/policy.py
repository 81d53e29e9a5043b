"""OpenVLAPolicy: a published checkpoint of OpenVLA or OpenVLA-OFT as a BlockPolicy.

A row does not depend on the other rows of its batch: every forward pass of `act` has `act_rows` rows with prompts that
are padded to one length, which each has by itself, and missing rows are copies of the last one. What it records are
the log-probs of the pass that `evaluate` makes too, so that the two differ by no more than the rounding of another
number of rows and other padding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from understudy.core import NO_VERSION, ArraySpec, Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import transfer
from understudy.policies.lora import merged_state
from understudy.policies.openvla import diffusion, laplace, loading
from understudy.policies.openvla.checkpoint import Checkpoint
from understudy.policies.openvla.config import DIFFUSION_STEPS, L1_SCALE, OpenVLAConfig
from understudy.policies.openvla.inputs import ImagePreprocessor, OpenVLAInputs, Prompts, cameras_of, check_proprio
from understudy.policies.openvla.network import OpenVLANetwork, Tensors
from understudy.policies.openvla.tokens import ActionTokens, Range, statistics_of
from understudy.policies.protocol import Acted, Array, Evaluated, PolicyError, Sampling, check_noise
from understudy.policies.tokens import TOKENS, TokenPolicy, weigh
from understudy.policies.transfer import to_tensor
from understudy.policies.vla import bins

NUMBERS = "numbers"  # in the replay of a policy with an action head: what was drawn, mostly from -1 to 1
NOISE = "noise"  # in that of a policy with a diffusion head: what it began with

Forward: TypeAlias = Callable[[Tensors], tuple[Tensor, Tensor | None]]


class OpenVLAPolicy(TokenPolicy):
    """A policy with its model. A learner may train the model in place, and then raises `version`."""

    def __init__(
        self,
        config: OpenVLAConfig,
        spec: StepSpec,
        checkpoint: Checkpoint,
        model: OpenVLANetwork,
        *,
        device: str | torch.device,
        version: int = NO_VERSION,
    ):
        """Use `load`, which gives the parts that belong together."""
        self.config: OpenVLAConfig = config
        self.spec = spec
        self.version = version
        self.device = torch.device(device)
        self.model = model
        self.forward: Callable[..., tuple[Tensor, Tensor | None]] = model  # or a wrapper of it, for training
        self._checkpoint = checkpoint
        self._diffusion = checkpoint.has_diffusion
        self._l1_head = checkpoint.has_action_head and not self._diffusion  # numbers instead of tokens
        _, statistics = statistics_of(checkpoint.statistics, config.unnorm_key)
        language = loading.language_config(checkpoint)
        self._first_id, self._end_id = loading.action_ids(checkpoint, language)
        self._stop_id = language.eos_token_id if isinstance(language.eos_token_id, int) else 2
        self.actions: ActionTokens = ActionTokens(
            spec.action,
            _part(statistics, "action", config),
            num_bins=self._end_id - self._first_id,
            gripper=config.libero_gripper,
            where=f"norm_stats/{config.unnorm_key}/action",
            normalization=config.normalization,
        )
        self._prompts = Prompts(checkpoint.directory, bos_id=int(language.bos_token_id or 1))
        self._inputs = OpenVLAInputs(
            cameras=config.cameras or (),
            images=ImagePreprocessor.of(
                checkpoint.preprocessor,
                num_towers=len(loading.vision_shapes(checkpoint)),
                center_crop=config.center_crop,
                mirror=config.mirror,
                resize=config.resize,
            ),
            proprio=config.use_proprio or (),
            proprio_range=_proprio_range(config, statistics),
        )

    @staticmethod
    def load(
        path: str | Path,
        spec: StepSpec,
        config: OpenVLAConfig | None = None,
        *,
        device: str | torch.device = "cpu",
        version: int = NO_VERSION,
        **options: Any,
    ) -> OpenVLAPolicy:
        """From a directory as on the Hub, for a world with this Spec; `options` are fields of the config.

        No code of a checkpoint is run.
        """
        try:
            config = replace(config or OpenVLAConfig(), **options)
        except TypeError as error:
            raise PolicyError(f"options: {error}; see OpenVLAConfig") from None
        checkpoint = Checkpoint.open(path)
        if (checkpoint.has_action_head or checkpoint.has_film) and config.decoding != "parallel":
            raise PolicyError(
                f"decoding: {path} has an action head or FiLM, which decode in parallel, got {config.decoding!r}"
            )
        l1_head = checkpoint.has_action_head and not checkpoint.has_diffusion
        if not l1_head and config.l1_scale != L1_SCALE:
            raise PolicyError(f"l1_scale: {path} has no L1 head, so that it would have no effect; leave it out")
        if not checkpoint.has_diffusion and config.num_diffusion_steps != DIFFUSION_STEPS:
            raise PolicyError(
                f"num_diffusion_steps: {path} has no diffusion head, so that it would have no effect; leave it out"
            )
        if checkpoint.has_diffusion and config.value_head:
            raise PolicyError(f"value_head: {path} has a diffusion head, which cannot be trained here; leave it out")
        unnorm_key, statistics = statistics_of(checkpoint.statistics, config.unnorm_key)
        config = replace(config, unnorm_key=unnorm_key, cameras=cameras_of(config.cameras, spec.observation))
        proprio = _proprio_range(config, statistics)
        if proprio is not None:
            check_proprio(config.use_proprio or (), spec.observation, len(proprio))
        model = loading.build(
            checkpoint, config, proprio_size=None if proprio is None else len(proprio), device=torch.device(device)
        )
        policy = OpenVLAPolicy(config, spec, checkpoint, model, device=device, version=version)
        head = model.action_head
        if head is not None and head.shape.action_size != policy.actions.size:
            raise PolicyError(
                f"action_head: gives {head.shape.action_size} numbers, norm_stats/{unnorm_key}/action has "
                f"{policy.actions.size}; choose another unnorm_key"
            )
        return policy

    # ---- a block policy

    @property
    def why_no_policy_gradient(self) -> str | None:
        """With a diffusion head, the log-probs are those of the first noise and do not depend on the weights."""
        if not self._diffusion:
            return None
        return (
            "policy: it has a diffusion head, whose log-probs do not depend on its weights, so there is nothing to "
            "learn from; take a checkpoint with action tokens or an L1 head"
        )

    @property
    def replay_spec(self) -> Spec:
        if not self._l1_head and not self._diffusion:
            return super().replay_spec
        names = (NOISE, NUMBERS) if self._diffusion else (NUMBERS,)
        return Spec(dict.fromkeys(names, ArraySpec(shape=(self.block_steps, self.log_prob_size), dtype="float32")))

    @property
    def noise_shape(self) -> tuple[int, int] | None:
        """H x D: what `act(..., noise=)` takes for each row with a diffusion head; None without one."""
        return (self.block_steps, self.actions.size) if self._diffusion else None

    def act(
        self,
        observation: Tree,
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
        noise: Array | None = None,
    ) -> Acted:
        """Choose; each row's generator gives H x D numbers from [0, 1), or none if it is greedy.

        With a diffusion head they are normal numbers, the noise that it begins with; temperature scales it. `noise`
        [B, H, D] replaces them.
        """
        num = len(instructions)
        if not num or len(rngs) != num:
            raise PolicyError(f"rngs: expected {num or 'some'} generators, one for each instruction, got {len(rngs)}")
        shape = (num, self.block_steps, self.actions.size)
        if self._diffusion:
            if noise is not None:
                return self._act_from_noise(observation, instructions, check_noise(noise, shape), sampling)
            drawn = np.zeros(shape, np.float32)
            if not sampling.greedy:
                drawn = np.stack([rng.standard_normal(shape[1:], np.float32) for rng in rngs])
            return self._act_from_noise(observation, instructions, drawn * np.float32(sampling.temperature), sampling)
        if noise is not None:
            raise PolicyError("noise: this policy has no diffusion head and makes its blocks of none; leave it out")
        uniforms = np.zeros(shape)
        if not sampling.greedy:
            uniforms = np.stack([rng.random(shape[1:]) for rng in rngs])
        chosen = np.zeros(shape, np.float32 if self._l1_head else np.int32)
        log_prob, value = np.zeros(shape, np.float32), np.zeros(num, np.float32)
        with torch.inference_mode(), self._evaluating():
            for rows in self._batches(instructions):
                part = _rows(observation, rows)
                found = self._act(part, [instructions[row] for row in rows], uniforms[rows], sampling)
                for row, *(one_chosen, one_log_prob, one_value) in zip(rows, *found, strict=True):
                    chosen[row], log_prob[row], value[row] = one_chosen, one_log_prob, one_value
        return Acted(
            action=self.actions.of_unit(chosen.astype(np.float64)) if self._l1_head else self.actions.action(chosen),
            replay={NUMBERS if self._l1_head else TOKENS: chosen},
            log_prob=log_prob,
            value=value if self.has_value else None,
            version=self.version,
        )

    def _act_from_noise(
        self, observation: Tree, instructions: Sequence[str], noise: Array, sampling: Sampling
    ) -> Acted:
        numbers = np.zeros_like(noise)
        with torch.inference_mode(), self._evaluating():
            for rows in self._batches(instructions):
                part = [instructions[row] for row in rows]
                denoised = self._denoise(_rows(observation, rows), part, noise[rows])
                for row, one in zip(rows, denoised, strict=True):
                    numbers[row] = one
        log_prob = _noise_log_prob(torch.from_numpy(noise), sampling)
        return Acted(
            action=self.actions.of_unit(numbers.astype(np.float64)),
            replay={NOISE: noise, NUMBERS: numbers},
            log_prob=log_prob.numpy(),
            value=None,
            version=self.version,
        )

    def _denoise(self, observation: Tree, instructions: Sequence[str], noise: Array) -> Array:
        """The numbers [B, H, D] that come of noise; images are seen once, and the language model runs in each step."""
        tensors = self.tensors(observation, instructions)
        given = {name: tensor for name, tensor in tensors.items() if name not in ("images", "proprio")}
        given["seen"] = self.model.look(tensors)
        numbers = to_tensor(noise, self.device).flatten(1)
        for times in diffusion.timesteps(self.config.num_diffusion_steps):
            time = torch.full((len(numbers),), float(times[0]), device=self.device)
            predicted, _ = self.forward({**given, "noisy": numbers, "time": time})
            numbers = diffusion.denoise(numbers, predicted, times)
        return transfer.to_array(numbers.reshape(noise.shape))

    def _act(
        self, observation: Tree, instructions: Sequence[str], uniforms: Array, sampling: Sampling
    ) -> tuple[Array, Array, Array]:
        """Tokens or numbers, log-probs and values of rows whose prompts have one length."""
        shape = uniforms.shape
        if self._l1_head:
            given, value = self.forward(self.tensors(observation, instructions))
            given = given.reshape(*shape, 2)
            numbers = laplace.draw(given, uniforms, sampling)
            log_prob, _ = laplace.weigh(given, numbers, sampling)
            return transfer.to_array(numbers), transfer.to_array(log_prob), _values(value, len(numbers))
        if self.config.decoding == "parallel":
            logits, value = self.forward(self.tensors(observation, instructions))
            tokens = draw(logits.reshape(*shape, -1), uniforms, sampling)
        else:
            tokens = self._generate(observation, instructions, uniforms, sampling)
            logits, value = self.forward(self.tensors(observation, instructions, tokens))  # as `evaluate` will see them
        log_prob, _ = weigh(logits.reshape(*shape, -1), tokens, sampling)
        return transfer.to_array(tokens.to(torch.int32)), transfer.to_array(log_prob), _values(value, len(tokens))

    def _generate(self, observation: Tree, instructions: Sequence[str], uniforms: Array, sampling: Sampling) -> Tensor:
        """One number after the other, each seeing those before it: int64 [B, 1, D]."""
        tensors = self.tensors(observation, instructions)
        length = len(self._prompts.ids(instructions[0]))
        images = {name: tensor for name, tensor in tensors.items() if name != "is_token"}
        given = {**images, "ids": tensors["ids"][:, :length], "at": tensors["at"][:, :1]}
        cache, drawn = DynamicCache(), []
        for number in range(self.actions.size):
            logits, _ = self.forward(given, cache)
            drawn.append(draw(logits, uniforms[:, 0, number : number + 1], sampling))
            ids = self._end_id - 1 - drawn[-1]
            given = {"ids": ids, "at": torch.zeros_like(ids)}
        return torch.cat(drawn, dim=1)[:, None]

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
        if self._diffusion:
            noise = self._recorded_numbers(replay, len(instructions), NOISE)
            log_prob = _noise_log_prob(noise, sampling)
            entropy = torch.full_like(log_prob, 0.5 + 0.5 * math.log(2 * math.pi) + math.log(sampling.temperature))
            return Evaluated(log_prob=log_prob, entropy=entropy, value=None)
        if self._l1_head:
            numbers = self._recorded_numbers(replay, len(instructions), NUMBERS)
            given, value = (module or self.forward)(self.tensors(observation, instructions))
            log_prob, entropy = laplace.weigh(given.reshape(*numbers.shape, 2), numbers, sampling)
            return Evaluated(log_prob=log_prob, entropy=entropy, value=value)
        tokens = self._recorded(replay, len(instructions))
        known = tokens if self.config.decoding == "autoregressive" else None
        logits, value = (module or self.forward)(self.tensors(observation, instructions, known))
        log_prob, entropy = weigh(logits.reshape(*tokens.shape, -1), tokens, sampling)
        return Evaluated(log_prob=log_prob, entropy=entropy, value=value)

    def tensors(
        self, observation: Tree, instructions: Sequence[str], tokens: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What the model is given for a batch; `tokens` [B, H, D] are the bins that an autoregressive one has drawn."""
        prompts = [self._prompts.ids(text) for text in instructions]
        count = self.block_steps * self.actions.size
        parallel = self.config.decoding == "parallel"
        behind = count + 1 if parallel else count - 1  # the end of the text; the last number is seen by none
        lengths = np.array([len(prompt) for prompt in prompts])
        size = max(self._padded_length(text) for text in instructions) + behind
        ids = np.zeros((len(prompts), size), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            if parallel:
                ids[row, len(prompt) + count] = self._stop_id
        offset = np.arange(size)[None] - lengths[:, None]
        made = {"ids": ids, "at": lengths[:, None] - 1 + np.arange(count)[None]}
        if lengths.min() + behind < size:
            made["is_token"] = offset < behind
        if parallel:
            made["empty"] = (offset >= 0) & (offset < count)
        found = {name: to_tensor(array, self.device) for name, array in made.items()}
        if tokens is not None and behind:
            drawn = self._end_id - 1 - tokens.flatten(1)[:, :behind]
            found["ids"].scatter_(1, to_tensor(lengths[:, None] + np.arange(behind)[None], self.device), drawn)
        return found | self._inputs.tensors(observation, len(prompts), self.device)

    def prepared(self, observation: Tree) -> Tree:
        """The observations with images as the network sees them, with which `evaluate` needs no time for images."""
        leaf = next(iter(trees.flatten(observation).values()))
        return self._inputs.prepared(observation, len(leaf))

    def tokens_of(self, action: Tree) -> Array:
        """The replay of a demonstrated block: bins int32 [B, H, D] of actions [B, H, ...]; with an L1 head, numbers."""
        if self._diffusion:
            raise PolicyError(str(self.why_no_policy_gradient))
        return self.actions.unit(action).astype(np.float32) if self._l1_head else self.actions.bins(action)

    # ---- publishing, saving and loading

    def parameters(self, weights: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """What is trained, by name, as float32: with LoRA the adapter and the value head, else everything.

        `weights` are the model's, by its own names, where it holds only a part of each of them itself (FSDP).
        """
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        if weights is not None:
            return {name: np.array(weights[name], np.float32) for name in trained}
        return {name: weight.detach().float().cpu().numpy().copy() for name, weight in trained.items()}

    def num_tokens(self, instruction: str) -> int:
        """Of one row in a forward pass: patches, words, proprioception and the actions."""
        shape = loading.vision_shapes(self._checkpoint)[0]
        patches = self.config.num_images_in_input * shape.num_patches
        others = int(self.config.use_proprio is not None) + int(self._diffusion)  # of proprioception, and of the time
        return patches + others + self._padded_length(instruction) + self.block_steps * self.log_prob_size

    def with_parameters(self, parameters: Mapping[str, Any], *, version: int) -> OpenVLAPolicy:
        """The policy with newer arrays of what is trained; all else is shared with this one, which stays as it is."""
        frozen = {id(weight): weight for weight in self.model.parameters() if not weight.requires_grad}
        model = copy.deepcopy(self.model, frozen)
        own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for name in sorted(own.keys() | parameters.keys()):
            wanted = list(own[name].shape) if name in own else "no such weight"
            got = list(np.shape(parameters[name])) if name in parameters else "nothing"
            if wanted != got:
                raise PolicyError(f"{name}: expected {wanted}, got {got}; they are of another network")
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(torch.as_tensor(np.asarray(parameters[name])))
        return OpenVLAPolicy(self.config, self.spec, self._checkpoint, model, device=self.device, version=version)

    def save(self, directory: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """A plain checkpoint, with an adapter merged in, in the layout it was loaded from; the directory is new.

        `weights` is the model's state if it does not hold it whole, as when it is sharded.
        """
        state = merged_state(self.model, weights)
        loading.write(directory, self._checkpoint, state, getattr(torch, self.config.dtype))

    def _recorded_numbers(self, replay: Mapping[str, Any], num: int, name: str) -> Tensor:
        """The numbers float32 [num, H, D] that `act` has recorded."""
        wanted = [num, self.block_steps, self.log_prob_size]
        found = np.asarray(replay[name], np.float32) if name in replay else None
        if found is None or list(found.shape) != wanted:
            got = ", ".join(replay) or "nothing" if found is None else list(found.shape)
            raise PolicyError(
                f"replay/{name}: expected {wanted}, got {got}; store what act() recorded, of the same rows"
            )
        return torch.as_tensor(found, device=self.device)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Turn dropout off, whatever mode the model is in."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    def _padded_length(self, instruction: str) -> int:
        """Number of tokens of a prompt with its padding."""
        multiple = self.config.pad_prompts_to or (32 if self.device.type == "cuda" else 1)
        return -(-len(self._prompts.ids(instruction)) // multiple) * multiple

    def _batches(self, instructions: Sequence[str]) -> list[list[int]]:
        """Rows in batches of `act_rows` with prompts that are padded to one length, padded with the last row."""
        alike = self._padded_length if self.config.decoding == "parallel" else lambda text: len(self._prompts.ids(text))
        by_length: dict[int, list[int]] = {}
        for row, text in enumerate(instructions):
            by_length.setdefault(alike(text), []).append(row)
        size = self.config.act_rows or (8 if self.device.type == "cuda" else 1)
        return [
            (rows[first : first + size] + size * [rows[-1]])[:size]
            for rows in by_length.values()
            for first in range(0, len(rows), size)
        ]


def draw(logits: Tensor, uniforms: Array, sampling: Sampling) -> Tensor:
    """One bin for each distribution [..., K]: the most likely, or where the running sum passes a number from [0, 1)."""
    if sampling.greedy:
        return logits.argmax(dim=-1)
    log_probs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    return bins.draw(log_probs, torch.as_tensor(uniforms, device=logits.device))


def _noise_log_prob(noise: Tensor, sampling: Sampling) -> Tensor:
    """The log-density of each number of a normal noise with the temperature as its deviation."""
    scale = sampling.temperature
    return -0.5 * (noise / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)


def _values(value: Tensor | None, num: int) -> Array:
    return np.zeros(num, np.float32) if value is None else transfer.to_array(value)


def _rows(observation: Tree, rows: list[int]) -> Tree:
    return trees.map_leaves(lambda leaf: np.asarray(leaf)[rows], observation)


def _part(statistics: Mapping[str, Any], name: str, config: OpenVLAConfig) -> Mapping[str, Any]:
    found = statistics.get(name)
    if not isinstance(found, Mapping):
        raise PolicyError(
            f"norm_stats/{config.unnorm_key}: expected {name}, got {', '.join(statistics) or 'nothing'}; "
            f"choose another unnorm_key"
        )
    return found


def _proprio_range(config: OpenVLAConfig, statistics: Mapping[str, Any]) -> Range | None:
    if config.use_proprio is None:
        return None
    where = f"norm_stats/{config.unnorm_key}/proprio"
    return Range(_part(statistics, "proprio", config), where, config.normalization)
