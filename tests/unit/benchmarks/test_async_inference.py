"""The benchmark of asynchronous acting: a short form of it, and that the page says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.async_inference import main, train
from benchmarks.worlds.slalom import Slalom
from tests.docs.pages import DOCS


def test_a_short_form_measures_and_draws(tmp_path: Path) -> None:
    policy = tmp_path / "policy.safetensors"
    train(30, seed=0).save(policy)
    main(minutes=0.05, hz=100.0, inference_ms=10.0, policy=policy, out=tmp_path)
    found = json.loads((tmp_path / "benchmarks/async_inference.json").read_text())
    assert found["minutes"] == 0.05
    for name in ("instant", "switch", "blend", "rtc"):
        assert found[name]["steps"] >= 300
        assert found[name]["seams"] > 10
    assert found["rtc"]["mean_delay_steps"] > 0.5
    assert found["instant"]["max_delay_steps"] == 0
    assert b"<svg" in (tmp_path / "images/async_inference.svg").read_bytes()


def test_the_page_says_what_was_measured() -> None:
    found = json.loads((DOCS / "benchmarks/async_inference.json").read_text())
    page = (DOCS / "rtc.md").read_text()
    for name in ("instant", "switch", "blend", "rtc"):
        one = found[name]
        success = f"{one['successes']} of {one['episodes']}"
        assert (
            f"| {one['seam_jump_mean']:.3f} | {one['seam_jump_p95']:.3f} | {one['other_jump_mean']:.3f} | {success} |"
            in page
        )
    assert f"**{found['rtc']['late_steps']} late" in page
    assert found["rtc"]["seam_jump_mean"] <= found["instant"]["seam_jump_mean"] < found["switch"]["seam_jump_mean"]


def test_a_post_ends_the_way() -> None:
    world = Slalom()
    world.reset(seed=0, options={"start": 0})
    world.at[1], ended, steps = 0.0, False, 0
    while not ended:
        *_, ended, _, outcome = world.step([1.0, 0.0])
        steps += 1
    assert steps < 60
    assert not outcome["success"]
