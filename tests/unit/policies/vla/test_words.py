"""Words and bins: how texts and numbers become tokens and come back."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from understudy.policies import PolicyError
from understudy.policies.encoders.words import Words
from understudy.policies.vla import bins


def test_words_are_numbered_in_order_and_padded_behind() -> None:
    words = Words.of(["Open the faucet!", "close the door"], max_words=4)
    assert words.known == ("close", "door", "faucet", "open", "the")
    assert len(words) == 7
    encoded = words.encode(["open the faucet", "OPEN, the... faucet", "close the red door"])
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [[5, 6, 4, 0], [5, 6, 4, 0], [2, 6, 1, 3]]  # 0 pads, 1 is unknown
    assert words.encode([]).shape == (0, 4)


def test_texts_that_do_not_fit_are_refused_before_training_and_after() -> None:
    with pytest.raises(PolicyError, match="expected 1 to 2 words, got 3 in 'open the door'; shorten it, or train"):
        Words.of(["open the door"], max_words=2)
    with pytest.raises(PolicyError, match=r"expected 1 to 2 words, got 0 in '\.\.\.'"):
        Words.of(["open door"], max_words=2).encode(["..."])
    with pytest.raises(PolicyError, match="words: expected different words"):
        Words(["a", "a"], max_words=2)


def test_bins_reach_the_ends_and_come_back() -> None:
    unit = torch.tensor([-1.0, -0.999, 0.0, 0.5, 1.0])
    assert bins.to_bins(unit, 256).tolist() == [0, 0, 128, 191, 255]
    assert bins.to_position(unit, 5).tolist() == pytest.approx([0.0, 0.002, 2.0, 3.0, 4.0], abs=1e-6)
    every = np.arange(256, dtype=np.int32)
    back = bins.to_unit(every, 256)
    assert back.dtype == np.float32
    assert (back[0], back[-1]) == (-1.0, 1.0)
    assert bins.to_bins(torch.from_numpy(back), 256).tolist() == every.tolist()


def test_a_draw_is_where_the_running_sum_passes_the_number() -> None:
    log_probs = torch.tensor([0.1, 0.2, 0.7]).log().expand(6, 3)
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 1 - 2**-53], dtype=torch.float64)
    assert bins.draw(log_probs, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_what_has_no_probability_is_never_drawn() -> None:
    """Not at either end, and not when the sum is a little more or less than 1."""
    for scale in (1.0, 1 - 1e-7, 1 + 1e-7):
        log_probs = (torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]) * scale).log().expand(3, 5)
        uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
        assert bins.draw(log_probs, uniforms).tolist()[0::2] == [1, 3]
        assert bins.draw(log_probs, uniforms).tolist()[1] in (1, 3)


def test_draws_have_the_probabilities() -> None:
    probs = torch.tensor([0.05, 0.15, 0.5, 0.3])
    uniforms = torch.from_numpy(np.random.default_rng(0).random(40_000))
    found = bins.draw(probs.log().expand(40_000, 4), uniforms)
    assert (torch.bincount(found, minlength=4) / 40_000).tolist() == pytest.approx(probs.tolist(), abs=0.01)
