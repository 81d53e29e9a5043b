"""Algorithms: update rules. They know no store, no world and no file. Needs torch."""

from understudy.algorithms.algorithm import Algorithm, AlgorithmError, State
from understudy.algorithms.offpolicy.classifier import ClassifierTraining, ClassifierTrainingConfig, Frames
from understudy.algorithms.offpolicy.cloning import Cloning, CloningConfig
from understudy.algorithms.offpolicy.sac import SAC, SACConfig

__all__ = [
    "SAC",
    "Algorithm",
    "AlgorithmError",
    "ClassifierTraining",
    "ClassifierTrainingConfig",
    "Cloning",
    "CloningConfig",
    "Frames",
    "SACConfig",
    "State",
]
