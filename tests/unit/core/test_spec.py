import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from tests.strategies import specs
from tests.unit.core.complaints import complaint

from understudy.core import ArraySpec, Spec, SpecError, text
from understudy.core.spec import DTYPES, canonical_json, describe

IMAGE = ArraySpec(shape=(2, 2, 3), dtype="uint8")
VECTOR = ArraySpec(shape=(3,), dtype="float32")


def leaf(dtype, shape=(), **bounds):
    return ArraySpec(shape=shape, dtype=dtype, **bounds)


# --- making a leaf -----------------------------------------------------------------------------------------------


def test_a_leaf_is_put_in_its_usual_form():
    made = ArraySpec(shape=[np.int64(2)], dtype=np.float32, low=np.array([0, 1]), high=np.float32(2))
    assert made == ArraySpec(shape=(2,), dtype="float32", low=(0.0, 1.0), high=2.0)
    assert json.dumps(made.to_json()) == '{"shape": [2], "dtype": "float32", "low": [0.0, 1.0], "high": 2.0}'
    assert leaf("float").dtype == "float64"


@pytest.mark.parametrize("dtype", ["flaot32", "complex64", ">f4", "datetime64[s]", object])
def test_an_unknown_dtype_is_refused_with_the_known_ones(dtype):
    said = complaint(leaf, dtype)
    assert said.startswith("dtype: expected one of bool, uint8, ")
    assert "float64, str, got '" in said
    assert said.endswith("; convert the field")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": (2, None)}, "shape: only the first dimension may be None (ragged), got [2, None]"),
        ({"shape": (2, -1)}, "shape: dimensions are not negative, got [2, -1]"),
        ({"shape": (None, 0)}, "shape: a ragged field has elements of some size, got [None, 0]"),
        ({"shape": (3,), "dtype": "str"}, "shape: text has shape () and no bounds, got [3]; use text()"),
        ({"dtype": "str", "low": 1}, "shape: text has shape () and no bounds, got []; use text()"),
    ],
)
def test_a_leaf_that_makes_no_sense_is_refused(fields, said):
    assert complaint(ArraySpec, **{"shape": (), "dtype": "float32"} | fields) == said


@pytest.mark.parametrize(
    ("made", "ragged", "row_bytes", "shown"),
    [
        (IMAGE, False, 12, "uint8 [2, 2, 3]"),
        (leaf("float64"), False, 8, "float64 []"),
        (leaf("int16", (0, 4)), False, 0, "int16 [0, 4]"),
        (leaf("int32", (None, 4)), True, 0, "int32 [?, 4]"),
        (text(), True, 0, "text"),
    ],
)
def test_what_a_leaf_says_about_itself(made, ragged, row_bytes, shown):
    assert (made.ragged, made.row_bytes, str(made)) == (ragged, row_bytes, shown)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_fits_its_leaf(dtype):
    shape = () if dtype == "str" else (None, 2)
    zero = leaf(dtype, shape).zero()
    assert leaf(dtype, shape).check(zero, "x") is zero
    assert len(zero) == 0
    if dtype != "str":
        assert leaf(dtype, (3,)).zero().tolist() == [0, 0, 0]


# --- checking a value --------------------------------------------------------------------------------------------


def test_an_array_that_fits_is_handed_on_as_it_is():
    value = np.ones(3, np.float32)
    assert VECTOR.check(value, "x") is value


@pytest.mark.parametrize(
    ("made", "value", "said"),
    [
        (IMAGE, np.zeros((2, 2, 3), np.float32), "expected uint8 [2, 2, 3], got float32 [2, 2, 3]"),
        (IMAGE, np.zeros((2, 3), np.uint8), "expected uint8 [2, 2, 3], got uint8 [2, 3]"),
        (VECTOR, np.float32(1), "expected float32 [3], got float32 []"),
        (leaf("float64"), np.float32(1), "expected float64 [], got float32 []"),
        (leaf("float32"), np.float64(1), "expected float32 [], got float64 []"),
        (VECTOR, [1, 2], "expected float32 [3], got float32 [2]"),
        (leaf("int32", (None, 4)), np.zeros((5, 3), np.int32), "expected int32 [?, 4], got int32 [5, 3]"),
        (leaf("int32", (None, 4)), np.zeros(4, np.int32), "expected int32 [?, 4], got int32 [4]"),
        (leaf("int64"), True, "expected int64 [], got bool []"),
    ],
)
def test_another_shape_or_dtype_is_refused(made, value, said):
    assert complaint(made.check, value, "observation/x") == f"observation/x: {said}; convert it first"


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_ragged_leaf_takes_any_length(length):
    assert leaf("int32", (None, 4)).check(np.zeros((length, 4), np.int32), "x").shape == (length, 4)


@pytest.mark.parametrize(
    ("made", "value", "wanted"),
    [
        (leaf("float32"), 1, np.float32(1)),
        (leaf("float16", (2,)), (0.5, 2), np.array([0.5, 2], np.float16)),
        (leaf("uint8", (2,)), [0, 255], np.array([0, 255], np.uint8)),
        (leaf("int8"), -128, np.int8(-128)),
        (leaf("uint64"), 2**64 - 1, np.uint64(2**64 - 1)),
        (leaf("bool", (2,)), [True, False], np.array([True, False])),
        (leaf("int64", (None,)), [], np.zeros(0, np.int64)),
        (leaf("float32"), float("inf"), np.float32(np.inf)),
    ],
)
def test_python_values_are_converted(made, value, wanted):
    got = made.check(value, "x")
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize(
    ("made", "value", "said"),
    [
        (leaf("uint8"), 256, "expected uint8 [], got int 256, which does not fit; choose a wider dtype"),
        (
            leaf("int8", (2,)),
            [0, -129],
            "expected int8 [2], got list [0, -129], which does not fit; choose a wider dtype",
        ),
        (leaf("float16"), 1e6, "expected float16 [], got float 1000000.0, which does not fit; choose a wider dtype"),
        (leaf("int64"), 1.5, "expected int64 [], got float 1.5; pass a whole number"),
        (leaf("bool"), 1, "expected bool [], got int 1; pass True or False"),
        (leaf("float32"), "1", "expected float32 [], got str '1'; pass a number"),
        (leaf("float32"), None, "expected float32 [], got None; pass a number"),
        (leaf("float32", (2,)), [[1], [2, 3]], "expected float32 [2], got list [[1], [2, 3]]; pass a numpy array"),
    ],
)
def test_python_values_that_would_lose_something_are_refused(made, value, said):
    assert complaint(made.check, value, "x") == f"x: {said}"


def test_text_takes_text_only():
    assert text().check("", "prompt") == ""
    assert complaint(text().check, b"go", "prompt") == "prompt: expected text, got bytes b'go'; pass a str"
    assert complaint(text().check, np.zeros(2), "prompt") == "prompt: expected text, got float64 [2]; pass a str"


# --- trees of leaves ---------------------------------------------------------------------------------------------

ARM = Spec({"pose": VECTOR, "cameras": {"front": IMAGE}})
GOOD = {"pose": np.zeros(3, np.float32), "cameras": {"front": np.zeros((2, 2, 3), np.uint8)}}


def test_check_gives_the_flat_value():
    flat = ARM.check(GOOD, "observation")
    assert list(flat) == ["observation/pose", "observation/cameras/front"]
    assert flat["observation/pose"] is GOOD["pose"]


def test_check_converts_the_leaves_that_need_it():
    shuffled = {"cameras": MappingProxyType(GOOD["cameras"]), "pose": (1, 2, 3)}
    flat = ARM.check(shuffled, "observation")
    assert list(flat) == ["observation/pose", "observation/cameras/front"]
    assert (flat["observation/pose"].dtype, flat["observation/pose"].tolist()) == (np.float32, [1, 2, 3])
    assert flat["observation/cameras/front"] is GOOD["cameras"]["front"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (GOOD | {"pose": np.zeros(3)}, "o/pose: expected float32 [3], got float64 [3]; convert it first"),
        ({"pose": GOOD["pose"]}, "o/cameras/front: expected uint8 [2, 2, 3], got nothing; add the field"),
        (
            GOOD | {"cameras": {"fornt": 1, "top": 2}},
            "o/cameras/front: expected uint8 [2, 2, 3], got nothing (got o/cameras/fornt, o/cameras/top instead); "
            "add the field",
        ),
        (
            GOOD | {"touch": np.zeros(2)},
            "o/touch: expected no such field, got float64 [2]; "
            "drop it, or add it to the spec (it has o/cameras/front, o/pose)",
        ),
        (GOOD["pose"], "o: expected a dict with cameras/front, pose, got float32 [3]; pass the whole tree"),
    ],
)
def test_the_first_wrong_field_is_named(value, said):
    assert complaint(ARM.check, value, "o") == said


def test_without_a_path_the_value_is_called_value():
    assert complaint(Spec(VECTOR).check, np.zeros(3)).startswith("value: expected float32 [3], got float64 [3]")
    assert complaint(ARM.check, 1).startswith("value: expected a dict with cameras/front, pose, got int 1")


def test_an_empty_spec_takes_an_empty_dict_only():
    assert Spec({}).check({}, "extras") == {}
    said = complaint(Spec({}).check, 3, "extras")
    assert said == "extras: expected a dict with no fields, got int 3; pass the whole tree"
    said = complaint(Spec({}).check, {"a": 3}, "extras")
    assert said == "extras/a: expected no such field, got int 3; drop it, or add it to the spec (it has no fields)"


def test_a_spec_holds_array_specs_only():
    assert complaint(Spec, {"a": 3}) == "a: expected an ArraySpec, got int 3; wrap it"
    assert complaint(Spec, None) == "spec: expected an ArraySpec, got None; wrap it"
    said = complaint(Spec, {"a": {"$array": VECTOR}})
    assert said == "a/$array: expected another name than '$array', which marks leaves; rename it"


def test_zero_is_a_tree_of_zeros():
    zero = ARM.zero()
    assert {path: value.any() for path, value in ARM.check(zero).items()} == {"pose": False, "cameras/front": False}


@given(specs)
def test_a_spec_survives_json(spec):
    assert Spec.from_json(json.loads(canonical_json(spec.to_json()))) == spec


def test_equal_specs_have_equal_texts():
    a, b = ({"x": leaf("int8", low=low), "y": VECTOR} for low in (0, 0.0))
    b = dict(reversed(b.items()))
    assert Spec(a) == Spec(b)
    assert canonical_json(Spec(a).to_json()) == canonical_json(Spec(b).to_json())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((2, 3), np.uint8), "uint8 [2, 3]"),
        (np.float32(1), "float32 []"),
        ({"a": 1, "b": 2}, "a dict with a, b"),
        ({}, "a dict with no fields"),
        (None, "None"),
        ("x" * 38, "str '" + "x" * 38 + "'"),
        ("x" * 39, "str '" + "x" * 36 + "..."),
        ([np.zeros((2, 2))], "list [array([[0., 0.], [0., 0.]])]"),
    ],
)
def test_describe(value, said):
    assert describe(value) == said


def test_canonical_json_is_one_text():
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'


def test_text_with_half_a_character_is_refused() -> None:
    assert text().check("åß猫🤖", "note") == "åß猫🤖"
    with pytest.raises(
        SpecError, match=r"note: expected text, got 'a\\ud800', whose character 1 is half of one; decode"
    ):
        text().check("a\ud800", "note")
