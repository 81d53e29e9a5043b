"""Options: those of another project are accepted or refused with a reason, unknown ones name the nearest."""

from __future__ import annotations

import logging

import pytest

from understudy.compat.options import accept_options, refuse_options
from understudy.core import StoreError


def test_no_option_is_fine() -> None:
    refuse_options("Buffer", {}, {"log_level": "leave it out"}, ("path",))


def test_an_option_of_the_other_project_is_refused_with_what_to_do() -> None:
    with pytest.raises(StoreError, match="Buffer: log_level: leave it out"):
        refuse_options("Buffer", {"log_level": 1}, {"log_level": "leave it out"}, ("path",))


def test_an_unknown_option_gets_the_nearest_or_all() -> None:
    with pytest.raises(TypeError, match="Buffer: there is no option 'pth'; did you mean 'path'"):
        refuse_options("Buffer", {"pth": 1}, {}, ("path", "seed"))
    with pytest.raises(TypeError, match="there is no option 'colour'; it has path, seed"):
        refuse_options("Buffer", {"colour": 1}, {}, ("path", "seed"))


def test_an_option_that_changes_nothing_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        accept_options("Buffer", {"cache_size": 5}, {"cache_size": "there is no cache"}, ("path",))
    assert caplog.messages == ["Buffer: cache_size=5 changes nothing here: there is no cache"]
    with pytest.raises(TypeError, match="Buffer: there is no option 'cachesize'; did you mean 'cache_size'"):
        accept_options("Buffer", {"cachesize": 5}, {"cache_size": "there is no cache"}, ("path",))
