"""`understudy record`, in the toy world with its scripted expert."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cli import main
from understudy.replay import Reader, Store, verify
from understudy.service import Server, ServerConfig


def test_it_records_until_enough_have_succeeded_and_goes_on_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "demos")
    assert main(["record", store, "--successes", "2", "--operator", "ada"]) == 0
    assert "2 successes in 2 episodes of pick_red" in capsys.readouterr().out
    assert main(["record", store, "--successes", "3", "--noise", "0"]) == 0
    assert "3 successes in 3 episodes of pick_red" in capsys.readouterr().out
    assert verify(store).problems == []
    with Reader(store) as reader:
        records = list(reader.episodes())
        assert [r.info.operator for r in records] == ["ada", "ada", None]
        assert len({r.info.init_state for r in records}) > 1
        assert reader.read(1).observation["front"].std() > 10  # a picture


def test_noise_and_seed_change_what_is_recorded(tmp_path: Path) -> None:
    actions = []
    for number, options in enumerate((["--noise", "0"], ["--noise", "0.2"], ["--noise", "0.2", "--seed", "5"])):
        store = str(tmp_path / str(number))
        assert main(["record", store, "--successes", "1", *options]) == 0
        with Reader(store) as reader:
            actions.append(reader.read(1).action.tobytes())
    assert len(set(actions)) == 3


def test_by_default_only_a_simulated_world_gets_noise(tmp_path: Path) -> None:
    actions = {}
    for env in ("toy:pick_red", "tests.worlds:RealTable?task=pick_red"):
        for options in ([], ["--noise", "0"]):
            store = str(tmp_path / f"{len(actions)}")
            assert main(["record", store, "--env", env, "--successes", "1", *options]) == 0
            with Reader(store) as reader:
                actions[env.partition(":")[0], bool(options)] = reader.read(1).action.tobytes()
    assert actions["toy", False] != actions["toy", True]
    assert actions["tests.worlds", False] == actions["tests.worlds", True] == actions["toy", True]


def test_it_records_to_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    config = ServerConfig(port=0, token=token.read_text())
    with Store.open(tmp_path / "store") as store, Server(store, config) as server:
        options = ["--token-file", str(token), "--spool", str(tmp_path / "spool")]
        assert main(["record", server.address, "--env", "toy:red_on_plate", "--successes", "1", *options]) == 0
        assert main(["record", server.address, "--successes", "1"]) == 1
        assert "token is missing or wrong" in capsys.readouterr().err
    with Reader(tmp_path / "store") as reader:
        assert [r.info.task for r in reader.episodes()] == ["red_on_plate"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--env", "toy:pik_red"], "did you mean 'pick_red'?"),
        (["--successes", "0"], "expected successes and max_episodes from 1"),
        (["--spool", "somewhere"], "spool: has no effect on a store on this machine"),
        (["--token-file", "somewhere"], "token_file: has no effect on a store on this machine"),
        (["--tls-cert", "somewhere"], "leave --tls-cert out"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(tmp_path / "store"), *options]) == 1
    assert text in capsys.readouterr().err


def test_max_episodes_ends_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--successes", "5", "--max-episodes", "2", "--noise", "0"]
    assert main(["record", str(tmp_path / "store"), *options]) == 1
    assert "2 successes in 2 episodes" in capsys.readouterr().out


def test_it_records_to_a_server_with_a_certificate(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    config = ServerConfig(port=0, tls_cert=cert, tls_key=key)
    with Store.open(tmp_path / "store") as store, Server(store, config) as server:
        assert main(["record", server.address, "--successes", "1", "--tls-cert", str(cert)]) == 0
    with Reader(tmp_path / "store") as reader:
        assert len(list(reader.episodes())) == 1
