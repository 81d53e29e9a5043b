"""Supervised fine-tuning of a very small VLA on a toy task with a camera: under a minute on two cores; then GRPO.

understudy record runs/sft/store --env 'toy:press_button?size=32&state=task' --successes 50
understudy init toy-vla runs/sft
understudy resume runs/sft
understudy init toy-vla-grpo runs/grpo --policy runs/sft
understudy resume runs/grpo
"""

from understudy.algorithms.sft import SFTUpdateConfig
from understudy.policies.vla import VLAConfig
from understudy.training.onpolicy.sft import SFTConfig

KIND = "sft"
CONFIG = SFTConfig(
    env="toy:press_button?size=32&state=task",
    updates=200,
    evaluate=False,  # GRPO evaluates the policy that it starts from
    sft=SFTUpdateConfig(learning_rate=2e-3, sigma=1.0),
    vla=VLAConfig(
        cameras=("front",),
        use_proprio=("state",),
        block_steps=4,
        num_bins=21,  # a choice among few values is learned from fewer episodes
        patch=16,
        shuffle=1,
        vision_hidden=48,
        hidden=64,
        max_words=8,
    ),
)
