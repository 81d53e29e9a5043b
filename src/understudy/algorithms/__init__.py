"""Algorithms: update rules. They know no store, no world and no file. Needs torch."""

from understudy.algorithms.algorithm import Algorithm, AlgorithmError, State
from understudy.algorithms.classifier import ClassifierTraining, ClassifierTrainingConfig, Frames
from understudy.algorithms.cloning import Cloning, CloningConfig
from understudy.algorithms.sac import SAC, SACConfig

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
