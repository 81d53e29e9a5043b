"""Hypothesis profiles: `ci`, the default, with the same examples each time, and `long`, chosen with
HYPOTHESIS_PROFILE=long, with new ones; a certificate, a browser."""

import datetime as dt
import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.chromium import CHROMIUM, FLAGS, open_page
from tests.quarantine import skip_quarantined

import understudy.policies  # noqa: F401 (it chooses how MKL multiplies, before the first product of any test)

os.environ.setdefault("MUJOCO_GL", "egl")  # before anyone imports mujoco: pictures need no screen then

settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=2000, deadline=None, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# What a shell starts in the background has Ctrl-C switched off, and so have its children. Tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()  # until all tests are collected: nothing of what they import is garbage, and looking for it takes 9 s


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not looked through again
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Tests that share a module's fixture run in one worker, so that it is made once; quarantined tests are skipped."""
    skip_quarantined(items, dt.date.today())
    for item in items:
        shared = any(made[-1].scope == "module" for made in item._fixtureinfo.name2fixturedefs.values())
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    place = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            place / "key.pem",
            "-out",
            place / "cert.pem",
        ],
        check=True,
        capture_output=True,
    )
    return place / "cert.pem", place / "key.pem"


@pytest.fixture(scope="module")
def playwright() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on the PATH")
    with sync_api.sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Any) -> Iterator[Any]:
    started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    yield started
    started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with open_page(browser) as made:
        yield made
