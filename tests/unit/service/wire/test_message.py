"""Wire: what is packed comes back bit by bit, and whatever is not a message is a WireError and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from understudy.core import WireError
from understudy.replay.format.layout import SAFETENSORS_DTYPES
from understudy.service.wire.message import (
    MAX_HEADER_BYTES,
    PIECE_BYTES,
    Assembly,
    from_bfloat16,
    pack,
    parse_json,
    pieces,
    receive,
    size_of,
    to_bfloat16,
    unpack,
)

Array = np.ndarray[Any, Any]
DTYPES = sorted(SAFETENSORS_DTYPES)
SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 4), (2, 3), (1, 1, 1, 5)]


def message_of(metadata: dict[str, str], arrays: dict[str, Array]) -> bytes:
    return b"".join(pack(metadata, arrays))


def filled(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    data = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    return (data & 1 if dtype == "bool" else data).view(dtype).reshape(shape)


def assert_same(found: dict[str, Array], sent: dict[str, Array]) -> None:
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


# ---- there and back


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    sent = {"a": filled(shape, dtype, 1), "b/c": filled((3,), dtype, 2)}
    metadata, found = unpack(message_of({"seq": "7", "text": 'å猫🤖\n"'}, sent))
    assert metadata == {"seq": "7", "text": 'å猫🤖\n"'}
    assert_same(found, sent)


def test_a_message_without_arrays_is_one_too() -> None:
    assert unpack(message_of({"x": "y"}, {})) == ({"x": "y"}, {})


names = st.text(min_size=1, max_size=6).filter(lambda name: name not in ("check", "__metadata__"))


@st.composite
def arrays_strategy(draw: Callable[..., Any]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name in draw(st.lists(names, max_size=5, unique=True)):
        array = filled(
            tuple(draw(st.lists(st.integers(0, 4), max_size=3))), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9))
        )
        turned = draw(st.sampled_from(["as it is", "transposed", "every other"]))
        if turned == "transposed":
            array = array.T
        elif turned == "every other" and array.ndim:
            array = array[::2]
        found[name] = array
    return found


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), arrays_strategy())
def test_anything_comes_back(metadata: dict[str, str], sent: dict[str, Array]) -> None:
    found_metadata, found = unpack(message_of(metadata, sent))
    assert found_metadata == metadata
    assert_same(found, sent)


def test_arrays_in_the_byte_order_of_other_machines_keep_their_numbers() -> None:
    _, found = unpack(message_of({}, {"a": np.array([1.0, 2.5], ">f4"), "b": np.array([1, 2], ">i8")}))
    assert found["a"].tolist() == [1.0, 2.5]
    assert found["b"].tolist() == [1, 2]


def test_the_public_library_opens_a_message() -> None:
    sent = {dtype: filled((2, 3), dtype, 3) for dtype in DTYPES} | {"scalar": np.array(3.5), "none": np.zeros((0, 4))}
    message = message_of({"seq": "1"}, sent)
    opened = safetensors.numpy.load(message)
    check = opened.pop("check")
    assert_same(opened, sent)
    assert int(check) == xxhash.xxh3_64_intdigest(message[:-8])


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(WireError, match=rf"expected a header of at most {MAX_HEADER_BYTES} bytes, got \d+; send fewer"):
        pack({"long": "x" * MAX_HEADER_BYTES}, {})
    with pytest.raises(WireError, match="check"):
        pack({}, {"check": np.zeros(3)})
    with pytest.raises(WireError, match=r"a: .*complex128"):
        pack({}, {"a": np.zeros(3, np.complex128)})


# ---- what is not a message

SMALL = message_of({"seq": "0"}, {"a": np.arange(3, dtype=np.float32), "f": np.array([True, False])})


def test_any_flipped_byte_is_refused() -> None:
    unpack(SMALL)
    for place in range(len(SMALL)):
        for flip in range(1, 256):
            damaged = bytearray(SMALL)
            damaged[place] ^= flip
            with pytest.raises(WireError):
                unpack(bytes(damaged))


def test_any_truncation_and_any_surplus_is_refused() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(WireError):
            unpack(SMALL[:length])
    with pytest.raises(
        WireError, match=f"expected a message of {len(SMALL)} bytes as its header says, got {len(SMALL) + 1}"
    ):
        unpack(SMALL + b"\0")


def sealed(header: bytes, body: bytes = b"") -> bytes:
    """A message with this header and the right checksum, so that nothing but the header can be wrong with it."""
    start = struct.pack("<Q", len(header)) + header + body
    return start + xxhash.xxh3_64_intdigest(start).to_bytes(8, "little")


def tensor(dtype: Any, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def header_of(metadata: Any, **tensors: Any) -> bytes:
    return json.dumps({"__metadata__": metadata, **tensors}).encode()


CHECK0 = tensor("U64", [], 0, 8)
CHECK4 = tensor("U64", [], 4, 12)
HUGE = 2**63
HOSTILE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2^64 - 1": b"\xff" * 64,
    "header above the limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * (MAX_HEADER_BYTES + 100),
    "header longer than the message": struct.pack("<Q", 100) + b"{}",
    "no JSON": sealed(b"hello"),
    "not UTF-8": sealed(b'{"\xff\xfe": 1}'),
    "a list": sealed(b"[]"),
    "a number": sealed(b"3"),
    "null": sealed(b"null"),
    "nothing": sealed(b"{}"),
    "100,000 brackets": sealed(b"[" * 100_000),
    "100,000 braces": sealed(b'{"a":' * 100_000),
    "deep metadata": sealed(b'{"__metadata__":' + b"[" * 100_000),
    "a number of 100,000 digits": sealed(b'{"__metadata__":{},"a":' + b"9" * 100_000 + b"}"),
    "no metadata": sealed(json.dumps({"check": CHECK0}).encode()),
    "metadata of numbers": sealed(header_of({"seq": 1}, check=CHECK0)),
    "metadata that is a list": sealed(header_of([], check=CHECK0)),
    "metadata that is text": sealed(header_of("x", check=CHECK0)),
    "no check": sealed(header_of({}, a=tensor("U8", [8], 0, 8))),
    "check not at the end": sealed(header_of({}, check=CHECK0, a=tensor("U8", [4], 8, 12)), b"1234"),
    "check of another kind": sealed(header_of({}, check=tensor("I64", [], 0, 8))),
    "check of another shape": sealed(header_of({}, check=tensor("U64", [1], 0, 8))),
    "unknown dtype": sealed(header_of({}, a=tensor("F8_E4M3", [4], 0, 4), check=CHECK4), b"1234"),
    "dtype that is a list": sealed(header_of({}, a=tensor(["U8"], [4], 0, 4), check=CHECK4), b"1234"),
    "wrong dtype": sealed(header_of({}, a=tensor("F64", [4], 0, 4), check=CHECK4), b"1234"),
    "negative shape": sealed(header_of({}, a=tensor("U8", [-4], 0, 4), check=CHECK4), b"1234"),
    "two negatives": sealed(header_of({}, a=tensor("U8", [-2, -2], 0, 4), check=CHECK4), b"1234"),
    "negative offset": sealed(header_of({}, a=tensor("U8", [4], -4, 0), check=CHECK0)),
    "float shape": sealed(header_of({}, a=tensor("U8", [4.0], 0, 4), check=CHECK4), b"1234"),
    "float offset": sealed(header_of({}, a=tensor("U8", [4], 0.0, 4), check=CHECK4), b"1234"),
    "bool shape": sealed(header_of({}, a=tensor("U8", [True], 0, 1), check=tensor("U64", [], 1, 9)), b"1"),
    "bool offset": sealed(header_of({}, a=tensor("U8", [4], False, 4), check=CHECK4), b"1234"),
    "text shape": sealed(header_of({}, a=tensor("U8", "4", 0, 4), check=CHECK4), b"1234"),
    "shape that is a number": sealed(header_of({}, a=tensor("U8", 4, 0, 4), check=CHECK4), b"1234"),
    "huge shape": sealed(header_of({}, a=tensor("U8", [HUGE], 0, HUGE), check=tensor("U64", [], HUGE, HUGE + 8))),
    "shape that overflows to 0": sealed(header_of({}, a=tensor("U8", [2**32, 2**32], 0, 0), check=CHECK0)),
    "nothing of a huge shape": sealed(header_of({}, a=tensor("U8", [0, 2**40, 2**40], 0, 0), check=CHECK0)),
    "nothing of a huge shape, bfloat16": sealed(header_of({}, a=tensor("BF16", [0, 2**47, 2**47], 0, 0), check=CHECK0)),
    "40 dimensions": sealed(header_of({}, a=tensor("U8", [1] * 40, 0, 1), check=tensor("U64", [], 1, 9)), b"1"),
    "100,000 dimensions": sealed(header_of({}, a=tensor("U8", [1] * 100_000, 0, 1), check=CHECK4), b"1234"),
    "overlap": sealed(header_of({}, a=tensor("U8", [4], 0, 4), b=tensor("U8", [4], 2, 6), check=CHECK4), b"1234"),
    "all at one place": sealed(header_of({}, a=tensor("U8", [4], 0, 4), b=tensor("U8", [4], 0, 4), check=CHECK4), b"1"),
    "hole": sealed(header_of({}, a=tensor("U8", [4], 4, 8), check=tensor("U64", [], 8, 16)), b"12345678"),
    "three offsets": sealed(header_of({}, a={"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}, check=CHECK4)),
    "no offsets": sealed(header_of({}, a={"dtype": "U8", "shape": [4]}, check=CHECK4)),
    "an entry that is null": sealed(header_of({}, a=None, check=CHECK0)),
    "an entry that is a list": sealed(header_of({}, a=[1, 2], check=CHECK0)),
    "body too short": sealed(header_of({}, a=tensor("U8", [400], 0, 400), check=tensor("U64", [], 400, 408))),
    "a flag of 2": sealed(header_of({}, a=tensor("BOOL", [4], 0, 4), check=CHECK4), b"\0\1\2\0"),
    "infinite sizes": sealed(b'{"__metadata__":{},"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,NaN]}}'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_wire_errors_and_nothing_else(kind: str) -> None:
    with pytest.raises(WireError) as caught:
        unpack(HOSTILE[kind])
    assert len(str(caught.value)) < 400


@given(st.binary(max_size=200))
def test_random_bytes_are_wire_errors_and_nothing_else(data: bytes) -> None:
    for message in (data, struct.pack("<Q", len(data)) + data, sealed(data)):
        with pytest.raises(WireError):
            unpack(message)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["U8", "F32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
entries = json_values | st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values})


@given(json_values, st.dictionaries(st.sampled_from(["a", "b", "check", ""]), entries, max_size=3))
def test_random_json_is_a_wire_error_and_nothing_else(metadata: Any, tensors: dict[str, Any]) -> None:
    message = sealed(json.dumps({"__metadata__": metadata, **tensors, "check": CHECK4}).encode(), b"1234")
    try:
        _, found = unpack(message)
    except WireError:
        return
    assert sum(array.nbytes for array in found.values()) == 4


# ---- pieces


def message_with_body(num_bytes: int) -> tuple[list[Any], dict[str, Array]]:
    """A message whose body, the checksum counted, has this many bytes."""
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes - 8, np.uint8)
    arrays = {"a": data[: len(data) // 3], "b": data[len(data) // 3 :]}
    return pack({"n": str(num_bytes)}, arrays), arrays


AROUND = [8, 9, 100, *(k * PIECE_BYTES + d for k in (1, 2) for d in (-9, -8, -7, -1, 0, 1, 3, 7, 8, 9))]


@pytest.mark.parametrize("num_bytes", AROUND)
def test_pieces_are_put_together_again(num_bytes: int) -> None:
    buffers, arrays = message_with_body(num_bytes)
    first, *rest = pieces(buffers)
    assert len(first) + num_bytes == size_of(buffers)
    assert all(len(piece) == PIECE_BYTES for piece in rest[:-1])
    assert 0 < len(rest[-1]) <= PIECE_BYTES
    assembly = Assembly(first, max_bytes=num_bytes)
    for piece in rest:
        assert not assembly.complete
        assembly.add(piece)
    assert assembly.complete
    metadata, found = receive(iter([first, *rest]), max_bytes=num_bytes)
    assert metadata == {"n": str(num_bytes)}
    assert_same(found, arrays)
    scattered = {name: np.zeros_like(array) for name, array in found.items()}
    assembly.scatter(list(scattered.values()))
    assert_same(scattered, arrays)
    assert b"".join(assembly.pieces()) == b"".join(buffers)


@pytest.mark.parametrize("num_bytes", [100, PIECE_BYTES + 3, PIECE_BYTES + 8, 2 * PIECE_BYTES])
def test_a_flipped_byte_in_any_piece_is_refused(num_bytes: int) -> None:
    first, *rest = pieces(message_with_body(num_bytes)[0])
    for number, piece in enumerate(rest):
        for place in (0, len(piece) // 2, len(piece) - 1):
            damaged = bytearray(piece)
            damaged[place] ^= 1
            assembly = Assembly(first, max_bytes=num_bytes)
            for other in [*rest[:number], bytes(damaged), *rest[number + 1 :]]:
                assembly.add(other)
            with pytest.raises(WireError, match="checksum of a message is wrong"):
                assembly.pieces()
            with pytest.raises(WireError, match="checksum of a message is wrong"):
                receive(iter([first, *rest[:number], bytes(damaged), *rest[number + 1 :]]), max_bytes=num_bytes)


def test_pieces_of_the_wrong_size_are_refused() -> None:
    first, *rest = pieces(message_with_body(PIECE_BYTES + 100)[0])
    assembly = Assembly(first, max_bytes=2**30)
    for wrong in (b"", rest[0][:-1], rest[0] + b"x", rest[1]):
        with pytest.raises(WireError, match=f"expected a piece of {PIECE_BYTES} bytes, got {len(wrong)}"):
            assembly.add(wrong)
    assembly.add(rest[0])
    with pytest.raises(WireError, match=f"expected a piece of 100 bytes, got {PIECE_BYTES}"):
        assembly.add(rest[0])
    assembly.add(rest[1])
    with pytest.raises(WireError, match="expected a piece of 0 bytes, got 1"):
        assembly.add(b"x")
    assert len(assembly.pieces()) == 3
    with pytest.raises(WireError, match="expected a piece of"):
        receive(iter([first, rest[0][:-1]]), max_bytes=2**30)


def test_the_first_piece_is_the_header_alone_and_says_no_more_than_is_allowed() -> None:
    first, second = pieces(message_with_body(100)[0])
    with pytest.raises(WireError, match="expected the header alone in the first piece of a message"):
        Assembly(first + second, max_bytes=1000)
    with pytest.raises(WireError, match="expected a message of at most 99 bytes, got 100; send less"):
        receive(iter([first, second]), max_bytes=99)
    with pytest.raises(WireError, match="expected a message of at most 99 bytes, got 100; send less"):
        Assembly(first, max_bytes=99)
    with pytest.raises(WireError, match=f"expected a whole header of at most .*announced in {len(first) - 1}$"):
        Assembly(first[:-1], max_bytes=1000)


# ---- bfloat16

GOLDEN = [
    (1.0, 0x3F80),
    (-1.0, 0xBF80),
    (3.14159274, 0x4049),
    (0.0, 0x0000),
    (-0.0, 0x8000),
    (float("inf"), 0x7F80),
    (float("-inf"), 0xFF80),
    (1.0 + 2**-8, 0x3F80),  # half way between two: to the even one, which is below
    (1.0 + 3 * 2**-8, 0x3F82),  # and here above
    (1.0 + 2**-8 + 2**-20, 0x3F81),  # more than half way
    (3.4028235e38, 0x7F80),  # the largest float32 is nearer to infinity than to the largest bfloat16
    (1e-45, 0x0000),  # the smallest
    (9.2e-41, 0x0001),  # the smallest that bfloat16 has
]


@pytest.mark.parametrize(("number", "bits"), GOLDEN, ids=str)
def test_bfloat16_of_known_numbers(number: float, bits: int) -> None:
    (found,) = to_bfloat16(np.array([number], np.float32))
    assert hex(found) == hex(bits)
    back = from_bfloat16(np.array([bits], np.uint16))
    assert back.dtype == np.float32
    assert to_bfloat16(back)[0] == bits


def test_a_nan_stays_one_whatever_its_bits() -> None:
    bits = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FFFFFFF], np.uint32)
    assert np.isnan(from_bfloat16(to_bfloat16(bits.view(np.float32)))).all()


def test_every_bfloat16_comes_back() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    numbers = from_bfloat16(halves)
    again = to_bfloat16(numbers)
    assert (again == halves)[~np.isnan(numbers)].all()
    assert np.isnan(from_bfloat16(again))[np.isnan(numbers)].all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_keeps_the_shape_on_its_way(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    halves = to_bfloat16(numbers)
    assert halves.shape == shape
    _, found = unpack(b"".join(pack({}, {"w": halves}, bfloat16=frozenset({"w"}))))
    assert (found["w"].dtype, found["w"].shape) == (np.float32, shape)
    np.testing.assert_allclose(found["w"], numbers, rtol=2**-8)


# ---- JSON from strangers


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 65 + "1" + "}" * 65, "[" * 65 + "]" * 65, '["\\"",' + "[" * 65, '["\\\\",' + "[" * 65],
)
def test_json_that_is_too_deep_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match="more than 64 levels of JSON"):
        parse_json(text)


@pytest.mark.parametrize(
    "value", [[[1]] * 500, {"a": {"b": ["[" * 1000, '"[{\\', "\\" * 99]}}, "[" * 200, [["\\"] * 3, "{" * 100, '"' * 70]]
)
def test_json_that_only_looks_deep_is_taken(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
