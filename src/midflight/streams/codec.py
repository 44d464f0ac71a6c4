"""Records as bytes: msgpack, with every array as its dtype, its shape and raw little-endian bytes.

A message is `[schema version, record type, CRC-32 of the record, record]`. The first three fields are checked before
the record is decoded: a foreign or damaged message is an error, never a wrong record. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import zlib
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from midflight.errors import StreamError

Record = TypeVar("Record")

SCHEMA_VERSION = 6  # increment with every change to the records in `types` that older code would misread

_DTYPE_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {dtype.str: dtype for dtype in (np.dtype(name).newbyteorder("<") for name in _DTYPE_NAMES.split())}

_Envelope = tuple[int, str, int, msgspec.Raw]
_Array = tuple[str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...], bytes]  # dtype, shape, data


class Codec(Generic[Record]):
    """Encoder and decoder of one record type: any dataclass whose arrays are annotated `npt.NDArray[...]`.

    Invariants: `decode(encode(record))` equals `record`, bit for bit; decoded arrays are read-only.
    """

    def __init__(self, record_type: type[Record]) -> None:
        self._type_name = record_type.__name__
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
        self._record_decoder = msgspec.msgpack.Decoder(record_type, dec_hook=_array)

    def encode(self, record: Record) -> bytes:
        """Return the message for a record.

        Raises: StreamError if a value in the record cannot be encoded.
        """
        try:
            body = self._encoder.encode(record)
            return self._encoder.encode((SCHEMA_VERSION, self._type_name, zlib.crc32(body), msgspec.Raw(body)))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StreamError(f"cannot write this {self._type_name}: {error}") from error

    def decode(self, message: bytes) -> Record:
        """Return the record in a message.

        Raises: StreamError if the message is damaged, holds another type, or was written with another schema.
        """
        try:
            schema, type_name, crc, body = self._envelope_decoder.decode(message)
            check_schema(schema)
            if type_name != self._type_name:
                raise StreamError(f"expected a {self._type_name}, found {type_name!r}")
            if zlib.crc32(body) != crc:
                raise StreamError(f"damaged {self._type_name}: its checksum does not match")
            return self._record_decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise StreamError(f"not a readable {self._type_name}: {error}") from error


def check_schema(schema: int, prefix: str = "") -> None:
    """Check that this version of midflight reads the schema.

    Raises: StreamError, beginning with `prefix`, if it does not.
    """
    if schema != SCHEMA_VERSION:
        writer = "a newer" if schema > SCHEMA_VERSION else "an older"
        raise StreamError(
            f"{prefix}written with schema {schema} by {writer} midflight; this one reads schema {SCHEMA_VERSION}"
        )


def _plain(value: object) -> object:
    """Convert an array or a NumPy scalar to a value that msgpack can encode."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        if dtype.str not in _DTYPES:
            raise StreamError(f"arrays of dtype {value.dtype} cannot be written")
        return dtype.str, value.shape, value.astype(dtype, copy=False).tobytes()
    if isinstance(value, np.number | np.bool_):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written")


def _array(array_type: Any, value: Any) -> npt.NDArray[Any]:
    """Rebuild the array that `_plain` encoded, read-only.

    Raises: ValueError if `value` is not such an array; msgspec adds the path in the record.
    """
    dtype_name, shape, data = msgspec.convert(value, _Array)
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise ValueError(f"unknown dtype {dtype_name!r}")
    expected = _expected_dtype(array_type)
    if expected not in (None, dtype):
        raise ValueError(f"expected an array of {expected}, found {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


@functools.cache
def _expected_dtype(array_type: Any) -> np.dtype[Any] | None:
    """Return the dtype that `npt.NDArray[...]` names, or None if the annotation allows any dtype."""
    args = get_args(array_type)
    scalar_type = get_args(args[1])[0] if args else Any
    return None if scalar_type is Any else np.dtype(scalar_type).newbyteorder("<")
