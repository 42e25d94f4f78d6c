"""A directory in Redis, for boxes and gateways on many machines."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from typing import Any

from seko_serve.fleet.directory import (
    KEEP_S,
    LEASE_S,
    NOTE_S,
    SHELF_S,
    BoxFacts,
    DirectoryError,
    HeldError,
    Lease,
    Place,
    RefusalError,
    TooManyError,
)

ANSWER_S = 2.0  # for which an answer is waited for
_LEASE_MS, _KEEP_MS, _NOTE_MS, _SHELF_MS = (
    int(1000 * seconds) for seconds in (LEASE_S, KEEP_S, NOTE_S, SHELF_S)
)
_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"
# A tenant's sessions are a sorted set, each with the time at which its lease ends.
_HOLD = """
redis.call('SET', KEYS[2], place, 'PX', keep)
redis.call('ZADD', KEYS[3], now + lease_ms, session)
redis.call('PEXPIRE', KEYS[3], lease_ms)
"""
_CLAIM = f"""{_NOW}
local box, session, place, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lease_ms, keep = tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('EXISTS', KEYS[1]) == 1 then return 'held' end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
if most > 0 and redis.call('ZCARD', KEYS[3]) >= most then return 'many' end
local fence = redis.call('INCR', KEYS[4])
redis.call('SET', KEYS[1], box .. ' ' .. fence, 'NX', 'PX', lease_ms)
{_HOLD}
return tostring(fence)
"""
_RENEW = f"""{_NOW}
local value, session, place = ARGV[1], ARGV[2], ARGV[3]
local lease_ms, keep = tonumber(ARGV[4]), tonumber(ARGV[5])
local held = redis.call('GET', KEYS[1])
if held == value then
redis.call('PEXPIRE', KEYS[1], lease_ms)
{_HOLD}
end
return held
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('ZREM', KEYS[2], ARGV[2])
return redis.call('DEL', KEYS[1])
"""
# A shelf is two hashes by name: labels and contents.
_SHELVE = """
local name, most = ARGV[1], tonumber(ARGV[4])
if redis.call('HEXISTS', KEYS[1], name) == 0 and redis.call('HLEN', KEYS[1]) >= most then return 0 end
for place = 1, 2 do
redis.call('HSET', KEYS[place], name, ARGV[1 + place])
redis.call('PEXPIRE', KEYS[place], ARGV[5])
end
return 1
"""


class RedisDirectory:
    """A fleet's directory in Redis; see `Directory`. Leases are set by SET NX PX. Scripts prolong or remove a lease
    only if the stored lease equals the expected lease.

    Parameters
    ----------
    url : str
        Address of the Redis server, such as ``redis://10.0.0.5:6379/0``.
    prefix : str
        Beginning of the names of all keys, for several fleets on one Redis server.
    """

    def __init__(self, url: str, prefix: str = "seko") -> None:
        import redis.asyncio

        self._wrong_password, self._refusal = redis.AuthenticationError, redis.ResponseError
        self._faults = (redis.RedisError, OSError)
        self._redis: Any = redis.asyncio.from_url(
            url, decode_responses=True, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S
        )
        self._prefix = prefix
        self._claim, self._renew, self._release, self._shelve = map(
            self._redis.register_script, (_CLAIM, _RENEW, _RELEASE, _SHELVE)
        )

    async def announce(self, box: BoxFacts) -> None:
        """Renew a box's entry."""
        pipeline = self._redis.pipeline()
        pipeline.set(self._key("box", box.name), json.dumps(asdict(box)), px=_LEASE_MS)
        pipeline.sadd(self._key("boxes"), box.name)
        await self._answer(pipeline.execute())

    async def withdraw(self, box: str) -> None:
        """Remove a box's entry."""
        await self._answer(self._redis.delete(self._key("box", box)))

    async def boxes(self) -> list[BoxFacts]:
        """Return the entries of all boxes."""
        names = sorted(await self._answer(self._redis.smembers(self._key("boxes"))))
        if not names:
            return []
        rows = await self._answer(self._redis.mget([self._key("box", name) for name in names]))
        gone = [name for name, row in zip(names, rows, strict=True) if row is None]
        if gone:
            await self._answer(self._redis.srem(self._key("boxes"), *gone))
        return [BoxFacts(**json.loads(row)) for row in rows if row is not None]

    async def claim(self, place: Place, box: str, most: int) -> Lease:
        """Take a session's lease."""
        arguments: list[Any] = [box, place.session, json.dumps(asdict(place)), most, _LEASE_MS, _KEEP_MS]
        answer = await self._answer(self._claim([*self._keys(place), self._key("fence")], arguments))
        if answer == "held":
            raise HeldError
        if answer == "many":
            raise TooManyError
        return Lease(box, int(answer))

    async def renew(self, leases: Mapping[Place, Lease]) -> dict[str, Lease | None]:
        """Renew leases."""
        if not leases:
            return {}
        pipeline = self._redis.pipeline(transaction=False)
        for place, lease in leases.items():
            arguments: list[Any] = [
                _value(lease),
                place.session,
                json.dumps(asdict(place)),
                _LEASE_MS,
                _KEEP_MS,
            ]
            await self._renew(self._keys(place), arguments, client=pipeline)
        values = await self._answer(pipeline.execute())
        return {place.session: _lease(value) for place, value in zip(leases, values, strict=True)}

    async def release(self, session: str, tenant: str, lease: Lease) -> None:
        """End a session's lease."""
        keys = [self._key("lease", session), self._key("tenant", tenant)]
        await self._answer(self._release(keys, [_value(lease), session]))

    async def find(self, session: str) -> tuple[Place | None, Lease | None]:
        """Return a session's stored facts and its lease."""
        place, lease = await self._answer(
            self._redis.mget([self._key("session", session), self._key("lease", session)])
        )
        return None if place is None else Place(**json.loads(place)), _lease(lease)

    async def note(self, video: str, box: str) -> None:
        """Record which box makes a video."""
        await self._answer(self._redis.set(self._key("video", video), box, px=_NOTE_MS))

    async def noted(self, video: str) -> str | None:
        """Return the box that makes a video."""
        box: str | None = await self._answer(self._redis.get(self._key("video", video)))
        return box

    async def keep(self, shelf: str, name: str, label: str, content: str, most: int) -> None:
        """Keep a thing on a shelf."""
        arguments: list[Any] = [name, label, content, most, _SHELF_MS]
        if not await self._answer(self._shelve(self._hashes(shelf), arguments)):
            raise TooManyError

    async def labels(self, shelf: str) -> dict[str, str]:
        """Return the labels of a shelf's things."""
        labels: dict[str, str] = await self._answer(self._redis.hgetall(self._hashes(shelf)[0]))
        return labels

    async def kept(self, shelf: str, name: str) -> str | None:
        """Return the content of a thing."""
        pipeline = self._redis.pipeline()
        for key in self._hashes(shelf):
            pipeline.pexpire(key, _SHELF_MS)
        pipeline.hget(key, name)
        content: str | None = (await self._answer(pipeline.execute()))[-1]
        return content

    async def remove(self, shelf: str, name: str) -> None:
        """Remove a thing from a shelf."""
        pipeline = self._redis.pipeline()
        for key in self._hashes(shelf):
            pipeline.hdel(key, name)
        await self._answer(pipeline.execute())

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()

    def _keys(self, place: Place) -> list[str]:
        return [
            self._key("lease", place.session),
            self._key("session", place.session),
            self._key("tenant", place.tenant),
        ]

    def _hashes(self, shelf: str) -> list[str]:
        return [self._key("labels", shelf), self._key("contents", shelf)]

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def _answer(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except self._wrong_password:
            raise RefusalError("the password is another one") from None
        except self._refusal as error:
            raise RefusalError(str(error)) from None
        except self._faults as error:
            raise DirectoryError(f"the directory does not answer: {type(error).__name__}") from None


def _value(lease: Lease) -> str:
    return f"{lease.box} {lease.fence}"


def _lease(value: str | None) -> Lease | None:
    if value is None:
        return None
    box, _, fence = value.partition(" ")
    return Lease(box, int(fence))
