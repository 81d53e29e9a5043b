"""The faces of agentlace, in one process: what a call takes, what it answers, and what it refuses."""

import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.system.trainer_process import ACTIONS, make_buffer, sweep, transition, weights
from tests.waiting import wait_for

from understudy.compat import (
    MemoryEfficientReplayBuffer,
    QueuedDataStore,
    TrainerClient,
    TrainerConfig,
    TrainerServer,
    make_trainer_config,
)
from understudy.core import ArraySpec, RefusedError, Source, SpecError, StoreError, StoreLockedError
from understudy.replay import Reader, verify
from understudy.selftest.faulty_proxy import free_port
from understudy.web.errors import AccessError, ListenError

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def serve(tmp_path, request):
    """Serves buffers of these names at any free port; options are those of TrainerServer and of the buffers."""

    def serve(*names, capacity=10_000, answer=None, **options):
        names = names or ("actor_env",)
        port = free_port(count=len(names) + 1)  # they stay free while no server is there
        config = TrainerConfig(port_number=port, broadcast_port=port + 1, request_types=["send-stats"])
        server = TrainerServer(config, request_callback=answer, **options)
        for name in names:
            buffer = make_buffer(tmp_path / name, capacity)
            request.addfinalizer(buffer.close)  # stops the server as well
            server.register_data_store(name, buffer)
        server.start(threaded=True)
        return server

    return serve


@pytest.fixture
def connect(request):
    """A client of a server, with a queue for each name; options are those of TrainerClient."""

    def connect(server, *names, capacity=10_000, **options):
        port = int(server.address.rpartition(":")[2]) if isinstance(server, TrainerServer) else server
        queues = {name: QueuedDataStore(capacity) for name in names or ("actor_env",)}
        config = TrainerConfig(port_number=port, broadcast_port=port + 1)
        client = TrainerClient(
            "actor_env", "127.0.0.1", config, data_stores=queues, **{"timeout_ms": 30_000, **options}
        )
        request.addfinalizer(client.stop)
        return client, *queues.values()

    return connect


def insert(store, *numbers, world=1, **options):
    for number in numbers:
        store.insert(transition(world, number, **options))


# ---- transitions


def test_an_update_that_returns_true_has_delivered_all_of_it(serve, connect):
    server = serve("actor_env", "actor_env_intvn")
    client, queue, intervened = connect(server, "actor_env", "actor_env_intvn")
    insert(queue, *range(70))
    insert(intervened, 3, 4, 5, 30, 31)
    assert client.update() is True
    assert (len(queue), client.num_waiting) == (0, 0)
    buffer, demos = server.data_store("actor_env"), server.data_store("actor_env_intvn")
    assert (len(buffer), len(demos)) == (70, 5)
    assert sweep(buffer) == {(1, number) for number in range(70)}
    assert sweep(demos) == {(1, number) for number in (3, 4, 5, 30, 31)}
    insert(queue, *range(70, 75))
    assert client.update()
    assert client.update()  # with nothing to hand over
    assert buffer.latest_data_id() == 75


def test_an_intervened_step_is_stored_once_and_marked_and_in_both_buffers(serve, connect, tmp_path):
    """As HIL-SERL's actor does it: every step into the one queue, and the steps of a human into the other as well."""
    server = serve("actor_env", "actor_env_intvn")
    buffer, demos = server.data_store("actor_env"), server.data_store("actor_env_intvn")
    client, queue, intervened = connect(server, "actor_env", "actor_env_intvn")
    human = {number for number in range(60) if number % 20 in (3, 4, 19)}
    for number in range(60):
        insert(queue, number)
        if number in human:
            insert(intervened, number)
    assert client.update()
    assert client.num_waiting == 0
    assert (len(buffer), len(demos)) == (60, len(human))
    assert sweep(demos, 10) == {(1, number) for number in human}
    assert sweep(buffer) == {(1, number) for number in range(60)}
    with Reader(tmp_path / "actor_env") as reader:
        episodes = [reader.read(record.id) for record in reader.episodes()]
        marked = {int(a[1]) for e in episodes for a, s in zip(e.action, e.source, strict=True) if s == Source.HUMAN}
        assert marked == human
        assert {record.info.kind for record in reader.episodes()} == {"correction"}
    with Reader(tmp_path / "actor_env_intvn") as reader:
        assert not list(reader.episodes())
    # The demonstrations that the learner inserts itself are drawn as often as each human step.
    insert(demos, *range(9), world=2)
    assert len(demos) == len(human) + 9
    counts = np.zeros(2)
    for _ in range(40):
        batch = demos.sample(256, pack_obs_and_next_obs=True)
        assert batch["observations"]["image"].shape == (256, 2, 8, 8, 3)
        counts += np.bincount(batch["actions"][:, 0].astype(int) - 1, minlength=2)
    assert abs(counts[0] / counts.sum() - len(human) / (len(human) + 8)) < 0.05  # the newest of its own waits


def test_an_intervened_step_whose_copy_was_sent_before_goes_to_its_own_store(serve, connect, tmp_path):
    server = serve("actor_env", "actor_env_intvn")
    client, queue, intervened = connect(server, "actor_env", "actor_env_intvn")
    insert(queue, *range(10))
    assert client.update()  # by a thread, between the two inserts
    insert(intervened, 9)
    insert(queue, 10, 11)
    insert(intervened, 11)
    assert client.update()
    demos = server.data_store("actor_env_intvn")
    assert (len(server.data_store("actor_env")), len(demos)) == (12, 2)
    assert sweep(demos, 4) == {(1, 9), (1, 11)}
    with Reader(tmp_path / "actor_env_intvn") as reader:
        (record,) = reader.episodes()
        assert (record.num_steps, record.num_human) == (1, 1)


def test_human_steps_are_kept_when_the_rest_of_their_buffer_is_retired(serve, connect):
    server = serve("actor_env", "actor_env_intvn", capacity=60)
    buffer, demos = server.data_store("actor_env"), server.data_store("actor_env_intvn")
    client, queue, intervened = connect(server, "actor_env", "actor_env_intvn")
    for number in range(600):
        insert(queue, number)
        if number in (5, 6):
            insert(intervened, number)
        if number % 100 == 99:
            assert client.update()
    buffer.retire()
    assert (len(buffer), len(demos)) == (60, 2)
    assert sweep(demos, 4) == {(1, 5), (1, 6)}
    assert min(number for _, number in sweep(buffer, 10)) >= 540


def test_the_buffers_own_inserts_go_on_beside_those_of_actors(serve, connect, tmp_path):
    server = serve()
    client, queue = connect(server)
    buffer = server.data_store("actor_env")
    insert(buffer, *range(7), world=2)
    insert(queue, *range(30))
    assert client.update()
    assert len(buffer) == 37
    insert(buffer, 7, world=2)
    assert len(buffer) == 38
    server.stop()
    assert len(buffer) == buffer.latest_data_id() == 38
    buffer.flush()
    assert sweep(buffer) == {(1, number) for number in range(30)} | {(2, number) for number in range(8)}
    buffer.close()
    assert verify(tmp_path / "actor_env").ok


def test_what_actors_send_is_kept_to_the_capacity(serve, connect):
    server = serve(capacity=60)
    client, queue = connect(server)
    buffer = server.data_store("actor_env")
    for first in range(0, 600, 100):
        insert(queue, *range(first, first + 100))
        assert client.update()
    with Reader(buffer.path) as reader:
        wait_for(lambda: len(reader.catalog.select("select 1 from episodes where deleted is null")) < 10)
    assert len(buffer) == 60
    assert sweep(buffer, 20) == {(1, number) for number in range(540, 600)}


def test_overflow_is_counted_and_logged(serve, connect, caplog):
    client, queue = connect(9, capacity=50, timeout_ms=20)  # nobody listens there
    with caplog.at_level(logging.WARNING):
        insert(queue, *range(60))
    assert queue.num_dropped == 10
    assert [record.args for record in caplog.records] == [(50, 1), (50, 2), (50, 4), (50, 8)]
    assert caplog.messages[0].startswith("the queue of 50 transitions is full, and the oldest was dropped; 1 so far")
    assert client.update() is False
    assert len(queue) == client.num_waiting == 50
    with caplog.at_level(logging.ERROR):
        assert client.stop() is False
    assert "stopped with 50 rows that the server does not have" in caplog.text
    server = serve()
    port = int(server.address.rpartition(":")[2])
    again = TrainerClient("actor_env", "127.0.0.1", TrainerConfig(port, port + 1), queue, timeout_ms=30_000)
    assert again.update() is True  # the queue outlives its client
    assert sweep(server.data_store("actor_env")) == {(1, number) for number in range(10, 60)}
    assert again.stop() is True


def test_a_queue_larger_than_what_is_sent_ahead_arrives_in_several_updates(serve, connect, monkeypatch):
    monkeypatch.setattr("understudy.compat.agentlace.trainer_client.MEMORY_BYTES", 100_000)
    client, queue = connect(serve(), timeout_ms=10)
    insert(queue, *range(2000))
    wait_for(client.update)
    assert queue.num_dropped == 0


def test_arrays_may_be_used_again_after_insert():
    queue = QueuedDataStore(10)
    data = transition(1, 0, done=False)
    queue.insert(data)
    data["observations"]["image"][...] = 77
    data["next_observations"]["image"][...] = 78
    queue.insert(transition(1, 1))
    first, second = queue.get_latest_data(-1)
    assert first["observations"]["image"].max() == 1
    assert first["next_observations"]["image"][0, 0, 0, 0] == 1
    assert second["observations"] is first["next_observations"] or second["observations"]["image"].max() == 1
    assert queue.latest_data_id() == 1
    assert queue.get_latest_data(0) == [second]


def test_a_transition_that_does_not_fit_is_refused_where_it_is_made(serve, connect):
    _, queue = connect(serve(), wait_for_server=True)
    bad = transition(1, 0)
    bad["actions"] = np.zeros(3, np.float32)
    with pytest.raises(SpecError, match="actions"):
        queue.insert(bad)
    with pytest.raises(SpecError, match="transition: expected a dict"):
        queue.insert(5)
    assert len(queue) == 0


def test_a_transition_from_before_the_server_came_is_refused_by_the_update(serve, connect):
    server = serve()
    client, queue = connect(server)
    insert(queue, 0, 1, done=False)
    queue.insert({**transition(1, 2), "rewards": "much"})
    insert(queue, 3)
    with pytest.raises(SpecError, match="rewards"):
        client.update()
    assert client.update()
    assert sweep(server.data_store("actor_env")) == {(1, 0), (1, 1), (1, 3)}


def test_a_human_step_stays_one(serve, connect, tmp_path):
    client, queue = connect(serve())
    queue.insert({**transition(1, 0), "infos": {"intervene_action": np.zeros(2), "succeed": True, "large": object()}})
    queue.insert({**transition(1, 1), "infos": None})
    assert client.update()
    with Reader(tmp_path / "actor_env") as reader:
        sources = [int(s) for e in reader.episodes() for s in reader.read(e.id).source]
    assert sources == [Source.HUMAN, Source.POLICY]


def test_a_periodic_update_needs_no_other(serve, connect):
    server = serve()
    client, queue = connect(server)
    client.start_async_update(interval=0.02)
    insert(queue, *range(40))
    wait_for(lambda: len(server.data_store("actor_env")) == 40)


def test_an_unknown_data_store_is_refused_with_the_nearest(serve, connect):
    server = serve("actor_env")
    with pytest.raises(RefusedError, match="data store 'demos': the server has actor_env; register it there"):
        connect(server, "demos", wait_for_server=True)
    client, _ = connect(server, "actor_envs")
    with pytest.raises(
        RefusedError, match="data store 'actor_envs': the server has actor_env; did you mean 'actor_env'"
    ):
        client.update()


def test_a_spool_has_one_client(serve, connect, tmp_path):
    server = serve("actor_env", "actor_env_intvn")
    first, queue = connect(server, spool=tmp_path / "spool")
    insert(queue, 0)
    assert first.update()
    second, _, other = connect(server, "actor_env_intvn", "actor_env", spool=tmp_path / "spool")
    insert(other, 1)
    for _ in range(2):
        with pytest.raises(StoreLockedError):
            second.update()
    assert first.stop()
    assert second.update()
    assert len(server.data_store("actor_env")) == 2


def test_a_learner_with_another_store_gets_what_it_does_not_have(serve, connect, tmp_path, caplog):
    server = serve()
    port = int(server.address.rpartition(":")[2])
    client, queue = connect(server)
    insert(queue, *range(10))
    assert client.update()
    server.stop()
    with make_buffer(None) as buffer:
        insert(queue, *range(10, 15))
        server = TrainerServer(TrainerConfig(port, port + 1))
        server.register_data_store("actor_env", buffer)
        server.start(threaded=True)
        wait_for(client.update)
        assert sweep(buffer, 5) == {(1, number) for number in range(10, 15)}
        client.stop()


def test_what_does_not_belong_into_a_restarted_learner_is_refused(serve, connect, tmp_path):
    server = serve("actor_env", "actor_env_intvn")
    ports = [int(s.address.rpartition(":")[2]) for s in server._servers.values()]
    swapped, queue = connect(server, "actor_env_intvn")
    insert(queue, 0)
    assert swapped.update()
    changed, other = connect(server)
    insert(other, 0)
    assert changed.update()
    server.stop()
    space = {"state": ArraySpec(shape=(1, 2), dtype="float32")}
    with (
        MemoryEfficientReplayBuffer(space, ACTIONS, 100, ()) as narrow,
        make_buffer(tmp_path / "other") as other_buffer,
    ):
        again = TrainerServer(TrainerConfig(*ports))
        again.register_data_store("actor_env_intvn", narrow)
        again.register_data_store("actor_env", other_buffer)
        again.start(threaded=True)
        insert(queue, 1)
        insert(other, 1)
        with pytest.raises(RefusedError, match="data store 'actor_env_intvn': this port now serves 'actor_env'"):
            wait_for(swapped.update)
        with pytest.raises(RefusedError, match="data store 'actor_env': this port now serves 'actor_env_intvn'"):
            wait_for(changed.update)
        again.stop()
        again = TrainerServer(TrainerConfig(*ports))
        again.register_data_store("actor_env", other_buffer)
        again.start(threaded=True)
        third, queue = connect(again)
        insert(queue, 2)
        assert third.update()
        again.stop()
        again = TrainerServer(TrainerConfig(*ports))
        again.register_data_store("actor_env", narrow)
        again.start(threaded=True)
        insert(queue, 3)
        with pytest.raises(SpecError, match="data store 'actor_env': the actor sends steps of another spec than the"):
            wait_for(third.update)
        assert len(narrow) == 0
        assert sweep(other_buffer, 2) == {(1, 2)}


# ---- weights


def test_weights_come_to_those_that_listen_and_to_those_that_come_later(serve, connect, tmp_path):
    server = serve()
    client, queue = connect(server)
    got = []
    insert(queue, 0)
    client.recv_network_callback(got.append)
    assert server.publish_network(weights(5)) == 1
    wait_for(lambda: client.policy_version == 1)
    assert np.array_equal(got[0]["modules_actor"]["kernel"], weights(5)["modules_actor"]["kernel"])
    insert(queue, 1)
    assert server.publish_network({"bias": np.float32(6)}) == 2
    later, _ = connect(server)
    later.recv_network_callback(got.append)
    wait_for(lambda: client.policy_version == later.policy_version == 2)
    insert(queue, 2)
    assert client.update()
    with Reader(tmp_path / "actor_env") as reader:
        versions = [int(v) for e in reader.episodes() for v in reader.read(e.id).policy_version]
    assert versions == [-1, 1, 2]


def test_exception_in_a_callback_does_not_stop_the_stream(serve, connect, caplog):
    server = serve()
    client, _ = connect(server)
    got = []

    def update_params(params):
        got.append(float(params["bias"]))
        if len(got) == 1:
            raise ValueError("a shape that the agent does not have")

    client.recv_network_callback(update_params)
    server.publish_network(weights(1))
    wait_for(lambda: got == [1.0])
    wait_for(lambda: "a shape that the agent does not have" in caplog.text)
    assert "Traceback" in caplog.text
    assert client.policy_version == -1  # the agent still acts with what it had
    server.publish_network(weights(2))
    wait_for(lambda: client.policy_version == 2)
    assert got == [1.0, 2.0]


def test_weights_that_cannot_be_sent_are_refused_by_their_path(serve):
    with pytest.raises(StoreError, match="params: expected at least one array, got a dict with head"):
        serve().publish_network({"head": {"name": "resnet"}})
    with pytest.raises(StoreError, match="head/names: expected an array of numbers, got"):
        serve("other").publish_network({"head": {"names": np.array(["resnet"])}})


def test_weights_arrive_nested_as_they_were_published(serve, connect):
    server = serve()
    client, _ = connect(server)
    got = []
    client.recv_network_callback(got.append)
    layers = [np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)]
    server.publish_network({"layers": layers, "config": (1, 2.5, "relu", None), "empty": {}})
    wait_for(lambda: got)
    assert got[0].keys() == {"layers", "config", "empty"}
    assert (got[0]["config"], got[0]["empty"]) == ((1, 2.5, "relu", None), {})
    assert type(got[0]["layers"]) is list
    assert all(np.array_equal(a, b) for a, b in zip(got[0]["layers"], layers, strict=True))


# ---- requests


def test_requests_reach_the_callback_one_at_a_time(serve, connect):
    inside, most = [], []

    def answer(kind, payload):
        inside.append(kind)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return {"kind": kind, "mean": np.mean(payload["numbers"]), "numbers": np.array(payload["numbers"])}

    server = serve(answer=answer)
    clients = [connect(server)[0] for _ in range(4)]
    answers = []
    threads = [
        threading.Thread(target=lambda c=c: answers.append(c.request("send-stats", {"numbers": np.arange(3)})))
        for c in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{"kind": "send-stats", "mean": 1.0, "numbers": [0, 1, 2]}] * 4
    assert max(most) == 1


def test_a_request_that_fails_there_answers_none_here(serve, connect, caplog):
    client, _ = connect(serve(answer=lambda kind, payload: payload["missing"]))
    assert client.request("send-stats", {}) is None
    assert "request 'send-stats': the server's answer to 'send-stats' failed: KeyError('missing')" in caplog.text
    gone, _ = connect(9, timeout_ms=20)
    assert gone.request("send-stats", {}) is None


def test_an_unknown_request_is_refused_with_those_there_are(serve, connect):
    client, _ = connect(serve(answer=lambda kind, payload: {}))
    with pytest.raises(RefusedError, match=r"request 'stats': the server answers send-stats; add it to TrainerConfig"):
        client.request("stats", {})


def test_a_request_that_cannot_be_sent_does_not_end_the_loop_of_a_robot(serve, connect, caplog):
    client, _ = connect(serve(answer=lambda kind, payload: {}))
    assert client.request("send-stats", {"who": object()}) is None
    assert "send-stats/who: expected numbers, text" in caplog.text


def test_requests_and_answers_above_a_megabyte_arrive(serve, connect):
    client, _ = connect(serve(answer=lambda kind, payload: {"kind": kind, "twice": payload["numbers"] * 2}))
    numbers = np.random.default_rng(0).normal(size=120_000)  # more than 2 MB of JSON
    answer = client.request("send-stats", {"numbers": numbers})
    assert answer["kind"] == "send-stats"
    assert answer["twice"] == [*numbers.tolist(), *numbers.tolist()]


# ---- options


def test_a_token_is_needed_off_this_machine(serve, connect, tmp_path):
    with pytest.raises(AccessError, match=r"host '0.0.0.0' can be reached from other machines, so a token is required"):
        TrainerServer(make_trainer_config(), host="0.0.0.0")
    (tmp_path / "token").write_text(TOKEN)
    server = serve(host="0.0.0.0", token_file=tmp_path / "token")
    assert server.publish_network(weights(1)) == 1
    client, queue = connect(server, token=TOKEN)
    insert(queue, 0)
    assert client.update()
    stranger, queue = connect(server)
    with pytest.raises(RefusedError, match="the token is missing or wrong"):
        stranger.update()


def test_what_would_change_nothing_is_one_line_in_the_log(caplog):
    with caplog.at_level(logging.INFO, "understudy.compat.options"):
        TrainerConfig(experimental_pipeline_port=5547, rate_limit=10, version="0.0.2")
        TrainerServer(TrainerConfig(), lambda name, payload: None, log_level=logging.INFO)
        TrainerClient("a", "127.0.0.1", TrainerConfig(), QueuedDataStore(1), log_level=logging.INFO).stop()
    assert [line.partition(" changes nothing here: ")[0].partition("=")[0] for line in caplog.messages] == [
        "TrainerConfig: experimental_pipeline_port",
        "TrainerConfig: rate_limit",
        "TrainerConfig: version",
        "TrainerServer: log_level",
        "TrainerServer: data_callback",
        "TrainerClient: log_level",
    ]
    with pytest.raises(TypeError, match="there is no option 'port_numbr'; did you mean 'port_number'"):
        TrainerConfig(port_numbr=1)
    with pytest.raises(StoreError, match="broadcast_port: expected another than port_number, got 5 for both"):
        TrainerConfig(5, 5)
    with pytest.raises(StoreError, match="config: expected a TrainerConfig, got"):
        TrainerServer({})


def test_a_config_of_agentlace_is_taken():
    theirs = SimpleNamespace(
        port_number=5488,
        broadcast_port=5489,
        request_types=["send-stats"],
        rate_limit=None,
        version="0.0.2",
        experimental_pipeline_port=None,
    )
    assert TrainerConfig.parse(theirs) == make_trainer_config(5488, 5489)
    theirs.experimental_pipeline_port = 5490
    assert TrainerConfig.parse(theirs) == make_trainer_config(5488, 5489)
    config = make_trainer_config()
    assert [config.port(index) for index in range(3)] == [5588, 5589, 5590]


def test_a_server_says_what_it_needs_first(tmp_path):
    server = TrainerServer(make_trainer_config())
    with pytest.raises(StoreError, match="there is no data store; call register_data_store first"):
        server.start()
    with pytest.raises(StoreError, match="publish_network: the server does not run"):
        server.publish_network(weights(1))
    with pytest.raises(StoreError, match="data store 'a': expected a MemoryEfficientReplayBufferDataStore, got"):
        server.register_data_store("a", QueuedDataStore(5))


def test_a_port_that_is_taken_leaves_the_buffers_free(serve, tmp_path):
    first = serve("a")
    port = int(first.address.rpartition(":")[2])
    with make_buffer(tmp_path / "b") as b, make_buffer(tmp_path / "c") as c:
        server = TrainerServer(TrainerConfig(port_number=port, broadcast_port=0))
        server.register_data_store("b", b)
        server.register_data_store("c", c)
        with pytest.raises(ListenError, match="is another server there"):
            server.start(threaded=True)
        insert(b, 0, 1)
        assert len(b) == 2
        server = TrainerServer(TrainerConfig(port_number=0, broadcast_port=0))
        server.register_data_store("b", b)
        server.start(threaded=True)
        try:
            with pytest.raises(StoreError, match="the server runs already"):
                server.register_data_store("c", c)
        finally:
            server.stop()


def test_one_queue_has_one_client(connect):
    with pytest.raises(StoreError, match=r"data store 'a': expected a QueuedDataStore of understudy.compat, got"):
        TrainerClient("a", "127.0.0.1", make_trainer_config(), [])
    _, queue = connect(9)
    with pytest.raises(StoreError, match="another client takes from this queue"):
        TrainerClient("actor_env", "127.0.0.1", make_trainer_config(), queue)


def test_the_other_faces_need_no_grpc():
    code = "import sys, understudy.compat; assert 'grpc' not in sys.modules; understudy.compat.TrainerServer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
