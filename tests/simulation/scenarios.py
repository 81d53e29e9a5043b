"""Scenarios: short histories that are written by hand, of defects that the simulator has found."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from functools import partial

from tests.simulation import disk
from tests.simulation.history import History
from tests.simulation.roles import wait

from understudy.replay import Reader
from understudy.replay.format.records import KEPT_CHECKS
from understudy.replay.write.edit_requests import POLL_S, EditRequest, pending_edits, submit_edit
from understudy.service.client.spool import Spool


def first_power_cut_of_a_spool(history: History) -> None:
    """A spool's own directory is durable when its first chunk is."""
    robot = history.machine("robot-1")
    history.revive(robot)
    history.inside(robot, lambda: robot.recorder.give(3))
    history.inside(robot, robot.recorder.flush)
    robot.kill("nothing")
    robot.start()
    history.inside(robot, lambda: history.expect(Spool(robot.spool).num_rows == 3, "the spool lost recorded rows"))


def power_cut_after_chunks_that_no_disk_had(history: History) -> None:
    """A file of the spool that comes back after a power cut is not sent again, many chunks later."""
    robot = history.machine("robot-1")
    history.revive(robot)
    history.inside(robot, lambda: robot.recorder.give(4))
    history.inside(robot, robot.recorder.flush)  # into the spool, because no server is there yet
    history.revive(history.machine("lab"))
    for _ in range(2 * KEPT_CHECKS):
        history.inside(robot, partial(robot.recorder.deliver, 60.0))
        history.inside(robot, lambda: robot.recorder.give(4))
    history.inside(robot, partial(robot.recorder.deliver, 60.0))
    history.expect(not list(robot.spool.glob("*/*.safetensors")), "chunks that the server has are in the spool")
    robot.kill("nothing")
    history.live([])  # to the end: no row may be there twice


def first_power_cut_after_a_publication(history: History) -> None:
    """So is the directory of the parameters."""
    lab, trainer = history.machine("lab"), history.machine("trainer")
    history.revive(lab)
    history.revive(trainer)
    history.inside(trainer, trainer.publish)
    lab.kill("nothing")
    history.revive(lab)
    history.expect(lab.server.parameters.version == 1, "the server lost a published version")


def read_error_in_a_commit(history: History) -> None:
    """Whichever read fails, the numbers that a commit took before it broke off are not used again."""
    lab = history.machine("lab")
    for skip in range(40):
        history.revive(lab)
        lab.disk.fail(disk.READ, skip=skip, error=errno.EIO)
        for recorder in history.local:
            history.inside(lab, partial(recorder.give, 4))
        lab.disk.heal()
        for recorder in history.local:
            history.inside(lab, partial(recorder.give, 4))
        history.exit(lab)
        shutil.rmtree(lab.path)  # the next one begins with a new store, whose catalog is not in SQLite's memory yet


def edit_request_that_cannot_be_removed(history: History) -> None:
    """A commit succeeds though the file of a request stays; the request after it waits, and both are applied once."""
    lab = history.machine("lab")
    history.revive(lab)
    recorder = history.local[0]
    history.inside(lab, partial(recorder.give, 4))
    history.inside(lab, recorder.cut)
    for action in ("delete", "restore"):
        history.inside(lab, partial(submit_edit, lab.path, EditRequest(action=action, episodes=(1,))))
        wait(0.1)  # the name of a request begins with its time
    lab.disk.fail(disk.REMOVE, where="inbox", times=-1, error=errno.EIO)
    for left, deleted in ((2, True), (0, False)):
        wait(2 * POLL_S)
        problem = history.inside(lab, partial(recorder.give, 4)) or history.inside(lab, recorder.flush)
        history.expect(problem is None, f"a commit failed: {problem}")
        history.expect(len(pending_edits(lab.path)) == left, f"expected {left} requests, got another number")
        with Reader(lab.path) as reader:
            history.expect(reader.catalog.episode_ids("deleted is not null") == [1] * deleted, f"expected {deleted}")
        lab.disk.heal()


SCENARIOS: dict[str, Callable[[History], None]] = {
    scenario.__name__: scenario
    for scenario in (
        first_power_cut_of_a_spool,
        power_cut_after_chunks_that_no_disk_had,
        first_power_cut_after_a_publication,
        read_error_in_a_commit,
        edit_request_that_cannot_be_removed,
    )
}
