"""How is something POSTed to a URL that a tenant named, without reaching where it must not?

The name is looked up here, all its addresses are checked, and the connection goes to one of those
that were checked: a name that changes its mind in between changes nothing. A redirect is an answer
like any other and is not followed. Proxies of the environment are not used: they would look the
name up again.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Self

import httpx

from service.targets import BadTarget, Target, is_public, target

DEADLINE_S = 10.0
"""From looking the name up to the answer's status, whatever the other side does."""

CONNECT_S = 3.0
"""For one address; the next one is tried then."""

MOST_ADDRESSES = 3
POLITE_S = 1.0
POLITE_BYTES = 65_536

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port → addresses. Raises OSError."""


class Why(StrEnum):
    """Why there was no answer."""

    FORBIDDEN = "forbidden_address"
    UNKNOWN_NAME = "name_not_resolved"
    TIMED_OUT = "timed_out"
    CONNECTION = "connection_failed"


class NotAnswered(Exception):
    """The other side was not reached, or said nothing that is HTTP."""

    def __init__(self, why: Why) -> None:
        super().__init__(why.value)
        self.why = why


async def look_up(host: str, port: int) -> Sequence[str]:
    """The system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True, slots=True)
class Sender:
    """POSTs; reads of an answer its status only."""

    private_addresses: bool
    context: ssl.SSLContext
    resolve: Resolve = look_up
    deadline_s: float = DEADLINE_S

    @classmethod
    def open(cls, *, private_addresses: bool) -> Self:
        """With the certificates of httpx, or those that SSL_CERT_FILE names."""
        return cls(private_addresses, httpx.create_ssl_context())

    async def post(self, url: str, *, body: bytes, headers: Mapping[str, str]) -> int:
        """The status of the answer. Raises NotAnswered, within the deadline."""
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._post(target(url), body, headers)
        except TimeoutError as error:
            raise NotAnswered(Why.TIMED_OUT) from error
        except BadTarget as error:
            raise NotAnswered(Why.FORBIDDEN) from error

    async def _post(self, wanted: Target, body: bytes, headers: Mapping[str, str]) -> int:
        addresses = await self._checked(wanted)
        # The headers say the name that was asked for; the address stands in the URL alone.
        named = {**headers, "host": wanted.url.netloc.decode("ascii"), "connection": "close"}
        extensions = {"sni_hostname": wanted.host.rstrip(".")}
        why = Why.CONNECTION
        for address in addresses[:MOST_ADDRESSES]:
            try:
                url = wanted.url.copy_with(host=address)
                return await self._post_to(url, body, named, extensions)
            except httpx.ConnectError:
                why = Why.CONNECTION
            except httpx.ConnectTimeout:
                why = Why.TIMED_OUT
            except httpx.TimeoutException as error:
                raise NotAnswered(Why.TIMED_OUT) from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise NotAnswered(Why.CONNECTION) from error
        raise NotAnswered(why)

    async def _checked(self, wanted: Target) -> Sequence[str]:
        try:
            addresses = await self.resolve(wanted.host, wanted.port)
        except (OSError, UnicodeError) as error:
            raise NotAnswered(Why.UNKNOWN_NAME) from error
        if not addresses:
            raise NotAnswered(Why.UNKNOWN_NAME)
        if not self.private_addresses and not all(is_public(ip_address(a)) for a in addresses):
            raise NotAnswered(Why.FORBIDDEN)
        return addresses

    async def _post_to(
        self, url: httpx.URL, body: bytes, headers: Mapping[str, str], extensions: dict[str, str]
    ) -> int:
        timeout = httpx.Timeout(self.deadline_s, connect=CONNECT_S)
        async with (
            httpx.AsyncClient(verify=self.context, timeout=timeout, trust_env=False) as client,
            client.stream(
                "POST", url, content=body, headers=headers, extensions=extensions
            ) as response,
        ):
            await _let_finish(response)
            return response.status_code


async def _let_finish(response: httpx.Response) -> None:
    """Take a little of the body, so that an honest server is not cut off; nobody looks at it."""
    taken = 0
    with suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(POLITE_S):
            async for block in response.aiter_raw():
                taken += len(block)
                if taken > POLITE_BYTES:
                    return
