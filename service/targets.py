"""Which URLs may this service be told to call? http(s), and by default public addresses only."""

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx

LONGEST_URL = 2_048

Address = IPv4Address | IPv6Address

_NAME = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?"
)
_LOCAL_NAMES = ("localhost", "local", "internal", "home.arpa")
_GLOBAL_V6 = ip_network("2000::/3")
_NOT_PUBLIC = tuple(
    ip_network(network)
    for network in (
        "100.64.0.0/10",  # carrier NAT; a cloud's metadata service at 100.100.100.200
        "168.63.129.16/32",  # a cloud's metadata service at an address that looks public
        "192.0.0.0/24",  # protocol assignments; a cloud's metadata service at 192.0.0.192
        "192.88.99.0/24",  # 6to4 relays
        "2001::/23",  # protocol assignments; Teredo, which holds an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which holds an IPv4 address
        "3fff::/20",  # documentation
    )
)


class BadTarget(ValueError):
    """Not a URL that may be called; the message says why, for the client."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart once: what is checked is what is called."""

    url: httpx.URL
    host: str  # lower case, punycode, an IPv6 address without brackets
    port: int


def target(text: str) -> Target:
    """`text` as something to call. Raises BadTarget; looks nothing up."""
    if len(text) > LONGEST_URL:
        raise BadTarget(f"it is longer than {LONGEST_URL} characters")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise BadTarget("it is not a valid URL") from error
    if url.scheme not in {"http", "https"}:
        raise BadTarget("it must begin with https:// or http://")
    if url.userinfo:
        raise BadTarget("it must not contain a user or password")
    if url.fragment:
        raise BadTarget("it must not contain a fragment")
    host = url.raw_host.decode("ascii").lower()
    if literal(host) is None and not _NAME.fullmatch(host):
        raise BadTarget("its host is not a valid name or address")
    port = url.port if url.port is not None else {"http": 80, "https": 443}[url.scheme]
    if not 0 < port <= 65_535:
        raise BadTarget("its port is not between 1 and 65535")
    return Target(url, host, port)


def check_public(wanted: Target) -> None:
    """Raises BadTarget where the host can be seen to be private without looking it up.

    What a name leads to is checked at each call (`service.outbound`); this only says it early.
    """
    address = literal(wanted.host)
    if address is not None:
        if not is_public(address):
            raise BadTarget("its host is not a public address")
        return
    name = wanted.host.rstrip(".")
    if "." not in name or any(f".{name}".endswith(f".{local}") for local in _LOCAL_NAMES):
        raise BadTarget("its host is not a public name")


def literal(host: str) -> Address | None:
    """The address that `host` is, in any spelling that resolvers take: `127.1`, `0x7f000001`."""
    try:
        found = ip_address(host)
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host.rstrip(".")))
        except OSError:
            return None
    # A scope (`fe80::1%eth0`) names an interface of this machine.
    return None if isinstance(found, IPv6Address) and found.scope_id is not None else found


def is_public(address: Address) -> bool:
    """Whether any host of the internet may be there, and none of this network or machine."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        # Other ways to write an IPv4 address into one of IPv6 (NAT64 among them) lie outside.
        if address not in _GLOBAL_V6:
            return False
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    return not any(address in network for network in _NOT_PUBLIC)
