"""A store of snapshots in an object store, S3 or one with a compatible interface, through `obstore`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from seko_serve.store.base import Content, ExistsError, StoreError, checked_name


class ObjectStore:
    """The objects of one bucket, below a prefix of names.

    Objects that no server process deletes, for example because the process was killed and never restarted, must be
    removed by a lifecycle rule of the bucket. The rule must leave each object for longer than any session lasts: the
    object that names a session's owner is written once, and without it the session is lost.

    Parameters
    ----------
    url : str
        The bucket and prefix, such as ``s3://bucket/prefix``. Credentials, region and endpoint come from the
        environment, by the names that AWS gives them.
    options : mapping, optional
        Further options of `obstore.store.from_url`.

    Raises
    ------
    StoreError
        If obstore is not installed, or does not support the URL of the store; if an object cannot be written, read and
        removed there, as with a wrong bucket or credentials.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
        except ImportError as fault:
            raise StoreError("snapshots in an object store need obstore: pip install obstore") from fault
        self._library, self._exists, self._fault = obstore, AlreadyExistsError, BaseError
        try:
            self._store = obstore.store.from_url(url, **options)
        except (BaseError, ValueError) as fault:
            raise StoreError(f"{url} is no object store, expected one such as s3://BUCKET/PREFIX") from fault
        name = f"{secrets.token_hex(8)}.probe"
        try:
            self.put(name, [b""])
            self.get(name)
            self.delete(name)
        except StoreError as fault:
            raise StoreError(f"{url}: {fault}; check its bucket, credentials, region and endpoint") from fault

    def put(self, name: str, pieces: Sequence[Content]) -> None:
        """Write an object; see `Store.put`. The object is written in one request, because only a single request can be
        refused if the name exists.
        """
        try:
            self._library.put(
                self._store, checked_name(name), b"".join(pieces), mode="create", use_multipart=False
            )
        except self._exists:
            raise ExistsError(f"{name} was written before") from None
        except (self._fault, OSError) as fault:
            raise StoreError(f"{name} cannot be written: {type(fault).__name__}") from fault

    def get(self, name: str) -> Content | None:
        """Return the content of an object; see `Store.get`."""
        try:
            return memoryview(self._library.get(self._store, checked_name(name)).bytes())
        except FileNotFoundError:
            return None
        except (self._fault, OSError) as fault:
            raise StoreError(f"{name} cannot be read: {type(fault).__name__}") from fault

    def delete(self, name: str) -> None:
        """Remove an object; see `Store.delete`."""
        try:
            self._library.delete(self._store, checked_name(name))
        except FileNotFoundError:
            return
        except (self._fault, OSError) as fault:
            raise StoreError(f"{name} cannot be removed: {type(fault).__name__}") from fault
