"""Files of TLS certificates, checked before anything listens."""

from __future__ import annotations

import ssl
from pathlib import Path


def check_certificate(certificate: Path | str, key: Path | str, names: str) -> None:
    """Raise a ValueError, which begins with ``names``, unless the two files are a TLS certificate and the certificate's
    key in PEM."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(f"{names} are no certificate and its key: {error}") from None
