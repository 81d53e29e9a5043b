"""Hypothesis profiles: `ci`, the default, and `long`, chosen with HYPOTHESIS_PROFILE=long."""

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=200, deadline=None, derandomize=bool(os.environ.get("CI")))
settings.register_profile("long", max_examples=2000, deadline=None, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
