"""Recipe: a kind of run and its config, from a file of this folder or of the user."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from understudy.core import UnderstudyError
from understudy.core.suggestion import did_you_mean

FOLDER = Path(__file__).parent
NAMES = (
    "toy",
    "toy-vla",
    "toy-vla-grpo",
    "toy-flow",
    "toy-flow-grpo",
    "metaworld-state",
    "metaworld-camera",
    "libero-vla",
    "libero-openvla-grpo",
    "your-robot",
)
CONFIGS = {  # the kinds of runs, as `understudy train` names them
    "rlpd": ("understudy.training.offpolicy.rlpd", "RLPDConfig"),
    "clone": ("understudy.training.offpolicy.cloning", "CloningRunConfig"),
    "sft": ("understudy.training.onpolicy.sft", "SFTConfig"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A kind of run and its config."""

    name: str
    kind: str  # as in a run's config.json
    config: Any
    about: str  # one sentence
    is_kind: bool = False  # a kind of run with its defaults


def source_of(name: str) -> Path:
    """The file of a recipe."""
    if name not in NAMES:
        advice = did_you_mean(name, NAMES, f"choose one of {', '.join(NAMES)}")
        raise UnderstudyError(f"recipe: there is no {name!r}; {advice}")
    return FOLDER / f"{name.replace('-', '_')}.py"


def load_recipe(name: str) -> Recipe:
    """The recipe of a name, or of a Python file (`./my_recipe.py`) with KIND and CONFIG."""
    path = Path(name) if name.endswith(".py") else source_of(name)
    module = _run(path)
    missing = [wanted for wanted in ("KIND", "CONFIG") if not hasattr(module, wanted)]
    if missing:
        raise UnderstudyError(
            f"{path}: expected KIND and CONFIG, has no {' and no '.join(missing)}; see `understudy recipes copy toy`"
        )
    about = (module.__doc__ or "a recipe.").strip().partition("\n")[0]
    return Recipe(name=name, kind=module.KIND, config=module.CONFIG, about=about)


def _run(path: Path) -> ModuleType:
    if not path.exists():
        raise UnderstudyError(f"{path}: there is no such file; `understudy recipes copy NAME` writes one")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def recipe_of_kind(name: str, *, policy: str) -> Recipe | None:
    """A kind of run with its defaults, as `understudy train` names it; None if there is no such kind.

    On-policy runs start from `policy`.
    """
    from understudy.training.onpolicy.config import ESTIMATORS, default_config

    about = f"the options of {name} with their defaults."
    if name in ESTIMATORS:
        config: Any = default_config(name, policy=policy)
        return Recipe(name=name, kind=name, config=config, about=about, is_kind=True)
    if name not in CONFIGS:
        return None
    module, wanted = CONFIGS[name]
    config = getattr(importlib.import_module(module), wanted)()
    return Recipe(name=name, kind="cloning" if name == "clone" else name, config=config, about=about, is_kind=True)
