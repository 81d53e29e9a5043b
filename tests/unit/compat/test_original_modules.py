"""Modules of other projects: replaced within a block, beside what is installed, and as before afterwards."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from understudy import compat
from understudy.compat import rlinf
from understudy.compat.original_modules import PROJECTS, NotReplacedError, original_modules


@pytest.mark.parametrize("project", PROJECTS)
def test_every_replaced_module_has_its_names_and_goes_away(project: str) -> None:
    before = set(sys.modules)
    with original_modules(project):
        for name, replacement in PROJECTS[project].items():
            module = importlib.import_module(name)
            source = importlib.import_module(replacement.source)
            assert all(getattr(module, own) is getattr(source, own) for own in replacement.names)
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"agentlace", "rlinf", "tf_agents"}
    for name in PROJECTS[project]:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_both_places_of_rlinfs_buffer() -> None:
    with original_modules("rlinf"):
        from rlinf.data import replay_buffer
        from rlinf.data.storage import replay

        assert replay_buffer.TrajectoryReplayBuffer is replay.TrajectoryReplayBuffer is rlinf.TrajectoryReplayBuffer


def test_a_name_that_is_not_there_is_said_so() -> None:
    with (
        original_modules("hil-serl"),
        pytest.raises(
            NotReplacedError, match=r"agentlace.trainer: 'TrainerSMInterface' is not there over Understudy; "
        ),
    ):
        from agentlace.trainer import TrainerSMInterface  # noqa: F401


def test_what_is_installed_stays_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the project itself: a package with a utility that is not replaced, and an agent."""
    package = tmp_path / "serl_launcher"
    for folder in (package, package / "utils", package / "data", package / "agents"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (package / "utils" / "train_utils.py").write_text("concat_batches = None\ndef unpack(batch): return 'theirs'\n")
    (package / "agents" / "sac.py").write_text("NAME = 'SAC'\n")
    (package / "data" / "data_store.py").write_text("raise ImportError('never imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with original_modules("hil-serl"):
            from serl_launcher.agents.sac import NAME
            from serl_launcher.data.data_store import ReplayBuffer
            from serl_launcher.utils.train_utils import concat_batches, unpack

            assert (NAME, unpack(None)) == ("SAC", "theirs")
            assert concat_batches is compat.concat_batches
            assert ReplayBuffer is compat.ReplayBuffer
        assert importlib.import_module("serl_launcher.utils.train_utils").concat_batches is None
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "serl_launcher"]:
            del sys.modules[name]
