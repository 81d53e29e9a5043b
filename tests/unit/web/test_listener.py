import socket

import pytest

from understudy.web.errors import ListenError
from understudy.web.listener import listen, page_url, server_url


def test_the_url_has_the_port_that_was_free() -> None:
    with listen("localhost", 0) as listening:
        port = listening.getsockname()[1]
        assert port > 0
        assert server_url("127.0.0.1", listening) == f"http://127.0.0.1:{port}"
        assert page_url("127.0.0.1", listening, None) == f"http://127.0.0.1:{port}/"
        assert page_url("[::1]", listening, "abc") == f"http://[::1]:{port}/#token=abc"
        for everywhere in ("0.0.0.0", "::"):
            assert everywhere not in server_url(everywhere, listening)


def test_small_replies_are_not_held_back() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_refused_in_a_sentence() -> None:
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^127.0.0.1:{port}: cannot listen there \(.*\); .*another port"):
            listen("127.0.0.1", port)
        with listen("127.0.0.1", port, or_any_free=True) as other:  # a default that nobody asked for
            assert other.getsockname()[1] not in (0, port)
    for host, wrong in (("127.0.0.1", 70_000), ("no-such-host.invalid", 0), ("192.0.2.1", 0)):
        with pytest.raises(ListenError, match="cannot listen there"):
            listen(host, wrong)
