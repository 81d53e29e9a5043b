"""Modules of other projects by their own names, so that a script of theirs runs unedited over a store.

    with original_modules("hil-serl"):
        runpy.run_path("train_rlpd.py", run_name="__main__")

Within the block, an import of a module in PROJECTS gets the names of `understudy.compat` instead. All other modules of
the project (its agents, environments and utilities) come from the installed project. If it is not installed, there are
only the modules in PROJECTS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from understudy.core import UnderstudyError


class NotReplacedError(UnderstudyError, ImportError):
    """A script imports a name of a replaced module that has no counterpart here."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """What stands in for one module."""

    names: tuple[str, ...]
    source: str = "understudy.compat"
    overlay: bool = False  # the other names come from the installed module, if there is one


_BUFFERS = ("MemoryEfficientReplayBuffer", "ReplayBuffer")
_DATA_STORES = ("MemoryEfficientReplayBufferDataStore", "ReplayBufferDataStore", "populate_data_store")
_RLINF = "understudy.compat.rlinf"
_TRAJECTORIES = Replacement(
    source=_RLINF, names=("Trajectory", "ChunkStepResult", "EmbodiedRolloutResult"), overlay=True
)
_DATASETS = Replacement(
    source=_RLINF,
    names=("PreloadReplayBufferDataset", "ReplayBufferDataset", "replay_buffer_collate_fn"),
    overlay=True,
)
_TRAJECTORY_BUFFER = Replacement(source=_RLINF, names=("TrajectoryReplayBuffer",))

PROJECTS: Mapping[str, Mapping[str, Replacement]] = {
    "hil-serl": {
        "agentlace.trainer": Replacement(names=("TrainerServer", "TrainerClient", "TrainerConfig")),
        "agentlace.data.data_store": Replacement(names=("QueuedDataStore",)),
        "serl_launcher.data.data_store": Replacement(names=(*_DATA_STORES, *_BUFFERS)),
        "serl_launcher.data.replay_buffer": Replacement(names=("ReplayBuffer",)),
        "serl_launcher.data.memory_efficient_replay_buffer": Replacement(names=("MemoryEfficientReplayBuffer",)),
        "serl_launcher.utils.train_utils": Replacement(names=("concat_batches",), overlay=True),
        "serl_launcher.utils.launcher": Replacement(names=("make_trainer_config",), overlay=True),
    },
    "rlinf": {
        "rlinf.data.replay_buffer": _TRAJECTORY_BUFFER,
        "rlinf.data.storage.replay": _TRAJECTORY_BUFFER,  # its name since RLinf has the package `storage`
        "rlinf.data.storage.replay.buffer": _TRAJECTORY_BUFFER,
        "rlinf.data.embodied_io_struct": _TRAJECTORIES,
        "rlinf.data.embodied_buffer_dataset": _DATASETS,
    },
    "tf-agents": {
        "tf_agents.replay_buffers.rlds_to_reverb": Replacement(
            names=("create_trajectory_data_spec", "convert_rlds_to_trajectories", "push_rlds_to_reverb")
        ),
    },
}


@contextmanager
def original_modules(project: str) -> Iterator[None]:
    """Replace the modules of a project; when the block ends, everything is as before."""
    finder = _Finder(PROJECTS[project])
    before = {name: sys.modules.pop(name) for name in finder.names if name in sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of one project, and packages that hold them where the project is not installed."""

    def __init__(self, replacements: Mapping[str, Replacement]):
        self._replacements = replacements
        self._parents = {name.rpartition(".")[0] for name in replacements}
        for parent in [*self._parents]:
            while parent := parent.rpartition(".")[0]:
                self._parents.add(parent)
        self.names = sorted(self._parents | set(replacements))
        self.made: set[str] = set()  # those that were imported from here

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        replaced = fullname in self._replacements
        if replaced or (fullname in self._parents and self._installed(fullname, path) is None):
            return ModuleSpec(fullname, self, is_package=fullname in self._parents)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        self.made.add(name)
        replacement = self._replacements.get(name)
        if replacement is None:
            return
        parent = sys.modules.get(name.rpartition(".")[0])
        installed = self._installed(name, getattr(parent, "__path__", None)) if replacement.overlay else None
        if installed is not None and installed.loader is not None:
            installed.loader.exec_module(module)
        else:
            module.__getattr__ = lambda wanted: _refuse(name, wanted, replacement)  # type: ignore[method-assign]
        source = importlib.import_module(replacement.source)
        for own in replacement.names:
            setattr(module, own, getattr(source, own))

    def _installed(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The module of the project itself, if it is installed."""
        for finder in sys.meta_path:
            if finder is not self and (found := finder.find_spec(name, path)) is not None:
                return found
        return None


def _refuse(module: str, name: str, replacement: Replacement) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotReplacedError(
        f"{module}: {name!r} is not there over Understudy; it has {', '.join(replacement.names)}. Import {name!r} from "
        "a module of your own, or see docs/moving.md for what replaces it"
    )
