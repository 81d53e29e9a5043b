import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import names, trees

from understudy.core import SpecError
from understudy.core import tree as tree_module
from understudy.core.tree import below, equal, equal_leaf, flatten, join, leaves, map_leaves, unflatten


@pytest.mark.parametrize(
    ("prefix", "name", "path"), [("a", "b", "a/b"), ("", "b", "b"), ("a", "", "a"), ("", "", ""), ("a/b", "c", "a/b/c")]
)
def test_join(prefix, name, path):
    assert join(prefix, name) == path


def test_leaves_come_in_the_order_of_the_dicts():
    assert list(leaves({"b": {"y": 1, "x": 2}, "a": 3})) == [("b/y", 1), ("b/x", 2), ("a", 3)]


def test_flatten_puts_the_prefix_before_every_path():
    assert flatten({"b": {"y": 1}, "a": 3}, "observation") == {"observation/b/y": 1, "observation/a": 3}
    assert flatten(5, "action") == {"action": 5}
    assert flatten(5) == {"": 5}
    assert flatten({}, "extras") == {}


@pytest.mark.parametrize("name", ["", "a/b", 3, None])
def test_a_field_name_must_be_text_without_the_separator(name):
    with pytest.raises(SpecError) as caught:
        flatten({"arm": {name: 1}}, "observation")
    assert str(caught.value) == (
        f"observation/arm: field names are non-empty strings without '/', got {name!r}; rename it"
    )


def test_a_bad_name_at_the_root_is_placed_in_the_tree():
    with pytest.raises(SpecError, match=r"^tree: field names are non-empty strings without '/', got ''; rename it$"):
        flatten({"": 1})


@given(trees(st.integers()))
def test_unflatten_undoes_flatten(tree):
    assert unflatten(flatten(tree)) == tree


@given(trees(st.integers()), names)
def test_below_undoes_a_prefix(tree, prefix):
    beside = {prefix + "x": -1, prefix + "x/y": -2}  # names that only begin alike
    flat = beside | flatten(tree, prefix)
    assert below(flat, prefix) == flatten(tree)


def test_an_empty_flat_tree_is_an_empty_dict():
    assert unflatten({}) == {}


def test_below_finds_nothing_where_nothing_is():
    assert below({"a/b": 1}, "b") == {}


@given(trees(st.integers()))
def test_map_leaves_keeps_the_paths(tree):
    mapped = map_leaves(lambda leaf: leaf + 1, tree)
    assert flatten(mapped) == {path: leaf + 1 for path, leaf in flatten(tree).items()}


def test_map_leaves_leaves_its_argument_alone():
    tree = {"a": {"b": 1}}
    assert map_leaves(str, tree) == {"a": {"b": "1"}}
    assert tree == {"a": {"b": 1}}


@given(trees(st.integers(0, 3).map(np.float32)))
def test_a_tree_equals_its_copy(tree):
    assert equal(tree, map_leaves(np.copy, tree))


NAN = np.array([np.nan, 1], np.float32)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        pytest.param(NAN, NAN.copy(), True, id="NaN equals itself"),
        pytest.param(np.float32(0.0), np.float32(-0.0), False, id="sign of zero"),
        pytest.param(np.float32(1), np.float64(1), False, id="dtype"),
        pytest.param(np.zeros((2, 3)), np.zeros((3, 2)), False, id="shape"),
        pytest.param(np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy(), True, id="memory layout"),
        pytest.param("猫", "猫", True, id="text"),
        pytest.param("a", "b", False, id="other text"),
        pytest.param("1", np.int64(1), False, id="text and number"),
        pytest.param([NAN, NAN[:1]], [NAN.copy(), NAN[:1].copy()], True, id="ragged"),
        pytest.param([NAN], [NAN[:1]], False, id="ragged lengths"),
        pytest.param([NAN, NAN], [NAN], False, id="number of rows"),
        pytest.param(["a", ""], ["a", ""], True, id="texts"),
        pytest.param(["a", ""], ["", "a"], False, id="order of texts"),
        pytest.param([1.0], np.array([1.0]), False, id="list and array"),
    ],
)
def test_equal_leaf(a, b, same):
    assert equal_leaf(a, b) is same
    assert equal_leaf(b, a) is same
    assert equal({"x": {"y": a}}, {"x": {"y": b}}) is same


def test_trees_with_other_paths_are_not_equal():
    assert not equal({"a": NAN}, {"b": NAN})
    assert not equal({"a": NAN}, {"a": NAN, "b": NAN})
    assert not equal({"a": NAN}, NAN)


def test_the_separator_is_in_stored_paths_and_stays():
    assert tree_module.SEPARATOR == "/"
