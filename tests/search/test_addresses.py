from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from agentic_rollout.errors import ToolError
from agentic_rollout.search.addresses import AddressSettings, PublicResolver, is_public, parse_url


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_address_of_the_public_internet_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1"),
        *("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "224.0.0.1", "239.1.1.1"),
        *("240.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "203.0.113.1"),
        *("::", "::1", "::7f00:1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:168.63.129.16", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2002:7f00:1::", "2001:0:808:808::1"),
    ],
)
def test_address_that_leads_inside_is_not_public_in_any_disguise(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url", ["http://example.com", "https://example.com:443/a?b=c", " http://8.8.8.8:80/ ", "HTTP://a.b"]
)
def test_web_address_is_allowed(url: str) -> None:
    assert parse_url(url, AddressSettings()).host


def test_fragment_is_not_sent() -> None:
    assert str(parse_url("http://example.com/a#b", AddressSettings())) == "http://example.com/a"


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://example.com", "gopher://example.com", "data:text/plain,a", "unix:///run/x"),
        *("http://user:pw@example.com", "http://user@example.com", "http://example.com:22", "https://example.com:8443"),
        *("http://127.0.0.1", "http://[::1]/", "http://[::ffff:127.0.0.1]", "http://169.254.169.254/latest/meta-data"),
        *("http://[fe80::1%25eth0]/", "http://10.0.0.1"),
    ],
)
def test_address_that_the_settings_do_not_allow_is_forbidden(url: str) -> None:
    with pytest.raises(ToolError) as caught:
        parse_url(url, AddressSettings())
    assert caught.value.status == "forbidden"
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "example.com/a", "//example.com", "http://", "http://[::1", "http://a:99999", "http:///a"]
)
def test_what_is_no_web_address_is_the_models_mistake(url: str) -> None:
    with pytest.raises(ToolError) as caught:
        parse_url(url, AddressSettings())
    assert caught.value.status == "bad_arguments"


def test_endless_address_is_not_even_parsed() -> None:
    with pytest.raises(ToolError, match="8192"):
        parse_url("http://example.com/" + "a" * 9000, AddressSettings())


def test_private_addresses_and_other_ports_are_reached_where_that_is_allowed() -> None:
    settings = AddressSettings(allow_private_addresses=True, ports=())
    assert parse_url("http://127.0.0.1:8080/", settings).port == 8080


class Names(AbstractResolver):
    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self.addresses
        ]

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], ["fe80::1%eth0"]])
def test_name_with_any_address_that_is_not_public_is_forbidden(addresses: list[str]) -> None:
    with pytest.raises(ToolError) as caught:
        asyncio.run(PublicResolver(Names(*addresses)).resolve("example.com", 80))
    assert caught.value.status == "forbidden"


def test_name_with_public_addresses_keeps_them() -> None:
    found = asyncio.run(PublicResolver(Names("8.8.8.8", "2606:4700::1111")).resolve("example.com", 80))
    assert [result["host"] for result in found] == ["8.8.8.8", "2606:4700::1111"]
