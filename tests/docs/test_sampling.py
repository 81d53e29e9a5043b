"""The code of docs/sampling.md for torch's DataLoader is run as it stands."""

from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks
from tests.writing import write_episode

from understudy.core.examples import random_episode, small_spec
from understudy.replay import Store


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_dataloader_draws_from_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("my-store") as store:
        write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 9, 0), kind="demonstration")
    (block,) = [block for block in blocks((DOCS / "sampling.md").read_text()) if "DataLoader" in block]
    assert len(block.strip().splitlines()) <= 20
    names: dict[str, object] = {}
    exec(compile(block.replace("num_batches=100", "num_batches=6"), "sampling.md", "exec"), names)
    batch = names["batch"]
    assert isinstance(batch, dict)
    assert batch["action"].shape[0] == 256
    assert names["dataset"].next_start == 18  # type: ignore[attr-defined]
