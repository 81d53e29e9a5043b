import socket
import threading
import time

import pytest
from tests.waiting import wait_for

from understudy.selftest.faulty_proxy import MAX_RUN_BYTES, Proxy, free_port


@pytest.fixture
def echo():
    """The port of a server that sends back all that it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def answer(client):
        with client:
            try:
                while data := client.recv(65536):
                    client.sendall(data)
            except OSError:
                pass

    def accept():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(client,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in [accepting, *threads]:
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def proxy(echo):
    with Proxy(echo, port=free_port(), seed=1) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with connect(proxy) as client:
        assert ask(client, b"first") == b"first"  # so that the link is there
        yield client


def connect(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def ask(client, data, size=None):
    client.sendall(data)
    return take(client, len(data) if size is None else size)


def take(client, size):
    got = b""
    while len(got) < size and (more := client.recv(size - len(got))):
        got += more
    return got


def test_forwards_both_ways(client):
    data = bytes(range(256)) * 4000
    received = []
    taking = threading.Thread(target=lambda: received.append(take(client, len(data))))
    taking.start()
    client.sendall(data)
    taking.join()
    assert received == [data]


def test_a_cut_closes_all_connections_and_lets_new_ones_in(proxy, client):
    with connect(proxy) as other:
        assert ask(other, b"x") == b"x"
        proxy.cut()
        assert client.recv(1) == b""
        assert other.recv(1) == b""
    assert proxy.num_faults["cut"] == 2
    with connect(proxy) as again:
        assert ask(again, b"again") == b"again"


def test_a_client_that_goes_away_takes_its_link_along(proxy, client):
    assert proxy.num_links == 1
    client.close()
    wait_for(lambda: proxy.num_links == 0)


def test_refuses_new_connections_and_keeps_old_ones(proxy, client):
    proxy.refuse(on=True)
    with pytest.raises(ConnectionRefusedError):
        connect_again_and_again(proxy)
    assert ask(client, b"still here") == b"still here"
    proxy.refuse(on=False)
    for _ in range(100):
        try:
            again = connect(proxy)
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            break
    with again:
        assert ask(again, b"again") == b"again"


def connect_again_and_again(proxy):
    for _ in range(100):
        connect(proxy).close()
        time.sleep(0.05)


def test_closes_the_connection_if_nobody_is_behind_it():
    with Proxy(free_port()) as proxy, connect(proxy) as client:
        assert client.recv(1) == b""


def test_free_ports_follow_each_other(monkeypatch):
    first = free_port(count=4)
    assert 20_000 <= first < 32_000
    monkeypatch.setattr("random.Random.sample", lambda *_: [first, first + 2])
    with socket.create_server(("127.0.0.1", first + 1)):
        assert free_port() == first
        assert free_port(count=2) == first + 2


def test_a_delay_holds_back_each_way(proxy, client):
    proxy.delay(0.1)
    started = time.monotonic()
    assert ask(client, b"slow") == b"slow"
    assert time.monotonic() - started >= 0.2


def test_a_freeze_forwards_nothing_and_then_everything(proxy, client):
    proxy.freeze(on=True)
    client.sendall(b"held")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.freeze(on=False)
    client.settimeout(10)
    assert take(client, 4) == b"held"


def test_silence_swallows_for_good_and_spares_new_connections(proxy, client):
    proxy.silence()
    client.sendall(b"lost")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.heal()
    with pytest.raises(TimeoutError):
        client.recv(1)
    with connect(proxy) as other:
        assert ask(other, b"heard") == b"heard"


def echo_of_two_hundred(proxy, client, harm, to_target):
    """What comes back of the bytes from 0 to 199 when they are harmed."""
    proxy.corrupt(harm, to_target=to_target)
    client.sendall(bytes(range(200)))
    wait_for(lambda: proxy.num_faults[harm])
    client.sendall(b"end")
    got = b""
    while not got.endswith(b"end"):
        got += client.recv(1000)
    return got[:-3]


@pytest.mark.parametrize("to_target", [True, False])
def test_drops_one_run_of_bytes(proxy, client, to_target):
    rest = echo_of_two_hundred(proxy, client, "drop", to_target)
    assert len(rest) < 200
    start = next((i for i, byte in enumerate(rest) if byte != i), len(rest))
    assert rest[start:] == bytes(range(200 - len(rest) + start, 200))
    assert proxy.num_faults["drop"] == 1


@pytest.mark.parametrize("to_target", [True, False])
def test_repeats_one_run_of_bytes(proxy, client, to_target):
    rest = echo_of_two_hundred(proxy, client, "repeat", to_target)
    again = len(rest) - 200
    assert 0 < again <= MAX_RUN_BYTES
    data = bytes(range(200))
    assert any(rest == data[: start + again] + data[start:] for start in range(200))
    assert proxy.num_faults["repeat"] == 1


def test_heal_forgets_what_has_not_happened_yet(proxy, client):
    proxy.corrupt("drop", to_target=True)
    proxy.delay(5.0)
    proxy.heal()
    assert ask(client, b"all of it") == b"all of it"
    assert not proxy.num_faults


def test_close_ends_its_threads_even_in_a_freeze(echo):
    before = threading.active_count()
    with Proxy(echo) as proxy:
        client = connect(proxy)
        proxy.freeze(on=True)
        client.sendall(b"x")
        wait_for(lambda: "pump" in {thread.name for thread in threading.enumerate()})
    with client:
        assert client.recv(10) in (b"", b"x")
    assert {t.name for t in threading.enumerate()}.isdisjoint({"pump", f"proxy:{proxy.port}"})
    assert threading.active_count() <= before + 1  # the echo's
