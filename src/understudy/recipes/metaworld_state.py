"""RLPD on a Metaworld task from 39 numbers of state: three demonstrations, then practice alone.

understudy env setup metaworld
WORLD='metaworld:button-press-topdown-v3?cameras=[]&action_repeat=2&max_steps=50'
understudy record runs/press/store --env "$WORLD" --successes 3
understudy init metaworld-state runs/press
understudy resume runs/press
"""

from understudy.training.offpolicy.rlpd import RLPDConfig

KIND = "rlpd"
CONFIG = RLPDConfig(
    env="metaworld:button-press-topdown-v3?cameras=[]&action_repeat=2&max_steps=50",
    steps=16_000,
    updates_per_step=4,
    checkpoint_every=2_000,
)
