"""Suites: names, splits, and what is said about mistakes."""

import json

import pytest

from understudy.envs.suite import Suite, SuiteError, Task


def make_task(name: str = "pick", num_starts: int = 50) -> Task:
    return Task(name=name, instruction="pick it up", num_starts=num_starts, max_steps=10)


@pytest.mark.parametrize("num_starts", [1, 2, 3, 5, 49, 50, 10**9])
def test_by_default_the_last_fifth_is_for_evaluation(num_starts: int) -> None:
    suite = Suite(name="s", tasks=(make_task(num_starts=num_starts),))
    train, evaluation = suite.starts("pick", "train"), suite.starts("pick", "eval")
    assert len(train) + len(evaluation) == num_starts
    assert train[0] == 0
    assert len(evaluation) == (0 if num_starts == 1 else max(1, num_starts // 5))
    if evaluation:
        assert train[-1] + 1 == evaluation[0]
        assert suite.split_of("pick", evaluation[0]) == "eval"
    assert suite.split_of("pick", train[-1]) == "train"


def test_eval_starts_can_be_named() -> None:
    suite = Suite(name="s", tasks=(make_task(num_starts=5), make_task("place")), eval_starts={"pick": (0, 3)})
    assert suite.starts("pick", "train") == (1, 2, 4)
    assert suite.starts(suite.task("pick"), "eval") == (0, 3)
    assert list(suite.starts("place", "eval")) == list(range(40, 50))


def test_json_round_trip() -> None:
    suite = Suite(name="s", tasks=(make_task(), make_task("place", 3)), eval_starts={"place": (1,)})
    assert Suite.from_json(json.loads(json.dumps(suite.to_json()))) == suite


def test_an_unknown_task_gets_the_nearest_name() -> None:
    suite = Suite(name="s", tasks=(make_task("pick_red"), make_task("press")))
    with pytest.raises(SuiteError, match=r"task: suite 's' has no task 'pick_rad'; did you mean 'pick_red'\?"):
        suite.task("pick_rad")
    with pytest.raises(SuiteError, match="it has pick_red, press"):
        suite.task("xyz")


def test_unknown_splits_and_starts() -> None:
    suite = Suite(name="s", tasks=(make_task(),))
    with pytest.raises(SuiteError, match="split: expected one of train, eval, got str 'test'"):
        suite.starts("pick", "test")  # type: ignore[arg-type]
    with pytest.raises(SuiteError, match="start: task 'pick' has the starts 0 to 49, got int 50; choose one of them"):
        suite.split_of("pick", 50)


def test_a_suite_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SuiteError, match="task 'x'/instruction: expected some text, got str ' '"):
        Task(name="x", instruction=" ", num_starts=1, max_steps=1)
    with pytest.raises(SuiteError, match="task 'x'/max_steps: expected a whole number from 1, got int 0"):
        Task(name="x", instruction="do", num_starts=1, max_steps=0)
    with pytest.raises(SuiteError, match="suite 's': expected at least one task, got none"):
        Suite(name="s", tasks=())
    with pytest.raises(SuiteError, match="suite 's': expected tasks with different names"):
        Suite(name="s", tasks=(make_task(), make_task()))
    with pytest.raises(SuiteError, match="eval_starts/pick: expected different whole numbers from 0 to 49, got 50"):
        Suite(name="s", tasks=(make_task(),), eval_starts={"pick": (1, 50)})
    with pytest.raises(SuiteError, match="did you mean 'pick'"):
        Suite(name="s", tasks=(make_task(),), eval_starts={"pic": (1,)})
