"""The code and the commands of the README and the docs are run as they stand."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import DOCS, blocks

from understudy.cli import main
from understudy.replay import Store
from understudy.service import Server, ServerConfig

ROOT = DOCS.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("steps", ["200", pytest.param("3000", marks=pytest.mark.nightly)])
def test_the_quick_start_runs(
    steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block and every command; only the number of training steps is smaller in every run."""
    monkeypatch.chdir(tmp_path)
    first, write, train, deliver = blocks(README)
    assert len(run(first)["batch"]) == 256
    run(write)
    printed = capsys.readouterr().out.strip()
    assert f"# {printed}" in write  # what the README says is printed
    run(train)
    assert capsys.readouterr().out.startswith("(256, 128, 128, 3) ")
    with Store.open("served") as store, Server(store, ServerConfig(port=0)) as server:
        names = run(deliver.replace("127.0.0.1:7447", server.address))
    assert len(names["batch"]) == 256
    assert names["version"] == 1
    commands = [line.partition("#")[0] for block in blocks(README, "bash") for line in block.splitlines()]
    ours = [shlex.split(line)[1:] for line in commands if line.startswith("understudy ")]
    assert len(ours) >= 5
    assert sum("3000" in args for args in ours) == 1
    for args in ours:
        args = [steps if word == "3000" else word for word in args]
        if args == ["--help"]:
            with pytest.raises(SystemExit, match="0"):
                main(args)
        elif args[0] not in ("crash-test", "demo", "watch") and "browser" not in args:  # tests/system runs these
            assert main(args) == 0, args


def run(block: str) -> dict[str, Any]:
    """Run a block by itself: each stands alone, and can be copied into a file of its own."""
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


PAGES = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
