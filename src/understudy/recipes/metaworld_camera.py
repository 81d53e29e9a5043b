"""RLPD on a Metaworld task from one camera of 48 x 48 pixels: one demonstration, and a scripted human who takes over.

understudy env setup metaworld
WORLD='metaworld:button-press-topdown-v3?cameras=["corner4"]&size=48&action_repeat=2&max_steps=50'
understudy record runs/camera/store --env "$WORLD" --successes 1
understudy init metaworld-camera runs/camera
understudy resume runs/camera
"""

from dataclasses import replace

from understudy.policies import EncoderConfig
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig, small_sac

KIND = "rlpd"
SMALL = small_sac()
CONFIG = RLPDConfig(
    env='metaworld:button-press-topdown-v3?cameras=["corner4"]&size=48&action_repeat=2&max_steps=50',
    steps=6_000,
    updates_per_step=1,
    eval_every=1_000,
    cloning_updates=1_000,  # the first policy is a clone of the demonstration
    intervention=InterventionConfig(source="script", patience_steps=15),
    sac=replace(
        SMALL,
        actor=replace(SMALL.actor, encoder=EncoderConfig(inputs=("corner4",))),
        bc_weight=0.5,  # the human's steps stay in the actor's loss
        shift_pixels=2,
    ),
)
