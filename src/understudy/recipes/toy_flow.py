"""A small flow policy learns to pick up a block from five noisy demonstrations, in about a minute of one core.

understudy record runs/flow/store --env 'toy:pick_red?cameras=false&state=task' --successes 5 --noise 0.3
understudy init toy-flow runs/flow
understudy resume runs/flow
"""

from understudy.policies.flow import FlowConfig
from understudy.training.onpolicy.sft import SFTConfig

KIND = "sft"
CONFIG = SFTConfig(
    env="toy:pick_red?cameras=false&state=task",
    updates=1500,
    batch_size=256,  # each block of a batch has noise and a time of its own
    report_every=250,
    checkpoint_every=500,
    network="flow",
    flow=FlowConfig(block_steps=4),
)
