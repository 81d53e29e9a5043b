import socket

import pytest

from understudy.web.access import AllowedHosts, check_access, host_name, is_loopback, is_same_origin
from understudy.web.errors import AccessError

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_access(host, None)
    check_access(host, TOKEN)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "", "192.168.1.4", "example.org", "127.0.0.1.example.org", "LOCALHOST.test"]
)
def test_what_others_can_reach_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    check_access(host, TOKEN)
    with pytest.raises(AccessError) as caught:
        check_access(host, None)
    assert str(caught.value) == (
        f"host {host!r} can be reached from other machines, so a token is required; "
        f"pass one (--token-file), or listen on 127.0.0.1"
    )


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:80", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[::1]:80", "::1"),
        ("", ""),
        ("127.0.0.1:80:foreign.test", "127.0.0.1:80"),
    ],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


def test_a_server_on_loopback_answers_to_its_names_only() -> None:
    hosts = AllowedHosts("127.0.0.1", ["Robot.lab"])
    for header in ("127.0.0.1:5", "localhost", "LOCALHOST:5", "[::1]:5", "robot.lab", "robot.lab:5"):
        assert header in hosts, header
    for header in ("", "foreign.test", "127.0.0.1.foreign.test", "10.0.0.1", "127.0.0.1:5:foreign.test", "[]", ":5"):
        assert header not in hosts, header
    assert socket.gethostname() not in AllowedHosts("127.0.0.1") or socket.gethostname() == "localhost"


def test_a_server_on_all_interfaces_answers_to_any_address_and_this_machine() -> None:
    hosts = AllowedHosts("0.0.0.0")
    for header in ("192.168.1.5:99", "[fe80::1]:9", socket.gethostname(), f"{socket.gethostname()}.local:1"):
        assert header in hosts, header
    assert "foreign.test" not in hosts


def test_only_a_page_of_the_same_host_and_port_has_the_same_origin() -> None:
    assert is_same_origin("http://lab.test:5", "lab.test:5")
    assert is_same_origin("https://lab.test:5", "lab.test:5")
    for origin in ("", "null", "file://", "http://lab.test", "http://lab.test:5/", "http://foreign.test", "lab.test:5"):
        assert not is_same_origin(origin, "lab.test:5"), origin
