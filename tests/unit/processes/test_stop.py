"""The first signal is a request, the second one quits, and a block leaves the handlers as it found them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from understudy.processes.stop import QuitAtOnce, Stopped, StopRequest, stop_on_signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_quits(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signals() as stop:
        stop.check()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert capsys.readouterr().err == "stopping at the next safe moment; a second Ctrl-C quits at once\n"
        with pytest.raises(Stopped) as stopped:
            stop.check()
        stop.describe_unsaved = lambda: "7 steps are run again"
        with pytest.raises(QuitAtOnce, match=r"^quit at once; 7 steps are run again$") as quit_at_once:
            os.kill(os.getpid(), number)
    assert (stopped.value.exit_code, quit_at_once.value.exit_code) == (code, code)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_episode_has_its_time_to_end() -> None:
    patient, hurried = StopRequest(grace_s=1e6), StopRequest(grace_s=0)
    for stop in (patient, hurried):
        stop.check_overdue()
        stop.request()
    assert (patient.overdue, hurried.overdue) == (False, True)
    patient.check_overdue()
    with pytest.raises(Stopped):
        hurried.check_overdue()


def test_another_thread_can_ask_and_receives_no_signals() -> None:
    found = []

    def work() -> None:
        with stop_on_signals() as stop:  # leaves the handlers alone
            found.append(stop.requested)
            stop.request()
            found.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, True]
