"""The codec: records come back bit for bit, and any other input is one clear error."""

from __future__ import annotations

import dataclasses
import pickle
import types
import typing
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from midflight.errors import StreamError
from midflight.streams.codec import SCHEMA_VERSION, Codec
from midflight.types import Completion, Grade, Problem, RolloutGroup, RolloutId, TrainingBatch, Trajectory
from soak import SOAK


@dataclass(frozen=True)
class AnyArray:
    array: npt.NDArray[Any]


DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ">i4", ">f8"]
TRAJECTORY = Trajectory(
    RolloutId(7),
    token_ids=np.arange(5, dtype=np.int32),
    loss_mask=np.array([0, 0, 1, 1, 1], bool),
    behavior_logprobs=np.linspace(-3, 0, 5, dtype=np.float32),
    weight_versions=np.full(5, 3, np.int32),
    advantages=np.array([0, 0, 1, np.inf, np.nan], np.float32),
    reward=0.5,
    first_version=3,
)


def same(left: object, right: object) -> bool:
    """Return True if both values are equal bit for bit, including their arrays."""
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        shape = left.shape == right.shape and left.dtype.newbyteorder("<") == right.dtype
        return shape and left.astype(right.dtype).tobytes() == right.tobytes()
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def forged(type_name: str, record: object, schema: int = SCHEMA_VERSION) -> bytes:
    """Message with a valid checksum, as another program might have written it."""
    body = msgspec.msgpack.encode(record)
    return msgspec.msgpack.encode((schema, type_name, zlib.crc32(body), msgspec.Raw(body)))


MESSAGE = Codec(Trajectory).encode(TRAJECTORY)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=9),
    type(None): st.none(),
}

# Columns of a dataset's row: scalars, lists and objects.
SCALARS[Any] = st.recursive(
    st.one_of(*SCALARS.values(), st.binary(max_size=9)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def forged_array(dtype: object, shape: object, data: object) -> bytes:
    return forged("AnyArray", {"array": (dtype, shape, data)})


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Strategy for the values of a field with this annotation."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.NewType):
        return values(annotation.__supertype__)
    if origin is np.ndarray:
        (scalar_type,) = typing.get_args(args[1])
        return hnp.arrays(scalar_type, st.integers(0, 5))
    if origin is list:
        return st.lists(values(args[0]), max_size=2)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple) if args[1:] == (...,) else st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is types.UnionType:
        return st.one_of([values(option) for option in args])
    if dataclasses.is_dataclass(annotation):
        assert isinstance(annotation, type)
        fields = typing.get_type_hints(annotation)
        return st.deferred(lambda: st.builds(annotation, **{name: values(hint) for name, hint in fields.items()}))
    return SCALARS[annotation] if annotation in SCALARS else st.sampled_from(list(annotation))


@given(hnp.arrays(st.sampled_from(DTYPES).map(np.dtype), hnp.array_shapes(min_dims=0, min_side=0)))
def test_every_array_comes_back_bit_for_bit(array: npt.NDArray[Any]) -> None:
    codec = Codec(AnyArray)
    for view in (array, array.T, array[..., ::2] if array.ndim else array):
        decoded = codec.decode(codec.encode(AnyArray(view)))
        assert same(AnyArray(view), decoded)
        assert not decoded.array.flags.writeable


@pytest.mark.parametrize("record_type", [TrainingBatch, RolloutGroup, Trajectory, Completion, Problem])
@settings(max_examples=40 * SOAK, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_record_comes_back_the_same(record_type: type, data: st.DataObject) -> None:
    record = data.draw(values(record_type))
    codec: Codec[Any] = Codec(record_type)
    assert same(record, codec.decode(codec.encode(record)))


def test_numpy_scalars_come_back_as_python_numbers() -> None:
    codec = Codec(Grade)
    grade = Grade(reward=np.float64(0.5), components={"length": typing.cast(float, np.float32(-0.25))})
    assert same(codec.decode(codec.encode(grade)), Grade(0.5, {"length": -0.25}))


def test_arrays_are_stored_little_endian() -> None:
    message = Codec(AnyArray).encode(AnyArray(np.array([1, 2], ">i4")))
    assert b"\x01\0\0\0\x02\0\0\0" in message
    assert b"<i4" in message


@pytest.mark.parametrize("value", [[object()], ["text"], [b"bytes"], np.array(["2026-01-01"], "M8[D]"), [1j]])
def test_non_numeric_arrays_are_refused(value: Any) -> None:
    array = np.array(value, object) if value[0].__class__ is object else np.array(value)
    with pytest.raises(StreamError, match=r"arrays of dtype .* cannot be written"):
        Codec(AnyArray).encode(AnyArray(array))


def test_values_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(StreamError, match="cannot write this Problem: a object cannot be written"):
        Codec(Problem).encode(Problem("id", "prompt", typing.cast(str, object())))
    with pytest.raises(StreamError, match="cannot write this Grade"):
        Codec(Grade).encode(Grade(2**70))


@given(st.integers(0, len(MESSAGE) - 1))
def test_a_message_cut_anywhere_is_an_error(length: int) -> None:
    with pytest.raises(StreamError, match="not a readable Trajectory"):
        Codec(Trajectory).decode(MESSAGE[:length])


@settings(max_examples=300 * SOAK)
@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 255))
def test_a_changed_byte_is_an_error_or_makes_no_difference(position: int, change: int) -> None:
    damaged = bytearray(MESSAGE)
    damaged[position] ^= change
    with suppress(StreamError):
        decoded = Codec(Trajectory).decode(bytes(damaged))
        assert same(TRAJECTORY, decoded)  # msgpack can write one number in several ways


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error(message: bytes) -> None:
    with pytest.raises(StreamError) as caught:
        Codec(Trajectory).decode(message)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_an_error_and_is_not_run() -> None:
    with pytest.raises(StreamError, match="not a readable Trajectory"):
        Codec(Trajectory).decode(pickle.dumps(print))


def test_a_newer_schema_is_reported_before_decoding() -> None:
    message = forged("Trajectory", {"thought": "of later"}, schema=SCHEMA_VERSION + 1)
    with pytest.raises(StreamError, match=f"written with schema {SCHEMA_VERSION + 1} by a newer midflight"):
        Codec(Trajectory).decode(message)


def test_an_older_schema_is_reported() -> None:
    with pytest.raises(StreamError, match="schema 0 by an older midflight"):
        Codec(Trajectory).decode(forged("Trajectory", {}, schema=0))


def test_another_record_type_is_reported() -> None:
    with pytest.raises(StreamError, match="expected a Problem, found 'Trajectory'"):
        Codec(Problem).decode(MESSAGE)


@pytest.mark.parametrize("dtype", ["|O", "<U4", "<M8[s]", "|V8", "no dtype", ">i4"])
def test_an_unknown_dtype_is_an_error(dtype: str) -> None:
    with pytest.raises(StreamError, match=r"unknown dtype .*array"):
        Codec(AnyArray).decode(forged_array(dtype, [1], b"\0" * 8))


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([3], b"\0" * 8),
        ([-1], b"\0" * 8),
        ([2**62, 4], b""),
        ([1] * 100, b"\0" * 4),
        ([], b"\0" * 8),
        (["2"], b"\0" * 8),
        ([2], "text"),
        (2, b"\0" * 8),
    ],
)
def test_a_shape_that_does_not_fit_the_data_is_an_error(shape: object, data: object) -> None:
    with pytest.raises(StreamError, match="not a readable AnyArray"):
        Codec(AnyArray).decode(forged_array("<i4", shape, data))


def test_a_dtype_other_than_annotated_is_an_error() -> None:
    token_ids: Any = np.arange(5, dtype=np.int64)
    wrong = dataclasses.replace(TRAJECTORY, token_ids=token_ids)
    codec = Codec(Trajectory)
    with pytest.raises(StreamError, match=r"expected an array of int32, found int64 - at .*token_ids"):
        codec.decode(codec.encode(wrong))
