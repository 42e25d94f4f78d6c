"""Files of TLS certificates: checked before anything listens, and loaded again when they are renewed."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

_LOG = logging.getLogger("seko_serve")


def check_certificate(certificate: Path | str, key: Path | str, names: str) -> None:
    """Raise a ValueError, which begins with ``names``, unless the two files are a TLS certificate and the certificate's
    key in PEM."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(f"{names} are no certificate and its key: {error}") from None


class ServedCertificate:
    """The certificate of a server, whose files may be renewed while it runs.

    Parameters
    ----------
    certificate, key : str
        The files, from which the server loads the certificate after this.
    """

    def __init__(self, certificate: str, key: str) -> None:
        self._files = certificate, key
        self._seen = self._state()

    def renew(self, context: ssl.SSLContext) -> None:
        """Let new connections have the certificate that the files hold now. While the two do not belong together, as
        between the writes of both, the one before stays."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            check_certificate(*self._files, "the renewed files")
            context.load_cert_chain(*self._files)
        except (ValueError, OSError) as error:
            _LOG.warning("the TLS certificate is not renewed: %s", error)
        else:
            _LOG.info("the TLS certificate is renewed")

    def _state(self) -> list[tuple[int, ...]]:
        """Return what differs once a file was written or replaced; nothing for one that is gone."""
        found = (os.stat(file) for file in self._files if Path(file).is_file())
        return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]
