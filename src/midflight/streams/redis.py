"""A stream in Redis: for processes that share no file system. Tested with all processes on one machine.

    writer                                                        reader
    append   consumes: records                                    read   consumes: records in Redis
             waits for: room, the list NAME:room                         waits for: a record, the log itself
             unblocked by: read, trim                                    unblocked by: append

    {NAME}:log    a Redis Stream; the entry with id K-0 is the record at offset K - 1
    {NAME}:meta   a hash: record type, next offset, read position; for each writer, the result of its last call
    {NAME}:room   a list with one element after space became free

Every change is one script, so a killed client leaves the stream as it was before or after the change. A lost connection
is opened again: Redis may be restarted, or be unreachable for a while. The settings of Redis decide which data survives
a restart (`appendonly yes`). A stream that Redis has lost is an error.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from midflight.concurrency.wake_up import deadline_after
from midflight.errors import MissingExtraError, StreamError
from midflight.streams.codec import SCHEMA_VERSION, Codec, check_schema

Record = TypeVar("Record")
Result = TypeVar("Result")

# The place for a password: recipes and run directories must not hold one.
URL_VARIABLE = "MIDFLIGHT_REDIS_URL"

# Longest wait of one blocking call; bounds the delay after a lost connection or a lost wake-up.
_BLOCK_S = 1.0
_RETRY_S = 0.1

_CALL_BYTES = 1 << 20  # approximate size of the messages in one call; Redis serves no other client during a call

# The start of every script but _OPEN. ARGV[1] is the identity of the stream when this client opened it.
_PREAMBLE = """
local meta, log, room = KEYS[1], KEYS[2], KEYS[3]
local identity, next, read = unpack(redis.call('HMGET', meta, 'identity', 'next', 'read'))
if identity ~= ARGV[1] then return {'gone'} end
next, read = tonumber(next), tonumber(read)
local function move_read_position(offset)
    if offset > read then
        redis.call('HSET', meta, 'read', offset)
        redis.call('DEL', room)
        redis.call('LPUSH', room, 1)
    end
end
"""
_OPEN = """
local meta = KEYS[1]
if redis.call('EXISTS', meta) == 0 then
    redis.call('HSET', meta, 'identity', ARGV[1], 'record_type', ARGV[2], 'schema', ARGV[3], 'next', 0, 'read', 0)
end
return redis.call('HMGET', meta, 'identity', 'record_type', 'schema')
"""
# The messages are ARGV[5] and later. If the answer is lost, the client repeats the call with the same number. The
# result of each writer's last call is stored with its number, so that a repeated call appends nothing.
_APPEND = (
    _PREAMBLE
    + """
local capacity, writer, call = tonumber(ARGV[2]), ARGV[3], ARGV[4]
local last_call, start, stop = string.match(redis.call('HGET', meta, writer) or '', '(%d+) (%d+) (%d+)')
if last_call == call then return {tonumber(start), tonumber(stop)} end
stop = math.max(next, math.min(next + #ARGV - 4, read + capacity))
for offset = next, stop - 1 do
    redis.call('XADD', log, string.format('%d-0', offset + 1), 'm', ARGV[offset - next + 5])
end
if stop > next then
    redis.call('HSET', meta, 'next', stop, writer, string.format('%s %d %d', call, next, stop))
end
return {next, stop}
"""
)
_READ = (
    _PREAMBLE
    + """
local from = tonumber(ARGV[2])
if from > next then return {next} end
move_read_position(from)
return {next, redis.call('XRANGE', log, string.format('%d-0', from + 1), '+', 'COUNT', ARGV[3])}
"""
)
_TRIM = (
    _PREAMBLE
    + """
local before = math.max(0, math.min(tonumber(ARGV[2]), next))
redis.call('XTRIM', log, 'MINID', string.format('%d-0', before + 1))
move_read_position(before)
return {0}
"""
)
_SKIP = (
    _PREAMBLE
    + """
redis.call('DEL', log)
redis.call('HSET', meta, 'next', ARGV[2], 'read', ARGV[2])
redis.call('DEL', room)
redis.call('LPUSH', room, 1)
return {0}
"""
)
_NEXT_OFFSET = _PREAMBLE + "return {next}"


class RedisStream(Generic[Record]):
    """The stream called `name`, created if it does not exist. Every client uses the same URL and name.

    Invariants: an offset that `append` returned is readable until it is trimmed, as long as Redis keeps its data.
    Raises: StreamError if the stream holds other records or was written with another schema, or if Redis asks for a
    password, cannot be reached for `patience_s`, or has lost the stream; MissingExtraError without the package redis.
    Not: shared between threads; each thread opens its own.
    """

    def __init__(
        self, url: str | None, name: str, record_type: type[Record], capacity: int, patience_s: float = 60.0
    ) -> None:
        """Connect to Redis and open the stream. `url`: default $MIDFLIGHT_REDIS_URL, or a Redis on this machine."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        url = url or os.environ.get(URL_VARIABLE) or "redis://127.0.0.1:6379/0"
        try:
            import redis
        except ImportError as error:
            raise MissingExtraError("redis", "redis") from error
        self._redis = redis
        # Without the password of the URL: this text is part of error messages.
        self._where = f"{name} in Redis at {urlsplit(url).hostname}:{urlsplit(url).port or 6379}"
        self.capacity, self._patience_s = capacity, patience_s
        self._codec = Codec(record_type)
        self._closed = False
        try:
            self._client = self._retried(lambda: _connect(redis, url))
        except ValueError as error:
            raise StreamError(f"not a Redis URL: {error}; use redis://HOST:PORT/NUMBER") from error
        self._keys = [f"{{{name}}}:{part}" for part in ("meta", "log", "room")]
        self._scripts = {
            script: self._client.register_script(script)
            for script in (_OPEN, _APPEND, _READ, _TRIM, _SKIP, _NEXT_OFFSET)
        }
        self._writer, self._num_calls = f"writer:{uuid.uuid4().hex}", 0
        self._identity = self._open(record_type.__name__)

    def append(self, record: Record, timeout_s: float | None = None) -> int | None:
        offsets = self.append_many([record], timeout_s)
        return offsets[0] if offsets else None

    def append_many(self, records: Sequence[Record], timeout_s: float | None = None) -> list[int]:
        messages = [self._codec.encode(record) for record in records]
        deadline_s = deadline_after(timeout_s)
        offsets: list[int] = []
        while len(offsets) < len(messages):
            if new := self._insert(_one_call(messages, len(offsets))):
                offsets += new
            elif not self._wait(deadline_s, self._wait_for_room):
                break
        return offsets

    def read(self, from_offset: int, max_records: int = 1, timeout_s: float | None = None) -> list[Record]:
        deadline_s = deadline_after(timeout_s)
        while not (rows := self._select(from_offset, max_records)):
            if not self._wait(deadline_s, lambda seconds: self._wait_for_record(from_offset, seconds)):
                return []
        return [self._decode(offset, message) for offset, message in rows]

    def trim(self, before_offset: int) -> None:
        self._run(_TRIM, before_offset)

    def skip_to(self, offset: int) -> None:
        self._run(_SKIP, offset)

    def next_offset(self) -> int:
        return int(self._run(_NEXT_OFFSET)[0])

    def remove(self) -> None:
        """Delete the stream from Redis, for every client."""
        self._retried(lambda: self._client.delete(*self._keys))

    def close(self) -> None:
        self._closed = True  # without it, the next call would connect again
        self._client.close()

    def _open(self, record_type: str) -> str:
        arguments: list[bytes | str | int] = [uuid.uuid4().hex, record_type, SCHEMA_VERSION]
        answer = self._retried(lambda: self._scripts[_OPEN](keys=self._keys, args=arguments))
        identity, stored_type, schema = (value.decode() for value in answer)
        check_schema(int(schema), f"{self._where} was ")
        if stored_type != record_type:
            raise StreamError(f"{self._where} is a stream of {stored_type}, not of {record_type}")
        return str(identity)

    def _insert(self, messages: Sequence[bytes]) -> range:
        """Append as many messages as there is room for; return their offsets."""
        self._num_calls += 1
        return range(*self._run(_APPEND, self.capacity, self._writer, self._num_calls, *messages))

    def _select(self, from_offset: int, max_records: int) -> list[tuple[int, bytes]]:
        end, *entries = self._run(_READ, from_offset, max_records)
        if not entries:
            raise StreamError(f"{self._where}: offset {from_offset} is past the end of the stream, {end}")
        rows = [(int(entry.partition(b"-")[0]) - 1, fields[1]) for entry, fields in entries[0]]
        start = rows[0][0] if rows else end
        if from_offset < start:
            raise StreamError(f"{self._where}: offset {from_offset} was trimmed; the stream starts at {start}")
        return rows

    def _wait(self, deadline_s: float, block: Callable[[float], object]) -> bool:
        """Call `block(seconds)`, which waits for up to _BLOCK_S; return False once the deadline has passed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        # At least 1 ms: Redis takes 0 to mean no timeout.
        self._retried(lambda: block(max(0.001, min(left_s, _BLOCK_S))))
        return True

    def _wait_for_room(self, seconds: float) -> object:
        return self._client.blpop([self._keys[2]], timeout=seconds)

    def _wait_for_record(self, offset: int, seconds: float) -> object:
        return self._client.xread({self._keys[1]: f"{offset}-0"}, count=1, block=max(1, int(1000 * seconds)))

    def _run(self, script: str, *arguments: bytes | str | int) -> list[Any]:
        answer: list[Any] = self._retried(
            lambda: self._scripts[script](keys=self._keys, args=[self._identity, *arguments])
        )
        if answer[0] == b"gone":
            raise StreamError(f"{self._where} is gone; Redis keeps it over a restart with `appendonly yes`")
        return answer

    def _retried(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`, repeated until Redis can be reached. Raises: StreamError."""
        if self._closed:
            raise StreamError(f"{self._where} is closed")
        errors = self._redis.exceptions
        give_up_s = time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except errors.AuthenticationError as error:
                raise StreamError(
                    f"{self._where} asks for a password, or another one: redis://:PASSWORD@..."
                ) from error
            except (errors.ConnectionError, errors.TimeoutError) as error:
                if time.monotonic() >= give_up_s:
                    raise StreamError(f"{self._where} cannot be reached: {error}") from error
                time.sleep(_RETRY_S)
            except errors.RedisError as error:
                if "NOAUTH" in str(error):
                    raise StreamError(f"{self._where} asks for a password: redis://:PASSWORD@...") from error
                raise StreamError(f"{self._where}: {error}") from error

    def _decode(self, offset: int, message: bytes) -> Record:
        try:
            return self._codec.decode(message)
        except StreamError as error:
            raise StreamError(f"{self._where}: record {offset}: {error}") from error


def _connect(redis: Any, url: str) -> Any:
    """Return a client with a single connection: a connection pool would add a check to every command."""
    timeouts = {"socket_timeout": 10 * _BLOCK_S, "socket_connect_timeout": _BLOCK_S}
    return redis.Redis.from_url(url, single_connection_client=True, **timeouts)


def _one_call(messages: Sequence[bytes], start: int) -> Sequence[bytes]:
    """Return the messages from `start` on that fit into one call: at least one, at most _CALL_BYTES together."""
    stop, num_bytes = start + 1, len(messages[start])
    while stop < len(messages) and num_bytes + len(messages[stop]) <= _CALL_BYTES:
        num_bytes += len(messages[stop])
        stop += 1
    return messages[start:stop]
