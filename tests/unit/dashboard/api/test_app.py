"""What the routes send is valid JSON."""

from __future__ import annotations

import math

from understudy.dashboard.api.app import _finite


def test_what_is_no_number_becomes_null() -> None:
    assert _finite({"a": [math.nan, math.inf, 1.0], 2: "\ud800"}) == {"a": [None, None, 1.0], "2": "?"}
