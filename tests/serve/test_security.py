"""Keys, tickets, resume tokens, rates and origins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.security.keys import ApiKeys, read_keys
from seko_serve.security.origins import check_origin
from seko_serve.security.rates import MOST_CALLERS, Rate
from seko_serve.security.tokens import MOST_TOKENS, ResumeTokens, Ticket
from seko_serve.settings import Settings

KEYS = ("a-key-of-the-first-tenant", "a-key-of-the-second-tenant")


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_key_is_a_tenant_and_none_other_gets_in() -> None:
    keys = ApiKeys(KEYS)
    first, second = (keys.tenant(f"Bearer {key}") for key in KEYS)
    assert first != second
    assert not any(key in tenant for key in KEYS for tenant in (first, second))
    for header in (None, "", "Bearer", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"bearer {KEYS[0][:-1]}"):
        with pytest.raises(ServeError) as caught:
            keys.tenant(header)
        assert caught.value.kind.status == 401
        assert KEYS[0] not in caught.value.message


def test_without_keys_anyone_is_one_tenant() -> None:
    assert not ApiKeys()
    assert ApiKeys().tenant(None) == ApiKeys().tenant("Bearer x")


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="7 letters, expected 16"):
        ApiKeys(["too-bad"])


@pytest.mark.parametrize("key", ["schlüssel-mit-umlaut", "a-key-of-two\nlines-in-one"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        ApiKeys([key])


def test_keys_come_from_the_line_a_private_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEYS[0]}\n\n{KEYS[1]}\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="mode 0600"):
        read_keys([], file, {})
    file.chmod(0o600)
    first, last = "the-first-key-of-all", "the-last-key-of-all"
    assert read_keys([first], file, {"SEKO_SERVE_API_KEY": last}) == [first, *KEYS, last]


def test_a_credential_of_systemd_is_private_whatever_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS[0])
    file.chmod(0o440)  # of a list of access that adds one user
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_keys([], file, {}) == [KEYS[0]]
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="mode 0600"):
        read_keys([], file, {})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"short\n", "5 letters"),
        (b"\xff" * 20, "no text"),
    ],
)
def test_a_file_without_a_usable_key_is_refused(content: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ValueError, match=named):
        read_keys([], file, {})


def test_a_ticket_opens_its_own_session_once() -> None:
    mine, other = Ticket(), Ticket()
    assert not mine.redeem("")
    older, ticket = mine.issue(), mine.issue()
    other.issue()
    assert [other.redeem(ticket), mine.redeem(older), mine.redeem("")] == [False] * 3
    assert [mine.redeem(ticket), mine.redeem(ticket)] == [True, False]


def test_a_resume_token_holds_until_its_client_is_known_to_have_a_later_one() -> None:
    tokens = ResumeTokens()
    with pytest.raises(ServeError):
        tokens.check("")
    first, second = tokens.rotate(0), tokens.rotate(3)
    assert not {first, second} & set(tokens.hashes)
    tokens.check(first)  # the socket may have been lost before the second came
    tokens.acknowledge(2)  # of a chunk that was made before the second was given
    tokens.check(first)
    tokens.acknowledge(3)
    with pytest.raises(ServeError):
        tokens.check(first)
    tokens.check(second)
    third = tokens.rotate(5)
    tokens.check(third)  # who has it needs none before it
    with pytest.raises(ServeError):
        tokens.check(second)
    ResumeTokens(tokens.hashes).check(third)


def test_of_tokens_that_nobody_took_the_clients_own_and_the_newest_are_kept() -> None:
    tokens = ResumeTokens()
    given_out = [tokens.rotate(0) for _ in range(10)]
    kept = [given_out[0], *given_out[1 - MOST_TOKENS :]]
    assert len(tokens.hashes) == MOST_TOKENS
    for old in set(given_out) - set(kept):
        with pytest.raises(ServeError):
            tokens.check(old)
    for token in kept:
        tokens.check(token)


def test_a_token_that_is_withdrawn_leaves_the_one_before_it() -> None:
    tokens = ResumeTokens()
    first = tokens.rotate(0)
    for _ in range(2 * MOST_TOKENS):
        tokens.withdraw(tokens.rotate(3))
    tokens.acknowledge(9)
    tokens.check(first)
    assert len(tokens.hashes) == 1


@given(st.lists(st.floats(0, 3), max_size=60))
def test_a_rate_lets_through_what_its_bucket_holds(waits: list[float]) -> None:
    clock = Clock()
    rate = Rate(2.0, 3.0, "calls", clock)
    taken: list[float] = []
    for wait in waits:
        clock.now += wait
        try:
            rate.take("caller")
        except ServeError as error:
            retry_after = error.retry_after
        else:
            taken.append(clock.now)
            continue
        assert retry_after is not None
        clock.now += retry_after + 1e-9
        rate.take("caller")
        taken.append(clock.now)
    for begin in range(len(taken)):
        for end in range(begin, len(taken)):
            assert end - begin + 1 <= 3 + 2.0 * (taken[end] - taken[begin]) + 1e-6


def test_callers_have_buckets_of_their_own_and_quiet_ones_are_forgotten() -> None:
    rate = Rate(1.0, 1.0, "calls", Clock())
    for caller in range(MOST_CALLERS + 5):
        rate.take(str(caller))
    with pytest.raises(ServeError, match="more calls than the limit"):
        rate.take(str(MOST_CALLERS))
    assert len(rate._left) <= MOST_CALLERS


@pytest.mark.parametrize(
    ("option", "sent"),
    [
        ("https://Video.Example.org", "https://video.example.org"),
        ("https://video.example.org:443", "https://video.example.org"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("http://video.example.org:443", "http://video.example.org:443"),
        ("*", "https://video.example.org"),
    ],
)
def test_an_allowed_origin_is_known_as_browsers_write_it(option: str, sent: str) -> None:
    access = Access(Settings(Path("toy"), allowed_origins=frozenset({option})))
    assert access.may_read(sent)
    assert option == "*" or not access.may_read(f"{sent}0")


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "taken"),
    [
        (None, "localhost:8000", set(), True),
        ("http://localhost:8000", "localhost:8000", set(), True),
        ("https://me.example", "me.example", set(), True),
        ("http://localhost:8001", "localhost:8000", set(), False),
        ("https://evil.example", "localhost:8000", set(), False),
        ("https://good.example", "localhost:8000", {"https://good.example"}, True),
        ("https://evil.example", "localhost:8000", {"*"}, True),
        ("null", "localhost:8000", set(), False),
        ("file://localhost:8000", "localhost:8000", set(), False),
        ("http://[", "localhost:8000", set(), False),
        ("", "", set(), False),
    ],
)
def test_pages_of_other_sites_are_refused(
    origin: str | None, host: str, allowed: set[str], *, taken: bool
) -> None:
    if taken:
        check_origin(origin, host, frozenset(allowed))
    else:
        with pytest.raises(ServeError, match="--allowed-origins"):
            check_origin(origin, host, frozenset(allowed))
