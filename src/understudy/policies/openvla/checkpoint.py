"""Checkpoint: a directory as OpenVLA's are on the Hub: JSON, a tokenizer, weights in safetensors. None of it is run.

| file | |
|---|---|
| config.json | the shape of the network; the statistics of the actions it was trained on (`norm_stats`) |
| dataset_statistics.json | those of fine-tuning, which come first |
| preprocessor_config.json | how images are prepared |
| tokenizer.json | how text becomes tokens |
| model.safetensors, or shards and model.safetensors.index.json | weights |
| proprio_projector--*.pt, action_head--*.pt, vision_backbone--*.pt | OpenVLA-OFT's, read as tensors and nothing else |
| noisy_action_projector--*.pt | the same, beside an action head that denoises |
| value_head.safetensors, scale_head.safetensors | ours, where there are any |
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from understudy.policies.protocol import PolicyError

VALUE_HEAD, SCALE_HEAD = "value_head", "scale_head"  # files in safetensors
# Parts that are files NAME--*.pt, or weights NAME.*
PROPRIO, ACTION_HEAD, NOISY_ACTION = "proprio_projector", "action_head", "noisy_action_projector"
FILM = "vision_backbone"  # files NAME--*.pt
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The contents of the JSON files, and the file of each weight."""

    directory: Path
    config: Mapping[str, Any]
    statistics: Mapping[str, Any]  # by unnorm_key
    preprocessor: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]  # by the name of the weight

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        directory = Path(path)
        if not directory.is_dir():
            raise PolicyError(
                f"{path}: expected the directory of a checkpoint, got none; fetch it first, such as with "
                f"`hf download openvla/openvla-7b --local-dir openvla-7b`"
            )
        config = read_json(directory / "config.json")
        if config.get("model_type") != "openvla":
            raise PolicyError(
                f"{directory / 'config.json'}: model_type: expected 'openvla', got {config.get('model_type')!r}; "
                f"it is another kind of model"
            )
        statistics = dict(config.get("norm_stats") or {})
        if (directory / "dataset_statistics.json").exists():
            statistics |= read_json(directory / "dataset_statistics.json")
        shapes: dict[str, tuple[int, ...]] = {}
        files: dict[str, Path] = {}
        for file in _weight_files(directory):
            with _opened(file) as weights:
                for name in weights.keys():  # noqa: SIM118
                    shapes[name], files[name] = tuple(weights.get_slice(name).get_shape()), file
        return Checkpoint(
            directory=directory,
            config=config,
            statistics=statistics,
            preprocessor=read_json(directory / "preprocessor_config.json"),
            shapes=shapes,
            files=files,
        )

    def weights(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Those of these names, file by file, so that no more than one file is in memory at a time."""
        for file in sorted(set(self.files.values())):
            with _opened(file) as weights:
                for name in weights.keys():  # noqa: SIM118
                    if name in names:
                        yield name, weights.get_tensor(name)

    @property
    def has_action_head(self) -> bool:
        """Whether it predicts numbers with an L1 or a diffusion head instead of tokens."""
        return self._has(ACTION_HEAD)

    @property
    def has_diffusion(self) -> bool:
        """Whether its action head denoises the numbers."""
        return self._has(NOISY_ACTION)

    def _has(self, part: str) -> bool:
        inside = any(name.startswith(f"{part}.") for name in self.shapes)
        return inside or bool(self.part_files(part))

    @property
    def has_film(self) -> bool:
        """Whether language is mixed into its vision."""
        return bool(self.part_files(FILM))

    def part(self, name: str, needed_for: str) -> dict[str, Tensor]:
        """The weights of a part, from the checkpoint's own or from the file that OpenVLA-OFT writes."""
        prefix = f"{name}."
        inside = dict(self.weights({one for one in self.shapes if one.startswith(prefix)}))
        if inside:
            return {one.removeprefix(prefix): weight for one, weight in inside.items()}
        return self.read_part(name, needed_for)

    def read_part(self, name: str, needed_for: str) -> dict[str, Tensor]:
        """The tensors of the one file that OpenVLA-OFT writes of a part."""
        found = self.part_files(name)
        if len(found) != 1:
            raise PolicyError(
                f"{self.directory}: {needed_for}: expected one file {name}--*.pt, got "
                f"{', '.join(file.name for file in found) or 'none'}; keep the one to use, or leave {needed_for} out"
            )
        try:
            loaded = torch.load(found[0], map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise PolicyError(f"{found[0]}: expected a dict of tensors, got {type(error).__name__}: {error}") from error
        return {one.removeprefix("module."): weight for one, weight in loaded.items()}  # as DDP names them

    def part_files(self, name: str) -> list[Path]:
        """OpenVLA-OFT's files of a part."""
        return sorted(self.directory.glob(f"{name}--*.pt"))

    def head(self, name: str) -> dict[str, Tensor] | None:
        """The weights of VALUE_HEAD or SCALE_HEAD, if there are any."""
        file = self.directory / f"{name}.safetensors"
        if not file.exists():
            return None
        with _opened(file) as weights:
            return {one: weights.get_tensor(one) for one in weights.keys()}  # noqa: SIM118


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; raises PolicyError if the file holds anything else."""
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise PolicyError(f"{file}: expected a file of a checkpoint, got nothing; fetch the whole directory") from None
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file}: expected JSON, got {error}; copy the file again") from error
    if not isinstance(value, dict):
        raise PolicyError(f"{file}: expected a JSON object, got {type(value).__name__}; copy the file again")
    return value


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.exists():
        if not (directory / "model.safetensors").exists():
            raise PolicyError(
                f"{directory}: expected model.safetensors or {INDEX_FILE}, got neither; fetch the weights"
            )
        return [directory / "model.safetensors"]
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise PolicyError(f"{index}: weight_map: expected weights and their files, got {named!r}; copy the file again")
    files = sorted({directory / str(name) for name in named.values()})
    for file in files:
        if file.parent != directory or not file.exists():
            raise PolicyError(f"{file}: {INDEX_FILE} names it and it is not there; fetch the missing file")
    return files


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise PolicyError(f"{file}: expected weights in safetensors, got {error}; copy the file again") from error
