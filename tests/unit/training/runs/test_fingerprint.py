"""Fingerprints change with each of their parts."""

from __future__ import annotations

import numpy as np

from understudy.training.runs.fingerprint import digest_of_arrays, fingerprint


def test_a_fingerprint_changes_with_each_of_its_parts() -> None:
    parts = {"config": {"a": 1}, "parameters": {"w": np.zeros(3)}, "env": "toy", "versions": {"numpy": "2"}}
    base = fingerprint(**parts)  # type: ignore[arg-type]
    assert base == fingerprint(**parts)  # type: ignore[arg-type]
    others = {"config": {"a": 2}, "parameters": {"w": np.ones(3)}, "env": "toy:x", "versions": {"numpy": "3"}}
    for name, value in others.items():
        assert fingerprint(**{**parts, name: value}) != base  # type: ignore[arg-type]
    assert base.versions["python"].startswith("3.")
    assert len(base.code) == 16


def test_a_digest_sees_names_shapes_types_and_bits() -> None:
    seen = {
        digest_of_arrays(tree)
        for tree in (
            {"a": np.zeros(4)},
            {"b": np.zeros(4)},
            {"a": np.zeros((2, 2))},
            {"a": np.zeros(4, np.float32)},
            {"a": np.array([0, 0, 0, 1e-300])},
        )
    }
    assert len(seen) == 5
