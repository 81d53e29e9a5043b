"""What lerobot itself does with one observation: python reference.py DIRECTORY GIVEN.npz FOUND.npz KIND...

Loads each policy as lerobot's evaluation does and calls `select_action` until a block is executed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from make_policies import small_pi


def actions(directory: Path, kind: str, given: dict[str, Any]) -> Any:
    config = PreTrainedConfig.from_pretrained(directory / kind)
    policy = get_policy_class(config.type).from_pretrained(directory / kind, config=config)
    tokenizer = {"tokenizer_processor": {"tokenizer_name": str(directory / "vlm")}} if kind.startswith("pi") else {}
    before, after = make_pre_post_processors(config, str(directory / kind), preprocessor_overrides=tokenizer)
    noise = torch.from_numpy(given[f"noise/{kind}"])[None] if f"noise/{kind}" in given else None
    options = {}
    if kind.startswith("pi"):  # takes no noise here
        policy.model.sample_noise = lambda shape, device: noise
    elif noise is not None:
        options["noise"] = noise
    policy.reset()
    torch.manual_seed(0)
    found = []
    for _ in range(config.n_action_steps):
        frame: dict[str, Any] = {
            "observation.state": torch.from_numpy(given["state"])[None],
            "task": [str(given["task"])],
        }
        for camera in ("front", "wrist"):
            image = torch.from_numpy(given[camera]).to(torch.float32) / 255
            frame[f"observation.images.{camera}"] = image.permute(2, 0, 1)[None]
        found.append(after(policy.select_action(before(frame), **options))[0].numpy())
    return np.stack(found)


if __name__ == "__main__":
    small_pi()
    with np.load(sys.argv[2]) as file:
        given = dict(file)
    np.savez(sys.argv[3], **{kind: actions(Path(sys.argv[1]), kind, given) for kind in sys.argv[4:]})
