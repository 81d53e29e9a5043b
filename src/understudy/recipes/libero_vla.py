"""Supervised fine-tuning of a small VLA on demonstrations of LIBERO tasks; GRPO can go on from it.

understudy env setup libero
understudy import robomimic:libero_spatial demos --as demonstration   # your copy of LIBERO's files
understudy init libero-vla runs/sft --demos demos
understudy resume runs/sft
understudy train grpo runs/grpo --policy runs/sft --env 'libero:libero_spatial?size=64'
"""

from understudy.policies.vla import VLAConfig
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.onpolicy.sft import SFTConfig

KIND = "sft"
CONFIG = SFTConfig(
    env="libero:libero_spatial?size=64",
    updates=3_000,
    batch_size=32,
    vla=VLAConfig(max_words=20, block_steps=8, use_proprio=("state",)),
    evaluation=TaskEvaluationConfig(episodes=50, sampling="sampled"),
)
