"""RLPD on a toy task from its state: five demonstrations, then practice with a scripted human; a minute on two cores.

understudy record runs/toy/store --env 'toy:press_button?cameras=false&state=task' --successes 5
understudy init toy runs/toy
understudy resume runs/toy
understudy evaluate runs/toy
"""

from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig

KIND = "rlpd"
CONFIG = RLPDConfig(
    env="toy:press_button?cameras=false&state=task",
    steps=3_000,
    intervention=InterventionConfig(source="script"),
)
