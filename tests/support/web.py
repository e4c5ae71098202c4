"""Requests by httpx that trust no certificate authority, for services on loopback.

By default httpx reads the certificates of all authorities for each request, which takes 36 ms of a
processor's time.
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NOBODY)
post = partial(httpx.post, verify=_NOBODY)
request = partial(httpx.request, verify=_NOBODY)
stream = partial(httpx.stream, verify=_NOBODY)
