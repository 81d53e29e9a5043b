"""LeRobotCheckpoint: what the files of a policy of lerobot say, and which fields of a world are its inputs.

Reads config.json, which lerobot writes beside the weights; lerobot itself is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec
from understudy.policies.inputs import is_camera
from understudy.policies.lerobot.config import LeRobotConfig
from understudy.policies.protocol import PolicyError

KINDS = ("act", "diffusion", "smolvla", "pi0", "pi05")
LANGUAGE = ("smolvla", "pi0", "pi05")  # take an instruction, and images of any size
CONFIG, WEIGHTS, ADAPTER = "config.json", "model.safetensors", "adapter_model.safetensors"
PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
STATE, ACTION, PREFIX, IMAGES = "observation.state", "action", "observation.", "observation.images."
EMPTY = f"{IMAGES}empty_camera_"  # images that such a policy makes up itself
VISUAL = "VISUAL"


@dataclass(frozen=True, kw_only=True)
class LeRobotCheckpoint:
    """A directory `pretrained_model` of lerobot."""

    path: Path
    kind: str
    images: Mapping[str, tuple[int, ...]]  # shapes [3, H, W] by the names of lerobot, in the order of the policy
    numbers: Mapping[str, int]  # sizes of the other inputs
    action_size: int
    block_steps: int  # that the policy was made to execute
    chunk_size: int  # that it decides on

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a directory has a policy of lerobot, of any kind."""
        try:
            content = json.loads((path / CONFIG).read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and {"type", "input_features", "output_features"} <= set(content)

    @staticmethod
    def read(path: Path) -> LeRobotCheckpoint:
        """Read config.json; refuse a kind that is not known here, and a directory without the other files."""
        file = path / CONFIG
        try:
            content = json.loads(file.read_bytes())
            kind = str(content["type"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PolicyError(
                f"{file}: expected the config of a policy of lerobot, got {type(error).__name__}: {error}; give the "
                f"directory pretrained_model of a checkpoint"
            ) from error
        if kind not in KINDS:
            raise PolicyError(f"{file}: type: expected {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {kind!r}")
        weights = ADAPTER if (path / ADAPTER).is_file() else WEIGHTS
        for name in (weights, *PROCESSORS):
            if not (path / name).is_file():
                raise PolicyError(
                    f"{path}: expected {name}, got no such file; copy the whole directory, and bring a policy from "
                    f"before lerobot 0.4 up to date with lerobot's migrate_policy_normalization"
                )
        if content.get("temporal_ensemble_coeff") is not None:
            raise PolicyError(
                f"{file}: temporal_ensemble_coeff: expected null, got {content['temporal_ensemble_coeff']}, which "
                f"decides anew at each step; set it to null and n_action_steps to the length of a block"
            )
        try:
            inputs = content["input_features"]
            images = {
                name: tuple(map(int, feature["shape"]))
                for name, feature in inputs.items()
                if feature["type"] == VISUAL and not name.startswith(EMPTY)
            }
            numbers = {name: int(np.prod(f["shape"])) for name, f in inputs.items() if f["type"] != VISUAL}
            steps = int(content["n_action_steps"])
            return LeRobotCheckpoint(
                path=path,
                kind=kind,
                images=images,
                numbers=numbers,
                action_size=int(content["output_features"][ACTION]["shape"][0]),
                block_steps=steps,
                chunk_size=steps if kind == "diffusion" else int(content["chunk_size"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise PolicyError(
                f"{file}: expected the config of a {kind} policy, got {type(error).__name__}: {error}; write it with "
                f"save_pretrained of lerobot"
            ) from error

    def inputs(self, observation: Spec, config: LeRobotConfig) -> dict[str, list[str]]:
        """The paths of the fields of an observation that each input is made of."""
        if config.tokenizer is not None and self.kind not in LANGUAGE:
            raise PolicyError(f"tokenizer: a policy of type {self.kind} takes no instruction; leave the option out")
        fields = observation.flat
        found = {name: [path] for name, path in self._cameras(fields, config.cameras).items()}
        for name, size in self.numbers.items():
            found[name] = self._numbers(name, size, fields, config.state if name == STATE else None)
        if config.state is not None and STATE not in self.numbers:
            raise PolicyError(f"state: this policy has no {STATE}; leave the option out")
        return found

    def check_action(self, action: Spec) -> None:
        """Refuse a world that takes another number of numbers."""
        size = sum(int(np.prod(leaf.fixed_shape)) for leaf in action.flat.values() if not leaf.ragged)
        if size != self.action_size or any(leaf.ragged for leaf in action.flat.values()):
            raise PolicyError(
                f"action: the policy gives {self.action_size} numbers, the world takes {size}; use the world it was "
                f"trained in"
            )

    def executed_steps(self, config: LeRobotConfig) -> int:
        """The number of actions of a block."""
        steps = config.block_steps or self.block_steps
        if steps > self.chunk_size:
            raise PolicyError(f"block_steps: expected up to {self.chunk_size}, which it decides on, got {steps}")
        return steps

    def _cameras(self, fields: Mapping[str, ArraySpec], given: Sequence[str] | None) -> dict[str, str]:
        cameras = [path for path, leaf in fields.items() if is_camera(leaf)]
        if given is None:
            chosen = [_name(image) for image in self.images]
            if len(chosen) == len(cameras) == 1:
                chosen = cameras
        else:
            chosen = list(given)
        images = ", ".join(self.images) or "no images"
        if len(chosen) != len(self.images):
            raise PolicyError(
                f"cameras: expected {len(self.images)}, since the policy sees {images}, got {len(chosen)}; name one "
                f"field for each, in this order"
            )
        for image, path in zip(self.images, chosen, strict=True):
            if path not in cameras:
                raise PolicyError(
                    f"cameras: the policy sees {images}, and the world has no camera {path!r} for {image} (it has "
                    f"{', '.join(cameras) or 'none'}); name one for each, in this order, with --lerobot.cameras"
                )
            self._check_size(image, path, fields[path])
        return dict(zip(self.images, chosen, strict=True))

    def _check_size(self, image: str, path: str, leaf: ArraySpec) -> None:
        channels, height, width = self.images[image]
        wanted = (height, width, channels)
        if leaf.shape != wanted and (self.kind not in LANGUAGE or leaf.shape[-1] != channels):
            raise PolicyError(
                f"observation/{path}: {image} was trained on uint8 {list(wanted)}, the world has {leaf}; render it at "
                f"that size"
            )

    def _numbers(self, name: str, size: int, fields: Mapping[str, ArraySpec], given: Sequence[str] | None) -> list[str]:
        known = [path for path, leaf in fields.items() if not (is_camera(leaf) or leaf.ragged)]
        own = name.removeprefix(PREFIX).replace(".", "/")
        only = list(self.numbers) == [name] and len(known) == 1
        paths = list(given) if given is not None else known if only else [own]
        advice = "name its fields, in order, with --lerobot.state" if name == STATE else "use a world that has it"
        missing = [path for path in paths if path not in known]
        if missing:
            raise PolicyError(
                f"{name}: the policy takes {size} numbers, and the world has no field {missing[0]!r} with numbers (it "
                f"has {', '.join(known) or 'none'}); {advice}"
            )
        found = sum(int(np.prod(fields[path].fixed_shape)) for path in paths)
        if found != size:
            raise PolicyError(f"{name}: the policy takes {size} numbers, {', '.join(paths)} has {found}; {advice}")
        return paths


def _name(image: str) -> str:
    """The path that an image of lerobot has here, as data sets of lerobot are read."""
    return image.removeprefix(IMAGES).removeprefix(PREFIX).replace(".", "/")


def action_fields(action: Spec) -> list[dict[str, Any]]:
    """The fields of an action one after the other, as plain JSON, for the other interpreter."""
    found = []
    for path, leaf in action.flat.items():
        low, high = (limit.tolist() for limit in leaf.limits)
        found.append({"path": path, "shape": list(leaf.fixed_shape), "dtype": leaf.dtype, "low": low, "high": high})
    return found
