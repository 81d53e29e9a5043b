"""Registry: the kinds of policies that decide on blocks, by the name that a policy file has of its kind.

A policy of lerobot is a directory that lerobot wrote, and is known by its config.json.

Other packages add theirs by an entry point, whose name is the kind and whose value is the class:

    [project.entry-points."understudy.policies"]
    my_kind = "my_package.policy:MyPolicy"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from understudy.core import StepSpec
from understudy.core.suggestion import did_you_mean
from understudy.policies.protocol import LoadedPolicy, PolicyError

if TYPE_CHECKING:
    import torch

GROUP = "understudy.policies"
BUILT_IN = {
    "vla": "understudy.policies.vla:VLAPolicy",
    "flow": "understudy.policies.flow:FlowPolicy",
    "lerobot": "understudy.policies.lerobot.policy:LeRobotPolicy",
}


class PolicyClass(Protocol):
    """The class of a kind of policies."""

    def load(self, path: Path, spec: StepSpec | None = None, *, device: str | torch.device = "cpu") -> LoadedPolicy:
        """The policy of a file. Given the Spec of a world, refuse a policy that was trained for another."""
        ...


def kinds() -> tuple[str, ...]:
    """The names of all kinds, those of this package first."""
    return (*BUILT_IN, *sorted(_registered()))


def policy_class(kind: str) -> PolicyClass:
    """The class of a kind."""
    if kind in BUILT_IN:
        module, _, name = BUILT_IN[kind].partition(":")
        built_in: PolicyClass = getattr(import_module(module), name)
        return built_in
    registered = _registered()
    if kind not in registered:
        advice = did_you_mean(kind, kinds(), f"install the package that made it (entry points {GROUP!r})")
        raise PolicyError(f"kind: expected a policy of kind {', '.join(kinds())}, got {kind!r}; {advice}")
    point = registered[kind]
    try:
        found: PolicyClass = point.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"kind: {kind!r} is registered as {point.value}, which cannot be imported ({error}); install it again"
        ) from error
    if not callable(getattr(found, "load", None)):
        raise PolicyError(
            f"kind: {kind!r} is registered as {point.value}, which has no `load(path, spec, *, device)`; give it one"
        )
    return found


def _registered() -> dict[str, EntryPoint]:
    """The entry points of other packages by name; a name that two have is refused."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.get(point.name)
        taken = BUILT_IN.get(point.name) or (other.value if other is not None and other != point else None)
        if taken is not None:
            raise PolicyError(
                f"kind: {point.name!r} is registered as {taken} and as {point.value}; remove one of the packages"
            )
        found[point.name] = point
    return found
