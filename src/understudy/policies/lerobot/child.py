"""LeRobotBlocks: a policy of lerobot as a PlainPolicy. It runs in the interpreter that has lerobot, from Python 3.12.

Rows are computed one by one: lerobot pads prompts to the longest of a batch, so that the bits of a row would depend on
the others. What is drawn for a row comes from its own generator: the noise that a block is made of and, for a diffusion
policy whose sampler (DDPM) adds noise in each step, the seed of that noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

NOISE, ACTION = "noise", "action"  # in the replay
ADVICE = "what it names of Hugging Face must be in the cache: run `hf download NAME` once, or set HF_HUB_OFFLINE=0"


class LeRobotBlocks:
    """Blocks of a policy of lerobot. Their log-probs are those of the noise; ACT draws nothing, and has 0."""

    log_prob_size = 1
    has_value = False

    def __init__(
        self,
        path: str,
        kind: str,
        inputs: Mapping[str, Sequence[str]],
        action: Sequence[Mapping[str, Any]],
        block_steps: int,
        tokenizer: str | None,
        device: str,
    ):
        """`inputs`: the fields that each input of the policy is made of; `action`: the fields of an action."""
        self.block_steps = block_steps
        self._device = device
        self._inputs = {name: list(paths) for name, paths in inputs.items()}
        self._fields = list(action)
        self._policy = load_policy(path, kind, device)
        self._before, self._after = load_processors(path, self._policy.config, tokenizer, device)
        config = self._policy.config
        size = sum(int(np.prod(field["shape"])) for field in action)
        self._num_seen = config.n_obs_steps if kind == "diffusion" else 1
        self._seeds_steps = kind == "diffusion"
        self.noise_shape: tuple[int, int] | None = None
        if kind == "diffusion":
            self.noise_shape = (config.horizon, size)
        elif kind != "act":
            self.noise_shape = (config.chunk_size, config.max_action_dim)
        self.replay_spec: dict[str, Any] = {ACTION: ((block_steps, size), "float32")}
        if self.noise_shape is not None:
            self.replay_spec[NOISE] = (self.noise_shape, "float32")

    def act(
        self,
        observation: Mapping[str, Array],
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        temperature: float,
        greedy: bool,
        noise: Array | None = None,
    ) -> dict[str, Any]:
        """Blocks, before they are clipped in `replay`; greedy blocks are made of noise that is 0."""
        blocks: list[Array] = []
        noises: list[Any] = []
        for row, rng in enumerate(rngs):
            begun = self._noise(rng, temperature, greedy, None if noise is None else noise[row])
            if self._seeds_steps:
                torch.manual_seed(0 if greedy else int(rng.integers(2**63)))
            blocks.append(self._block(observation, instructions[row], row, begun))
            noises.append(begun)
        block = np.stack(blocks)
        replay = {ACTION: block}
        if self.noise_shape is not None:
            replay[NOISE] = np.stack(noises)
        log_prob = self._log_probs(replay, temperature)
        return {"action": self._split(block), "replay": replay, "log_prob": log_prob}

    def evaluate(
        self,
        observation: Mapping[str, Array],
        instructions: Sequence[str],
        replay: Mapping[str, Array],
        *,
        temperature: float,
    ) -> dict[str, Any]:
        """Of the noise, which does not depend on the weights."""
        del observation, instructions
        log_prob = self._log_probs(replay, temperature)
        if self.noise_shape is None:
            return {"log_prob": log_prob, "entropy": np.zeros_like(log_prob)}
        each = 0.5 + 0.5 * np.log(2 * np.pi) + np.log(temperature)
        entropy = self._of_actions(np.full((len(log_prob), *self.noise_shape), each))
        return {"log_prob": log_prob, "entropy": entropy}

    def _noise(self, rng: np.random.Generator, temperature: float, greedy: bool, given: Array | None) -> Array | None:
        if self.noise_shape is None or given is not None:
            return given
        if greedy:
            return np.zeros(self.noise_shape, np.float32)
        return np.float32(temperature) * rng.standard_normal(self.noise_shape, np.float32)

    def _block(self, observation: Mapping[str, Array], instruction: str, row: int, noise: Array | None) -> Array:
        """Actions [H, A] in the units of the data that the policy was trained on."""
        batch = self._before({**self._seen(observation, row), "task": [instruction]})
        if self._num_seen > 1:
            batch = {name: self._repeated(name, value) for name, value in batch.items()}
        options = {} if noise is None else {"noise": torch.from_numpy(noise)[None].to(self._device)}
        with torch.no_grad():
            chunk = self._after(self._policy.predict_action_chunk(batch, **options))
        found: Array = chunk[0, : self.block_steps].to("cpu", torch.float32).numpy()
        return found

    def _seen(self, observation: Mapping[str, Array], row: int) -> dict[str, torch.Tensor]:
        """One observation by the names of lerobot: images [1, 3, H, W] from 0 to 1, and vectors [1, S]."""
        found = {}
        for name, paths in self._inputs.items():
            parts = [observation[path][row] for path in paths]
            if parts[0].dtype == np.uint8 and parts[0].ndim == 3:
                found[name] = torch.from_numpy(parts[0]).permute(2, 0, 1)[None].to(torch.float32) / 255
            else:
                vector = np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)
                found[name] = torch.from_numpy(vector)[None]
        return found

    def _repeated(self, name: str, value: Any) -> Any:
        """An input as if it had been the same in the steps before, as at the start of an episode."""
        if name not in self._inputs:
            return value
        return value[:, None].expand(-1, self._num_seen, *value.shape[1:])

    def _log_probs(self, replay: Mapping[str, Array], temperature: float) -> Array:
        if self.noise_shape is None:
            return np.zeros((len(replay[ACTION]), self.block_steps, 1), np.float32)
        scaled = replay[NOISE].astype(np.float64) / temperature
        return self._of_actions(-0.5 * scaled**2 - 0.5 * np.log(2 * np.pi) - np.log(temperature))

    def _of_actions(self, values: Array) -> Array:
        """Sums [B, H, 1] for each action; the noise of steps before and after the block counts to its ends."""
        steps = np.clip(np.arange(values.shape[1]) - (self._num_seen - 1), 0, self.block_steps - 1)
        found = np.zeros((len(values), self.block_steps))
        np.add.at(found.T, steps, values.sum(axis=-1).T)
        return found[..., None].astype(np.float32)

    def _split(self, block: Array) -> dict[str, Array]:
        """Blocks by the fields of an action, clipped to what the world takes."""
        found, at = {}, 0
        for field in self._fields:
            size = int(np.prod(field["shape"]))
            part = block[..., at : at + size].reshape(*block.shape[:2], *field["shape"])
            low, high = (np.asarray(field[name], part.dtype) for name in ("low", "high"))
            found[field["path"]] = np.clip(part, low, high).astype(field["dtype"])
            at += size
        return found


def load_policy(path: str, kind: str, device: str) -> Any:
    """The policy in a directory, with its adapter (LoRA) merged if it has one. A weight that the file does not have is
    an error, and not a random number."""
    try:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class
    except ImportError as error:
        raise ImportError(
            f"{error}; this interpreter needs it: pip install 'lerobot[smolvla,pi,diffusion]==0.6.1'"
        ) from error
    config = PreTrainedConfig.from_pretrained(path)
    config.device = device
    adapter = Path(path, "adapter_config.json")
    base = str(json.loads(adapter.read_bytes())["base_model_name_or_path"]) if adapter.exists() else path
    try:
        found = checked(get_policy_class(kind)).from_pretrained(base, config=config)
    except OSError as error:
        raise OSError(f"{base}: cannot be loaded: {error}; {ADVICE}") from error
    if found.problem:
        raise ValueError(f"{base}/model.safetensors: {found.problem}; copy the policy again, or save it again")
    if adapter.exists():
        from peft import PeftModel

        found = PeftModel.from_pretrained(found, path).merge_and_unload()
    return found.to(device).eval()


def checked(policy_class: Any) -> Any:
    """The class of a policy with its `problem` at loading. lerobot prints it, or nothing, and goes on."""

    class Checked(policy_class):  # type: ignore[misc]
        config_class, name = policy_class.config_class, policy_class.name
        problem = "expected the weights of the policy, got no such file"

        def load_state_dict(self, state_dict: Any, strict: bool = True, **options: Any) -> Any:
            del strict
            self.problem = "expected the weights of the policy, got those of another"
            found = super().load_state_dict(state_dict, strict=False, **options)
            own = self.state_dict()
            filled = {own[name].data_ptr() for name in own if name not in found.missing_keys}
            missing = [name for name in found.missing_keys if own[name].data_ptr() not in filled]  # not tied to others
            self.problem = f"expected all weights of the policy, got no {missing[0]!r}" if missing else ""
            return found

    Checked.__name__ = policy_class.__name__
    return Checked


def load_processors(path: str, config: Any, tokenizer: str | None, device: str) -> tuple[Any, Any]:
    """What lerobot does before the policy (names, statistics, tokens) and after it, from the same directory."""
    from lerobot.policies.factory import make_pre_post_processors

    before: dict[str, Any] = {"device_processor": {"device": device}}
    if tokenizer is not None:
        before["tokenizer_processor"] = {"tokenizer_name": tokenizer}
    try:
        found: tuple[Any, Any] = make_pre_post_processors(config, path, preprocessor_overrides=before)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: its processors cannot be loaded: {error}; {ADVICE}, or give --lerobot.tokenizer"
        ) from error
    return found
