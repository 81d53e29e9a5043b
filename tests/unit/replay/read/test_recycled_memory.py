"""Memory that is used again: only when nobody has it, as numpy's own else, and not without limit."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from understudy.replay.read import recycled_memory
from understudy.replay.read.recycled_memory import MIN_BYTES, MemoryPool, empty_array

SHAPE = (4, MIN_BYTES)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_when_nobody_has_it() -> None:
    pool = MemoryPool()
    first = pool.empty(SHAPE, np.uint8)
    was = address(first)
    assert pool.num_free_bytes == 0
    del first
    assert pool.num_free_bytes == 4 * MIN_BYTES
    assert address(pool.empty((MIN_BYTES,), np.float32)) == was  # the same size in bytes
    assert pool.num_free_bytes == 4 * MIN_BYTES


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[1:2, 5:],
        lambda array: array.T.view(np.int8),
        lambda array: torch.from_numpy(array)[2],
        lambda array: memoryview(array),
        lambda array: [{"in": (array,)}],
    ],
)
def test_what_is_still_held_is_not_used_again(keep: Any) -> None:
    pool = MemoryPool()
    array = pool.empty(SHAPE, np.uint8)
    array[...] = 7
    was, kept = address(array), keep(array)
    del array
    others = [pool.empty(SHAPE, np.uint8) for _ in range(2)]
    for other in others:
        other[...] = 0
    assert was not in [address(other) for other in others]
    del others, other, kept
    gc.collect()
    assert pool.num_free_bytes == 3 * 4 * MIN_BYTES


@pytest.mark.parametrize("dtype", ["uint8", "bool", "float16", "float32", "int64", ">i2"])
def test_an_array_is_as_that_of_numpy(dtype: str) -> None:
    shape = (3, MIN_BYTES, 2)
    array, plain = MemoryPool().empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (plain.shape, plain.dtype, plain.strides)
    assert array[1:].base is array
    assert array.flags["C_CONTIGUOUS"]
    assert array.flags["WRITEABLE"]
    array[...] = 1
    assert array.sum(dtype=np.int64) == array.size


def test_small_arrays_and_objects_are_numpys() -> None:
    assert empty_array((MIN_BYTES - 1,), np.uint8).base is None
    assert empty_array((), np.float32).shape == ()
    assert empty_array((0, 5), np.float32).shape == (0, 5)
    assert empty_array((MIN_BYTES,), object).base is None


def test_little_is_kept() -> None:
    pool = MemoryPool(max_free_bytes=3 * MIN_BYTES)
    arrays = [pool.empty((MIN_BYTES,), np.uint8) for _ in range(9)]
    newest = address(arrays[-1])
    while arrays:
        del arrays[0]
    assert pool.num_free_bytes == 3 * MIN_BYTES
    assert address(pool.empty((MIN_BYTES,), np.uint8)) == newest
    large = pool.empty(SHAPE, np.uint8)
    del large
    assert pool.num_free_bytes <= 3 * MIN_BYTES


def test_no_two_threads_get_the_same() -> None:
    pool = MemoryPool()
    problems: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            array = pool.empty((MIN_BYTES,), np.uint8)
            array[:100] = number
            if (array[:100] != number).any():
                problems.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent() -> None:
    pool = recycled_memory._POOL
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        empty_array(SHAPE, np.uint8)
        os._exit(0)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
