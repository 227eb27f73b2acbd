"""Which addresses a model may reach: those of the public internet, and nothing of the network it runs in."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from pydantic import Field
from yarl import URL

from agentic_rollout.config import Settings
from agentic_rollout.errors import ToolError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL_CHARS: Final = 8192

# Public by its number, yet a cloud's service for its own virtual machines.
_CLOUD_SERVICES: Final = frozenset({ipaddress.ip_address("168.63.129.16")})

# IPv6 addresses that carry an IPv4 address in their last 32 bits: what counts is where that leads.
_TRANSLATED: Final = (ipaddress.ip_network("::ffff:0:0/96"), ipaddress.ip_network("64:ff9b::/96"))

# Protocol assignments (a cloud's metadata among them), tunnels (Teredo, 6to4), local-use NAT64, IPv4-compatible and
# site-local addresses: nothing public needs them.
_NEVER_PUBLIC: Final = tuple(
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "2001::/32", "2002::/16", "64:ff9b:1::/48", "::/96", "fec0::/10")
)


class AddressSettings(Settings):
    """Which addresses may be reached."""

    allow_private_addresses: bool = Field(
        default=False, description="lets a model reach this machine, its network, and a cloud's credentials"
    )
    ports: tuple[int, ...] = Field(default=(80, 443), description="ports that may be connected to; empty: any")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet.

    Loopback, private, link-local (where clouds serve credentials), multicast and reserved addresses do not, nor do
    their disguises in IPv6.
    """
    if isinstance(address, ipaddress.IPv6Address) and any(address in network for network in _TRANSLATED):
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address in _CLOUD_SERVICES or any(address in network for network in _NEVER_PUBLIC):
        return False
    if address.is_multicast or address.is_reserved:
        return False
    return address.is_global and not address.is_private


def parse_url(text: str, settings: AddressSettings) -> URL:
    """An address as a model or a redirect gives it, if it may be asked for.

    The host's name is not resolved here: `PublicResolver` does that at the moment of connecting.

    Raises:
        ToolError: `bad_arguments` for what is no web address, `forbidden` for one that the settings do not allow.
    """
    if len(text) > MAX_URL_CHARS:
        raise ToolError(f"an address has more than {MAX_URL_CHARS} characters", "bad_arguments")
    try:
        url = URL(text.strip())
        host, port = url.host, url.port
    except ValueError:
        raise ToolError("this is no valid web address", "bad_arguments") from None
    if not url.scheme:
        raise ToolError("a web address begins with http:// or https://", "bad_arguments")
    if url.scheme not in ("http", "https"):
        raise ToolError("only addresses that begin with http:// or https:// can be opened", "forbidden")
    if not host:
        raise ToolError("this address names no host", "bad_arguments")
    if url.user is not None or url.password is not None:
        raise ToolError("an address must not hold a user name or a password", "forbidden")
    if settings.ports and port not in settings.ports:
        raise ToolError(f"port {port} is not allowed", "forbidden")
    if not settings.allow_private_addresses:
        _check_literal(host)
    return url.with_fragment(None)


def _check_literal(host: str) -> None:
    """Refuses a host that is itself an address and not a public one; names pass."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return
    if not is_public(address):
        raise _not_public()


def _not_public() -> ToolError:
    return ToolError("this address is not on the public internet", "forbidden")


class PublicResolver(AbstractResolver):
    """Resolves names for an HTTP client, and refuses names that lead to an address that is not public.

    The client connects to the very addresses that were checked, so a name cannot change its mind in between
    (DNS rebinding). A name of which even one address is not public is refused.

    Args:
        inner: what really resolves; the operating system unless given.
    """

    def __init__(self, inner: AbstractResolver | None = None) -> None:
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises: ToolError: `forbidden`, for a name with an address that is not public."""
        if self._inner is None:
            self._inner = ThreadedResolver()  # belongs to the running event loop
        found = await self._inner.resolve(host, port, family)
        for result in found:
            if not is_public(ipaddress.ip_address(result["host"].partition("%")[0])):
                raise _not_public()
        return found

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()
