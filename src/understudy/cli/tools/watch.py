"""`understudy watch`: a page that shows runs and stores while they are written."""

from __future__ import annotations

import contextlib
import signal
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.console import with_extra
from understudy.web.tokens import read_token


def command(
    place: Annotated[Path, tyro.conf.Positional],
    more: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 7449,
    token_file: Path | None = None,
    hosts: tuple[str, ...] = (),
    open_browser: bool = False,
) -> int:
    """Show runs and stores on a page, live: curves, episodes, interventions, replay, health.

    Looking changes nothing, whoever writes. Episodes can be labelled, deleted and restored: the process that writes the
    store does it with its next commit, or this one at once if nobody writes. Stop with Ctrl-C.

    Args:
        place: Directory of a run or a store; it need not be there yet.
        more: More of them, to compare.
        host: Address to listen on. Anything but loopback needs --token-file.
        port: Port to listen on; 0 takes any that is free.
        token_file: File with the token that the page must know, at least 16 letters and digits.
        hosts: More names by which browsers ask for this machine.
        open_browser: Open the page in this machine's browser.
    """
    server = with_extra("understudy.dashboard.server", "web")
    console = Console(highlight=False)
    stop = threading.Event()
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            undo.callback(signal.signal, number, signal.signal(number, lambda *_: stop.set()))
        token = None if token_file is None else read_token(token_file)
        page = undo.enter_context(server.WatchServer([place, *more], host=host, port=port, token=token, hosts=hosts))
        for path in (place, *more):
            if not path.exists():
                console.print(f"{path}: is not there yet; it is shown when it is", style="yellow", soft_wrap=True)
        console.print(f"the page: {page.url}", style="bold", soft_wrap=True, markup=False)
        if open_browser:
            webbrowser.open(page.url)
        while not stop.wait(0.2):
            pass
    return 0
