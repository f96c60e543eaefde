"""Which URLs are refused as a webhook's, and which addresses are nobody's but ours?"""

from contextlib import suppress
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.targets import LONGEST_URL, BadTarget, check_public, is_public, literal, target


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://example.com/hook?a=b", "example.com", 443),
        ("http://example.com", "example.com", 80),
        ("https://Example.COM:8443/", "example.com", 8443),
        ("https://bücher.example/", "xn--bcher-kva.example", 443),
        ("https://93.184.216.34/", "93.184.216.34", 443),
        ("https://[2606:4700::1111]:444/", "2606:4700::1111", 444),
        ("https://under_score.example.com./", "under_score.example.com.", 443),
    ],
)
def test_a_public_url_is_taken(url: str, host: str, port: int) -> None:
    wanted = target(url)
    assert (wanted.host, wanted.port) == (host, port)
    check_public(wanted)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.com/", "https://"),
        ("file:///etc/passwd", "https://"),
        ("gopher://example.com/", "https://"),
        ("//example.com/", "https://"),
        ("example.com/hook", "https://"),
        ("", "https://"),
        (" https://example.com/", "https://"),
        ("https://user@example.com/", "password"),
        ("https://user:word@example.com/", "password"),
        ("http://127.0.0.1:80\\@example.com/", "password"),
        ("https://example.com/#here", "fragment"),
        ("https:///hook", "host"),
        ("https://.example.com/", "host"),
        ("https://exa mple.com/", "host"),
        ("https://exa%00mple.com/", "host"),
        ("https://-/", "host"),
        ("https://a..b/", "host"),
        ("http://[fe80::1%25eth0]/", "host"),
        ("http://[fe80::1%eth0]/", "valid"),
        ("http://１２７.0.0.1/", "valid"),
        ("http://0177.0.0.1/", "valid"),
        ("http://012.0.0.1/", "valid"),
        ("http://example.com:0/", "port"),
        ("http://example.com:99999/", "port"),
        ("http://example.com:port/", "valid"),
        ("https://example.com/\r\nx-header: 1", "valid"),
        ("https://example.com/\0", "valid"),
        ("https://example.com/" + "a" * LONGEST_URL, str(LONGEST_URL)),
        ("https://" + "a." * 130 + "com/", "host"),
    ],
)
def test_what_is_no_url_to_call_is_refused(url: str, why: str) -> None:
    with pytest.raises(BadTarget, match=why):
        target(url)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "api.localhost",
        "postgres",
        "printer.local",
        "metadata.google.internal",
        "router.home.arpa",
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0X7F.0.0.1",
        "017700000001",
        "0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "3232235777",
        "169.254.169.254",
        "0xa9fea9fe",
        "[::1]",
        "[::]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::ffff:a9fe:a9fe]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b::10.0.0.1]",
        "[2002:7f00:1::]",
        "[2001:0:7f00:1::]",
        "[fd00:ec2::254]",
        "[fe80::1]",
    ],
)
def test_a_url_that_shows_that_it_is_private_is_refused(host: str) -> None:
    wanted = target(f"http://{host}/")
    with pytest.raises(BadTarget, match="public"):
        check_public(wanted)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",  # noqa: S104 - an address, bound by nobody
        "0.1.2.3",
        "10.255.255.255",
        "100.64.0.1",
        "100.100.100.200",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.0.1",
        "169.254.170.2",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:10.0.0.1",
        "::ffff:0:7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:20::1",
        "2001:db8::1",
        "2002:808:808::1",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ],
)
def test_an_address_that_may_be_ours_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "::ffff:8.8.8.8", "2606:4700::1111"],
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ip_address(address))


@given(st.ip_addresses(v=4))
def test_every_spelling_of_an_address_is_the_address(address: object) -> None:
    number = int(address)  # type: ignore[call-overload]
    for spelling in (str(address), str(number), hex(number), f"0{number:o}"):
        assert literal(spelling) == address


@given(st.text(max_size=60))
def test_taking_any_text_for_a_url_raises_nothing_else(text: str) -> None:
    for url in (text, f"http://{text}/"):
        with suppress(BadTarget):
            check_public(target(url))
