"""`understudy watch`: a live web page of runs and stores."""

from __future__ import annotations

import contextlib
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import print_page, with_extra
from understudy.processes.stop import stop_on_signals
from understudy.web.tokens import read_token

PORT = 7449


def command(
    target: Annotated[Path, tyro.conf.Positional],
    more: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token_file: Path | None = None,
    hosts: tuple[str, ...] = (),
    open_browser: bool = False,
) -> int:
    """Show runs and stores on a live web page: curves, episodes, interventions, replay, health.

    The page can label, delete and restore episodes: the process that writes the store applies the edit with its next
    commit, or this process does at once if no other writes. Stop with Ctrl-C.

    Args:
        target: Directory of a run or a store, which need not exist yet.
        more: Directories of further runs and stores to compare.
        host: Address to listen on; all but loopback addresses need --token-file.
        port: TCP port to listen on; 0 takes any free port. By default 7449, or any free port if that one is taken.
        token_file: File with the token that the page needs, of at least 16 letters and digits.
        hosts: Further host names under which browsers may open the page.
        open_browser: Open the page in the browser of this machine.
    """
    server = with_extra("understudy.dashboard.server", "web")
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(ends_at_once=True))
        token = None if token_file is None else read_token(token_file)
        wanted = PORT if port is None else port
        page = stack.enter_context(
            server.WatchServer(
                [target, *more], host=host, port=wanted, or_any_free=port is None, token=token, hosts=hosts
            )
        )
        for path in (target, *more):
            if not path.exists():
                console.print(
                    f"{path}: does not exist yet; the page shows it as soon as it does", style="yellow", soft_wrap=True
                )
        print_page(console, page.url, page.port, wanted)
        if open_browser:
            webbrowser.open(page.url)
        while not stop.requested:
            time.sleep(0.2)
    return 0
