"""`understudy actor` and `understudy learner` at a server with a token and a certificate: each option does its part."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.system.train_process import small_config

from understudy.replay import Reader, Store
from understudy.service import Server, ServerConfig
from understudy.training.runs.run import Run

HZ = 100.0
PATIENCE_S = 120.0  # of this test, on a busy machine


def start(role: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "understudy", role, *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_both_roles_with_all_their_options(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    run = Run.create(tmp_path / "run", "rlpd", small_config(None, steps=150, start_steps=20, cloning_updates=0))
    config = ServerConfig(port=0, token=token.read_text(), tls_cert=cert, tls_key=key)
    processes: list[subprocess.Popen[str]] = []
    try:
        with Store.open(run.store) as store, Server(store, config) as server:
            secrets = ["--token-file", token, "--tls-cert", cert]
            options = [
                "--name",
                "arm-7",
                "--human",
                "browser",
                "--operator",
                "ada",
                "--hz",
                HZ,
                "--page",
                "127.0.0.1:0",
                "--spool",
                tmp_path / "spool",
            ]
            began = time.monotonic()
            actor = start("actor", run.path, server.address, *secrets, *options)
            processes.append(actor)
            assert actor.stdout is not None
            page = re.search(r"http\S+", actor.stdout.readline())
            assert page is not None
            with urllib.request.urlopen(page[0], timeout=PATIENCE_S) as answer:
                assert b"<!doctype html>" in answer.read(100)
            learner = start("learner", run.path, server.address, *secrets)
            processes.append(learner)
            said, complaint = learner.communicate(timeout=PATIENCE_S)
            assert learner.returncode == 0, complaint
            assert said.startswith(f"learns from the steps that actors write to {server.address}, and publishes ")
            assert "of held-out episodes succeed" in said
            said, complaint = actor.communicate(timeout=PATIENCE_S)
            assert actor.returncode == 0, complaint
            took_s = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    with Reader(run.store) as reader:
        records = list(reader.episodes())
    assert {record.info.actor for record in records} == {"arm-7"}
    assert {record.info.operator for record in records} == {"ada"}
    assert sum(record.num_steps for record in records) / took_s < HZ  # it kept its rate
    assert any((tmp_path / "spool").iterdir())


@pytest.mark.parametrize("role", ["actor", "learner"])
def test_a_role_without_the_token_is_told_so(role: str, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    run = Run.create(tmp_path / "run", "rlpd", small_config(None))
    config = ServerConfig(port=0, token="0123456789abcdef", tls_cert=cert, tls_key=key)
    with Store.open(run.store) as store, Server(store, config) as server:
        process = start(role, run.path, server.address, "--tls-cert", cert)
        try:
            _, complaint = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 1
    assert "token" in complaint
