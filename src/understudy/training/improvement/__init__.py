"""Improvement: a policy gets better from recorded experience, by views and weights over stores and no new data."""
