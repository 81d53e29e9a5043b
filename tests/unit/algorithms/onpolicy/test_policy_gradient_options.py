"""Policy gradient: every option changes something or is refused, and so is a batch that makes no sense."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.docs.pages import DOCS, run_page
from tests.unit.algorithms.blocks import LENGTHS, D, H, N, Network, blocks, of, reference

from understudy.algorithms import AlgorithmError
from understudy.algorithms.onpolicy import advantages
from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig, loss_inputs

# ---- options


GAE, KL, ADAPTIVE = {"adv_estimator": "gae"}, {"kl_in": "loss"}, {"kl_in": "reward", "kl_controller": "adaptive"}
ANOTHER: dict[str, tuple[Any, dict[str, Any]]] = {  # another value, and what it has an effect with
    "adv_estimator": ("rloo", {}),
    "reward_source": ("rewards", {}),
    "grpo_use_std": (False, {}),
    "discount": (0.5, GAE),
    "gae_lambda": (0.5, GAE),
    "bootstrap_truncated": (True, GAE),
    "whiten_advantages": (True, {}),
    "clip_ratio_low": (0.01, {}),
    "clip_ratio_high": (0.01, {}),
    "clip_ratio_c": (1.01, {}),
    "loss_aggregation": ("episode-mean", {}),
    "ppo_epochs": (3, {}),
    "ppo_mini_batch_size": (5, {}),
    "mini_batch_unit": ("episodes", {"ppo_mini_batch_size": 3}),
    "ppo_micro_batch_size": (2, {}),
    "max_tokens": (40, {"ppo_micro_batch_size": None}),
    "recompute_log_probs": (True, {}),
    "rollout_is_threshold": (0.5, {"recompute_log_probs": True}),
    "shuffle": (False, {"ppo_mini_batch_size": 5}),
    "entropy_coeff": (0.1, {}),
    "value_coef": (0.1, GAE),
    "value_clip": (0.01, GAE),
    "kl_in": ("loss", {}),
    "kl_coef": (1.0, KL),
    "kl_estimator": ("mse", KL),
    "kl_controller": ("adaptive", {"kl_in": "reward"}),
    "kl_target": (1e3, ADAPTIVE),
    "kl_horizon": (10.0, ADAPTIVE),
}


def lived(**options: Any) -> tuple[list[float], list[int]]:
    """The weights after two batches, and the sizes of all micro batches."""
    algorithm, network = of(**options), Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    sizes = []
    for seed in range(2):
        batch = blocks(seed)
        again = None
        if algorithm.recomputes("float32"):
            again = network(batch, np.arange(N)).log_prob.detach().numpy()
        prepared = algorithm.prepare(batch, reference_log_prob=reference(batch), log_prob=again)
        for mini_batch in algorithm.mini_batches(batch, seed=seed):
            optimizer.zero_grad()
            for part in algorithm.micro_batches(mini_batch, lengths=np.arange(10, 10 + N)):
                algorithm.loss(network(batch, part.rows), loss_inputs(prepared, part))[0].backward()
                sizes.append(len(part))
            optimizer.step()
    return torch.cat([one.detach().flatten() for one in network.parameters()]).tolist(), sizes


@pytest.mark.parametrize("name", list(ANOTHER))
def test_every_option_changes_something(name: str) -> None:
    value, base = ANOTHER[name]
    base = {"max_tokens": 100, **base} if base.get("ppo_micro_batch_size", 1) is None else base
    before, after = lived(**base), lived(**{**base, name: value})
    if name in ("ppo_micro_batch_size", "max_tokens"):  # how the work is cut up, and not what is learned
        assert before[1] != after[1]
        np.testing.assert_allclose(before[0], after[0], rtol=0, atol=1e-12)
    else:
        assert np.abs(np.subtract(before[0], after[0])).max() > 1e-6
    assert lived(**base) == before  # nothing but options does


def test_every_option_is_tested() -> None:
    assert list(ANOTHER) == [field.name for field in fields(PolicyGradientConfig)]


def test_what_is_needed_of_others() -> None:
    assert (of().needs_value, of(**GAE).needs_value) == (False, True)
    assert [of(kl_in=one).needs_reference for one in ("none", "reward", "loss")] == [False, True, True]


def test_micro_batches_are_at_most_as_large_as_asked() -> None:
    batch, algorithm = blocks(), of(ppo_micro_batch_size=3, ppo_mini_batch_size=8)
    first, second = algorithm.mini_batches(batch, seed=0)[:2]
    assert (len(first), len(second)) == (7, 7)
    assert [len(one) for one in algorithm.micro_batches(first)] == [3, 3, 1]
    assert [len(one) for one in algorithm.micro_batches(first, rank=1, world_size=2)] == [3, 1]


ESTIMATORS = "grpo, rloo, reinforce_plus_plus, gae"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adv_estimator": "grop"}, f"expected one of {ESTIMATORS}, got 'grop'; did you mean 'grpo'?"),
        ({"reward_source": "x"}, "expected one of success, rewards, got 'x'; choose one"),
        ({"loss_aggregation": "seq"}, "expected one of token-mean, episode-mean, episode-sum, got 'seq'; choose one"),
        ({"mini_batch_unit": "tokens"}, "expected one of blocks, episodes, got 'tokens'; choose one"),
        ({"kl_in": "Loss"}, "expected one of none, reward, loss, got 'Loss'; did you mean 'loss'?"),
        ({"kl_estimator": "k3"}, "expected one of kl, abs, mse, low_var_kl, got 'k3'; choose one"),
        ({"kl_controller": "adapt"}, "expected one of fixed, adaptive, got 'adapt'; did you mean 'adaptive'?"),
        ({"discount": 0.0}, "expected more than 0 and at most 1, got 0.0"),
        ({"discount": math.nan}, "expected more than 0 and at most 1, got nan"),
        ({"gae_lambda": 1.1}, "expected from 0 to 1, got 1.1"),
        ({"clip_ratio_low": 1.0}, "expected more than 0 and less than 1, got 1.0"),
        ({"clip_ratio_high": 0.0}, "expected more than 0, got 0.0"),
        ({"clip_ratio_c": 1.0}, "expected more than 1, or None, got 1.0"),
        ({"ppo_epochs": 0}, "expected at least 1, got 0"),
        ({"ppo_mini_batch_size": 0}, "expected at least 1, got 0"),
        ({"ppo_micro_batch_size": 0}, "expected at least 1, or None, got 0"),
        ({"max_tokens": 0}, "expected at least 1, or None, got 0"),
        ({"entropy_coeff": -1.0}, "expected 0 or more, got -1.0"),
        ({"value_coef": -1.0}, "expected 0 or more, got -1.0"),
        ({"value_clip": 0.0}, "expected more than 0, or None, got 0.0"),
        ({"kl_coef": math.inf}, "expected 0 or more, got inf"),
        ({"kl_target": 0.0}, "expected more than 0, got 0.0"),
        ({"kl_horizon": 0.0}, "expected more than 0, got 0.0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmError) as caught:
        PolicyGradientConfig(**options)
    assert str(caught.value) == f"{next(iter(options))}: {message}"


@pytest.mark.parametrize("options", [{"max_tokens": 9}, {"ppo_micro_batch_size": None}])
def test_micro_batches_have_one_size(options: dict[str, Any]) -> None:
    with pytest.raises(AlgorithmError, match=r"^max_tokens: expected either it or ppo_micro_batch_size; set the other"):
        PolicyGradientConfig(**options)


@pytest.mark.parametrize(
    ("options", "other", "wanted"),
    [
        ({"grpo_use_std": False, "adv_estimator": "rloo"}, "adv_estimator", "'grpo'"),
        ({"discount": 0.9, "adv_estimator": "rloo"}, "adv_estimator", "'gae' or 'reinforce_plus_plus'"),
        ({"gae_lambda": 0.9, "adv_estimator": "reinforce_plus_plus"}, "adv_estimator", "'gae'"),
        ({"value_coef": 0.1, "adv_estimator": "grpo"}, "adv_estimator", "'gae'"),
        ({"value_clip": 0.1, "adv_estimator": "grpo"}, "adv_estimator", "'gae'"),
        ({"kl_coef": 0.1, "kl_in": "none"}, "kl_in", "'reward' or 'loss'"),
        ({"kl_estimator": "mse", "kl_in": "none"}, "kl_in", "'reward' or 'loss'"),
        ({"kl_controller": "adaptive", "kl_in": "none"}, "kl_in", "'reward' or 'loss'"),
        ({"kl_target": 0.2, "kl_in": "loss", "kl_controller": "fixed"}, "kl_controller", "'adaptive'"),
        ({"kl_horizon": 9.0, "kl_in": "loss", "kl_controller": "fixed"}, "kl_controller", "'adaptive'"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], other: str, wanted: str) -> None:
    with pytest.raises(AlgorithmError) as caught:
        PolicyGradientConfig(**options)
    effect = f"{next(iter(options))}: has no effect with {other} {options[other]!r}"
    assert str(caught.value) == f"{effect}; leave it out, or set {other} to {wanted}"


def test_an_estimate_without_a_gradient_is_refused_in_the_loss() -> None:
    with pytest.raises(AlgorithmError, match=r"^kl_estimator: 'kl' has no effect in a loss, .* take 'low_var_kl'"):
        PolicyGradientConfig(kl_in="loss", kl_estimator="kl")
    PolicyGradientConfig(kl_in="reward", kl_estimator="kl")


# ---- batches that make no sense

NO_VALUES = (
    "adv_estimator 'gae' needs a policy with a value head, got no values; "
    "give the policy a value head, or take 'grpo', 'rloo' or 'reinforce_plus_plus'"
)
NO_REFERENCE = "kl_in needs it, got none; evaluate the blocks with a reference policy, or set kl_in to 'none'"
NOT_IN_ORDER = "expected 0 to 5 in order, one after another; sort the blocks by episode"
NOT_FINITE = "not finite at block 0, step 0, which was executed; find out why"


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (GAE, {"value": None}, f"value: {NO_VALUES}"),
        (GAE, {"next_value": None}, f"value: {NO_VALUES}"),
        (KL, {}, f"reference_log_prob: {NO_REFERENCE}"),
        (
            {},
            {"executed": np.arange(N * H).reshape(N, H) < 6 * H},
            "executed: nothing of block 6 was executed; leave such blocks out of the batch",
        ),
        ({}, {"episode": np.repeat([1, 0, 2, 3, 4, 5], LENGTHS)}, f"episode: {NOT_IN_ORDER}"),
        ({}, {"episode": np.repeat([0, 1, 2, 3, 4, 6], LENGTHS)}, f"episode: {NOT_IN_ORDER}"),
        ({}, {"log_prob": np.full((N, H, D), np.nan, np.float32)}, f"log_prob: {NOT_FINITE}"),
        ({}, {"reward": np.full((N, H), np.inf, np.float32)}, f"reward: {NOT_FINITE}"),
    ],
)
def test_batches_that_make_no_sense(options: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AlgorithmError) as caught:
        of(**options).prepare(blocks(**changes))
    assert str(caught.value) == message


def test_other_things_that_do_not_fit() -> None:
    batch, algorithm = blocks(), of(**GAE)
    prepared = algorithm.prepare(batch)
    mini_batch = algorithm.mini_batches(batch, seed=0)[0]
    now = Network()(batch, mini_batch.rows)
    with pytest.raises(
        AlgorithmError, match=r"reference_log_prob: expected shape \[14, 3, 2\], got \[14, 3, 1\]; evaluate"
    ):
        of(kl_in="loss").prepare(batch, reference_log_prob=reference(batch)[..., :1])
    with pytest.raises(
        AlgorithmError, match=r"log_prob: expected shape \[14, 3, 2\], got \[13, 3, 2\]; evaluate the same"
    ):
        algorithm.loss(Network()(batch, np.arange(N - 1)), loss_inputs(prepared, mini_batch))
    with pytest.raises(
        AlgorithmError, match=r"value: adv_estimator 'gae' needs a policy with a value head, got no values"
    ):
        algorithm.loss(replace(now, value=None), loss_inputs(prepared, mini_batch))
    with pytest.raises(AlgorithmError, match=r"lengths: max_tokens needs the number of tokens of each row, got none"):
        of(ppo_micro_batch_size=None, max_tokens=9).micro_batches(mini_batch)
    with pytest.raises(AlgorithmError, match=r"rank: expected from 0 to world_size - 1 \(1\), got -1"):
        algorithm.micro_batches(mini_batch, rank=-1, world_size=2)
    none = {"observation": {}, "instruction": (), "replay": {}, "group": np.zeros(0), "success": np.zeros(0, bool)}
    empty = {
        name: np.zeros((0, H)) for name in ("executed", "reward", "policy_version", "episode", "value", "next_value")
    }
    with pytest.raises(AlgorithmError, match=r"batch: expected at least one block, got none; collect before you learn"):
        algorithm.prepare(blocks(**none, **empty, log_prob=np.zeros((0, H, D)), terminated=np.zeros(0, bool)))


# ---- the pages


def test_the_code_of_the_page_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(DOCS / "ppo.md") == 1
    first, last = (float(found) for found in re.findall(r"success (\d\.\d\d)", capsys.readouterr().out))
    assert first < 0.5
    assert last > 0.9


def test_the_page_explains_every_option_and_every_metric() -> None:
    page = (DOCS / "ppo.md").read_text()
    batch = blocks()
    algorithm = of(adv_estimator="gae", clip_ratio_c=3.0, value_clip=0.1, kl_in="loss")
    prepared = algorithm.prepare(batch, reference_log_prob=reference(batch), log_prob=batch.log_prob)
    part = algorithm.mini_batches(batch, seed=0)[0]
    _, sums = algorithm.loss(Network()(batch, part.rows), loss_inputs(prepared, part))
    metrics = {**prepared.metrics, **algorithm.finish_metrics(sums)}
    for name in (*(field.name for field in fields(PolicyGradientConfig)), *metrics):
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", page, re.MULTILINE), name
    for name, value in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE):
        if hasattr(algorithm.config, name) and name not in metrics:
            assert ast.literal_eval(value) == getattr(PolicyGradientConfig(), name), name


@pytest.mark.parametrize("page", ["grpo.md", "rloo.md", "reinforce.md"])
def test_the_other_pages_know_what_there_is(page: str) -> None:
    text = (DOCS / page).read_text()
    before = text.split(" have no effect with it and are refused")[0]
    refused = re.findall(r"`(\w+)`", re.split(r"\n\n|\. ", before)[-1])
    (estimator,) = re.findall(r'PolicyGradientConfig\(adv_estimator="(\w+)"\)', text)
    default = PolicyGradientConfig()
    assert len(refused) >= 4
    for name in refused:
        with pytest.raises(AlgorithmError, match=rf"^{name}: has no effect"):
            PolicyGradientConfig(**{"adv_estimator": estimator, name: _another(getattr(default, name))})


def _another(value: Any) -> Any:
    return not value if isinstance(value, bool) else (value or 1.0) / 2


def test_the_examples_of_the_pages() -> None:
    one_of_8, two_of_8 = (np.arange(8) < number for number in (1, 2))
    for algorithm, two, one in (("grpo", (1.62, -0.54), (2.47, -0.35)), ("rloo", (0.86, -0.29), (1.0, -0.14))):
        for success, wanted in ((two_of_8, two), (one_of_8, one)):
            found = getattr(advantages, algorithm)(success.astype(float), np.zeros(8))
            assert (round(float(found[0]), 2), round(float(found[-1]), 2)) == wanted


@pytest.mark.parametrize("options", [{"adv_estimator": "rloo"}, {"adv_estimator": "rloo", "reward_source": "rewards"}])
def test_an_episode_of_which_nothing_was_lived_is_a_failure_in_its_group(options: dict[str, Any]) -> None:
    """Its worker failed for good. The others of its group are compared with it."""
    batch = blocks(
        episode=np.repeat([0, 1, 2, 3, 4, 4], LENGTHS),
        group=np.array([0, 0, 1, 1, 2, 2]),
        success=np.array([True, True, True, True, True, False]),
        reward=np.full((N, H), 0.5, np.float32),
    )
    prepared = of(**options).prepare(batch)
    own = 1.0 if len(options) == 1 else float((batch.reward * batch.executed)[batch.episode == 4].sum())
    assert prepared.advantage[batch.episode == 4] == pytest.approx(own)  # beside one that got nothing
