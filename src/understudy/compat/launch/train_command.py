"""TrainCommand: the `understudy` command that does what a script of another project asks for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """A new on-policy run, or one score of a policy."""

    kind: str  # "grpo", "rloo", "reinforce" or "ppo"; "evaluate" only evaluates the policy
    run: Path
    options: Mapping[str, Any]  # by their paths in the config
    ranks: int = 1
    notes: tuple[str, ...] = ()  # one sentence for each given option that changes nothing here

    def words(self, defaults: Mapping[str, Any]) -> list[str]:
        """The words behind `understudy`. Options that are as in `defaults` are left out."""
        options = {name: value for name, value in self.options.items() if _plain(value) != defaults.get(name, _UNKNOWN)}
        if self.kind == "evaluate":
            return ["evaluate", str(options.pop("policy")), *_options(options)]
        return ["train", self.kind, str(self.run), *_options(options), *self._ranks()]

    def resume_words(self) -> list[str]:
        """The words that continue the run, where the script has begun it before."""
        return ["resume", str(self.run), *self._ranks()]

    def _ranks(self) -> list[str]:
        return ["--ranks", str(self.ranks)] if self.ranks > 1 else []


def is_openvla(policy: Any) -> bool:
    """Whether a policy is the directory of an OpenVLA checkpoint, and no policy file or run of Understudy."""
    path = Path(str(policy))
    return path.is_dir() and not (path / "policy.safetensors").exists()


def evaluation(options: Mapping[str, Any], notes: tuple[str, ...]) -> TrainCommand:
    """The command that only evaluates the policy of a training, on all starts."""
    kept = {name: value for name, value in options.items() if name == "policy" or name.startswith("openvla.")}
    kept |= {"env": options["env"], "split": "all"}
    return TrainCommand(kind="evaluate", run=Path(), options=kept, notes=notes)


def to_shell(words: list[str]) -> str:
    """A command that can be pasted into a terminal, one option in each line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append("")
        lines[-1] = f"{lines[-1]} {shlex.quote(word)}".strip()
    return " \\\n    ".join(lines)


def _plain(value: Any) -> Any:
    """The value as it stands in JSON."""
    return list(value) if isinstance(value, tuple) else value


def _options(options: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for path, value in options.items():
        *parents, name = path.replace("_", "-").split(".")
        if isinstance(value, bool):
            words.append("--" + ".".join([*parents, name if value else f"no-{name}"]))
        elif isinstance(value, list | tuple):
            words += ["--" + ".".join([*parents, name]), *map(str, value)]
        else:
            words += ["--" + ".".join([*parents, name]), str(value)]
    return words
