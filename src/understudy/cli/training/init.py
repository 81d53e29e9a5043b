"""`understudy init`: a run with its config, from options, a config file or a recipe, without starting it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from understudy.cli.console import needs_extra
from understudy.cli.training.config_file import ConfigFile, StoredEnv, with_stored_env
from understudy.core import UnderstudyError

if TYPE_CHECKING:
    from understudy.recipes import Recipe

ARGS = """

    Args:
        run: Directory of the new run. Demonstrations are in its store (`understudy record RUN/store`), or in --demos.
        config: Options of the run.
        config_file: YAML file with options, or a run to take them from; options in the command line go first.
    """


def __getattr__(name: str) -> Callable[..., int]:
    """The command for a kind of run, a recipe, or a recipe's file."""
    with needs_extra("train"):
        from understudy.recipes import load_recipe, recipe_of_kind

    recipe = recipe_of_kind(name, policy=tyro.MISSING)
    return _command(load_recipe(name) if recipe is None else recipe)


def _command(recipe: Recipe) -> Callable[..., int]:
    default: Any = recipe.config
    if recipe.is_kind and hasattr(default, "demos"):
        default = replace(default, env=StoredEnv(default.env))

    def command(
        run: Annotated[Path, tyro.conf.Positional],
        config: Any = default,
        *,
        config_file: ConfigFile = None,
    ) -> int:
        return create(run, recipe.kind, config)

    command.__annotations__["config"] = Annotated[type(default), tyro.conf.arg(name="")]
    command.__doc__ = f"Make a run without starting it: {recipe.about}{ARGS}"
    return command


def create(path: Path, kind: str, config: Any) -> int:
    """Create the run and say how to start it."""
    from understudy.training.runs.run import Run, policy_path

    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    if hasattr(config, "demos"):
        config = with_stored_env(path, config, say)
    else:
        config = replace(config, policy=str(Path(config.policy).resolve()))  # ranks may have another working directory
        if not Path(config.policy).exists():
            say(f"policy: {config.policy} is not there yet; it must be when the run starts")
        else:
            try:
                policy_path(config.policy)
            except UnderstudyError as error:
                say(f"{error}; it must be there when this run starts")
    Run.create(path, kind, config)
    say(f"{path}: a run of {kind} in {config.env}; `understudy resume {path}` starts it")
    if kind == "rlpd":
        say(
            f"or, with an actor on the robot: `understudy serve {path}/store`, and with the address that it prints "
            f"`understudy learner {path} ADDRESS` and `understudy actor {path} ADDRESS`"
        )
    return 0
