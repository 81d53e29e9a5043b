"""RLPD on your own arm: it begins from a clone of your demonstrations, and you take over when it stalls.

    understudy record runs/arm/store --env 'robot:http://127.0.0.1:5000?task=reach' --human browser --successes 20
    understudy init your-robot runs/arm
    understudy serve runs/arm/store                        # then each in a terminal of its own
    understudy learner runs/arm 127.0.0.1:7447
    understudy actor runs/arm 127.0.0.1:7447 --spool spool/arm --human browser

`understudy robot simulate` serves a simulated arm at the same address.
"""

from dataclasses import replace

from understudy.training.offpolicy.rlpd import RLPDConfig, small_sac
from understudy.training.runs.evaluate import EvaluationConfig

KIND = "rlpd"
CONFIG = RLPDConfig(
    env="robot:http://127.0.0.1:5000?task=reach",
    steps=5_000,
    cloning_updates=1_000,  # nothing random is sent to a robot
    max_pending_updates=500,  # the arm waits when the learner is this far behind
    eval_every=5_000,  # an evaluation moves the arm too
    evaluation=EvaluationConfig(episodes=10),
    sac=replace(small_sac(), bc_weight=0.5),  # your steps stay in the actor's loss
)
