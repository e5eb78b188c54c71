"""Clients of the project's own services, over HTTP.

What goes between them are keys, weights and the insides of sandboxes: the environment's proxies (http_proxy, all_proxy)
are not asked. Web sockets have the same in `proxy=None`.
"""

import urllib.request
from typing import Any

import httpx

# For programs without an event loop.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def client(address: str, **options: Any) -> httpx.AsyncClient:
    """A client of the service at `address` that connects to it and to nobody else.

    Args:
      address: "http://HOST:PORT" or "https://HOST:PORT". Certificates are those of SSL_CERT_FILE and SSL_CERT_DIR
        where these are set.
      options: of httpx.AsyncClient.
    """
    # Nothing to verify without TLS; reading the certificates takes 50 ms a client.
    options.setdefault("verify", False if address.startswith("http:") else httpx.create_ssl_context(trust_env=True))
    return httpx.AsyncClient(base_url=address, trust_env=False, **options)
