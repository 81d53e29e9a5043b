"""Advice about a world that is a Gymnasium environment, in the words of its author: reset and step, not begin."""

from __future__ import annotations

from understudy.envs.simulators.gym import GymWorld
from understudy.envs.world import World
from understudy.envs.wrapper import WorldWrapper


def is_gymnasium(world: World) -> bool:
    """Whether a world is a Gymnasium environment, perhaps in wrappers."""
    while isinstance(world, WorldWrapper):
        world = world.wrapped
    return isinstance(world, GymWorld)


def how_to_mark_simulated(world: World) -> str:
    """What to write for a world in which nothing real moves."""
    if is_gymnasium(world):
        return "make it with GymWorld(..., simulated=True), or as gym:ID?simulated=true"
    return "set simulated = True in its class"
