"""OpenVLAInputs: an observation and an instruction as OpenVLA was trained to see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from understudy.core import Spec, SpecError, Tree
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.policies.inputs import is_camera
from understudy.policies.openvla.config import Resize
from understudy.policies.openvla.jpeg_lanczos import compress_and_resize
from understudy.policies.openvla.tokens import Range
from understudy.policies.protocol import Array, PolicyError
from understudy.policies.transfer import to_tensor

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
PREPARED = "prepared images"  # uint8 [B, n, S, S, 3], in place of the camera fields of an observation
_SPACE = "\u2581"  # the token that stood between the prompt and the numbers in training
_CROP_AREA = 0.9  # of the images that OpenVLA was fine-tuned on, cropped at random
_RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessor:
    """How an image is prepared for each vision transformer; all take the same size."""

    size: int
    resampling: str
    means: tuple[tuple[float, float, float], ...]
    stds: tuple[tuple[float, float, float], ...]
    center_crop: bool
    mirror: bool
    resize: Resize

    @staticmethod
    def of(
        preprocessor: Mapping[str, Any], *, num_towers: int, center_crop: bool, mirror: bool, resize: Resize
    ) -> ImagePreprocessor:
        """From preprocessor_config.json."""
        where = "preprocessor_config.json"
        try:
            strategy = preprocessor["image_resize_strategy"]
            sizes = {tuple(size[-2:]) for size in preprocessor["input_sizes"]}
            resampling = set(preprocessor["interpolations"])
            means = tuple((float(r), float(g), float(b)) for r, g, b in preprocessor["means"])
            stds = tuple((float(r), float(g), float(b)) for r, g, b in preprocessor["stds"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PolicyError(f"{where}: expected how images are prepared, got {error!r}; copy it again") from None
        if strategy != "resize-naive":
            raise PolicyError(f"{where}: image_resize_strategy: expected 'resize-naive', got {strategy!r}; unsupported")
        if len(sizes) != 1 or len(resampling) != 1 or not resampling <= _RESAMPLING.keys():
            raise PolicyError(
                f"{where}: expected one size and one of {', '.join(_RESAMPLING)} for all, got {sorted(sizes)} and "
                f"{sorted(resampling)}; unsupported"
            )
        ((height, width),) = sizes
        if height != width or not len(means) == len(stds) == num_towers:
            raise PolicyError(
                f"{where}: expected squares and {num_towers} means and stds, got {height} x {width}, {len(means)} and "
                f"{len(stds)}; copy it again"
            )
        (name,) = resampling
        return ImagePreprocessor(
            size=width,
            resampling=name,
            means=means,
            stds=stds,
            center_crop=center_crop,
            mirror=mirror,
            resize=resize,
        )

    def resized(self, image: Array) -> Array:
        """One image uint8 [H, W, 3] to uint8 [S, S, 3], as the network sees it; a frame costs some milliseconds."""
        if self.mirror:
            image = image[:, ::-1]
        if self.resize == "jpeg_lanczos":
            image = compress_and_resize(image, self.size)
        elif image.shape[:2] != (self.size, self.size):
            resized = Image.fromarray(np.ascontiguousarray(image)).resize(
                (self.size, self.size), _RESAMPLING[self.resampling]
            )
            image = np.asarray(resized)
        if self.center_crop:
            image = crop_center(image, _CROP_AREA)
        return image

    def scales(self, device: torch.device) -> Tensor:
        """float32 [1 + 2·towers, 3]: the largest value of a pixel, then the mean and std of each vision transformer."""
        pairs = [one for pair in zip(self.means, self.stds, strict=True) for one in pair]
        return to_tensor(np.array([(255.0, 255.0, 255.0), *pairs], np.float32), device)

    @staticmethod
    def normalized(images: Tensor, scales: Tensor) -> Tensor:
        """Resized images uint8 [B, n, S, S, 3], on any device, to float32 [B, n·towers·3, S, S]."""
        scaled = images.float() / scales[0]
        towers = [(scaled - scales[at]) / scales[at + 1] for at in range(1, len(scales), 2)]
        return torch.cat(towers, dim=-1).permute(0, 1, 4, 2, 3).flatten(1, 2).contiguous()


def crop_center(image: Array, area: float) -> Array:
    """That share of a square's area, from its middle, stretched to its size: bilinear, from corner to corner."""
    size = len(image)
    side = math.sqrt(area)
    position = (size - 1) * ((1 - side) / 2 + side * np.linspace(0.0, 1.0, size))
    below = np.minimum(position.astype(np.int64), size - 2)
    share = (position - below).astype(np.float32)[:, None]
    rows = image[below].astype(np.float32)
    rows += share[..., None] * (image[below + 1] - rows)
    columns = rows[:, below]
    columns += share * (rows[:, below + 1] - columns)
    rounded: Array = np.clip(np.floor(columns * (255.5 / 255)), 0, 255)  # as TensorFlow does
    return rounded.astype(np.uint8)


class Prompts:
    """Instructions as token ids, with BOS at the front and the empty token at the end, as in training."""

    def __init__(self, directory: Path, *, bos_id: int):
        file = directory / "tokenizer.json"
        if not file.exists():
            raise PolicyError(f"{file}: expected a tokenizer, got nothing; fetch the whole directory")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise PolicyError(f"{file}: expected a tokenizer, got {error}; copy the file again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        space_id = self._tokenizer.token_to_id(_SPACE)
        if space_id is None:
            raise PolicyError(f"{file}: expected a token {_SPACE!r}, got none; it is not the tokenizer of OpenVLA")
        self._bos_id, self._space_id = bos_id, int(space_id)
        self._known: dict[str, tuple[int, ...]] = {}

    def ids(self, instruction: str) -> tuple[int, ...]:
        if instruction not in self._known:
            if not instruction.strip():
                raise PolicyError(
                    f"instruction: expected what the robot shall do, got {instruction!r}; write it in words"
                )
            text = PROMPT.format(instruction=instruction.strip().lower())
            ids = tuple(self._tokenizer.encode(text).ids)
            if ids[0] != self._bos_id:
                ids = (self._bos_id, *ids)
            self._known[instruction] = ids if ids[-1] == self._space_id else (*ids, self._space_id)
        return self._known[instruction]


class OpenVLAInputs:
    """The network's inputs for a batch of observations, without the tokens."""

    def __init__(
        self,
        *,
        cameras: Sequence[str],
        images: ImagePreprocessor,
        proprio: Sequence[str],
        proprio_range: Range | None,
    ):
        self._cameras, self._images = tuple(cameras), images
        self._proprio, self._range = tuple(proprio), proprio_range
        self._scales: Tensor | None = None  # on the device of the last images

    def prepared(self, observation: Tree, num_rows: int) -> Tree:
        """The observation with resized images, and without what the network does not see. `tensors` takes it, too:
        who evaluates rows several times prepares them once."""
        flat = trees.flatten(observation)
        if PREPARED in flat:
            return observation
        found = [self._leaf(flat, path, num_rows) for path in self._cameras]
        for path, array in zip(self._cameras, found, strict=True):
            if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
                raise SpecError(
                    f"{trees.join('observation', path)}: expected uint8 [{num_rows}, H, W, 3], got {describe(array)}"
                )
        each = [array[row] for row in range(num_rows) for array in found]
        threads = min(torch.get_num_threads(), len(each))
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:  # the libraries that decode and resize release the GIL
                resized = list(pool.map(self._images.resized, each))
        else:
            resized = [self._images.resized(image) for image in each]
        images = np.stack(resized).reshape(num_rows, len(found), *resized[0].shape)
        state: dict[str, Any] = {path: self._leaf(flat, path, num_rows) for path in self._proprio}
        return trees.unflatten({PREPARED: images, **state})

    def tensors(self, observation: Tree, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """`images` [B, C, S, S] and perhaps `proprio` [B, P]; bytes go to the device, and become numbers there."""
        flat = trees.flatten(self.prepared(observation, num_rows))
        images = to_tensor(self._leaf(flat, PREPARED, num_rows), device)
        if self._scales is None or self._scales.device != images.device:
            self._scales = self._images.scales(device)
        tensors = {"images": self._images.normalized(images, self._scales)}
        if self._range is not None:
            parts = [self._leaf(flat, path, num_rows).reshape(num_rows, -1) for path in self._proprio]
            unit = self._range.to_unit(np.concatenate(parts, axis=1).astype(np.float64))
            tensors["proprio"] = to_tensor(unit.astype(np.float32), device)
        return tensors

    @staticmethod
    def _leaf(flat: Mapping[str, Any], path: str, num_rows: int) -> Array:
        name = trees.join("observation", path)
        if path not in flat:
            raise SpecError(f"{name}: expected this field, got {', '.join(sorted(flat)) or 'none'}; add it")
        array = np.asarray(flat[path])
        if array.ndim == 0 or len(array) != num_rows:
            raise SpecError(f"{name}: expected {num_rows} rows, one for each instruction, got {describe(array)}")
        return array


def cameras_of(cameras: tuple[str, ...] | None, observation: Spec) -> tuple[str, ...]:
    """The names of the cameras, refused if the world has no such; None: the only one."""
    found = [path for path, leaf in observation.flat.items() if is_camera(leaf)]
    listed = ", ".join(found) or "none"
    if cameras is None and len(found) != 1:
        raise PolicyError(f"cameras: expected names, since the world has {len(found)} ({listed}); name them in order")
    for camera in cameras or ():
        if camera not in found:
            raise PolicyError(f"cameras: the world has no camera {camera!r}; it has {listed}")
    return cameras or (found[0],)


def check_proprio(fields: Sequence[str], observation: Spec, wanted: int) -> None:
    """Refuse missing fields, and fields with another size than the checkpoint was trained on."""
    size = 0
    for path in fields:
        leaf = observation.flat.get(path)
        if leaf is None or leaf.ragged or is_camera(leaf):
            raise PolicyError(
                f"use_proprio: expected fields with numbers, got {path!r}; the world has {', '.join(observation.flat)}"
            )
        size += int(np.prod(leaf.fixed_shape))
    if size != wanted:
        raise PolicyError(
            f"use_proprio: the checkpoint was trained on {wanted} numbers, {', '.join(fields)} are {size}; name others"
        )
