"""Are ports chosen free, recorded, and kept while they are free?"""

import socket
import stat
from pathlib import Path

from service.stack.ports import FIRST, LAST, LOOPBACK, Ports, choose, is_free


def listening() -> socket.socket:
    server = socket.create_server((LOOPBACK, choose()))
    server.listen()
    return server


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with listening() as server:
        assert not is_free(server.getsockname()[1])


def test_a_chosen_port_lies_below_those_of_outgoing_connections() -> None:
    assert all(FIRST <= choose() <= LAST < 32_768 for _ in range(20))


def test_a_recorded_port_is_kept_by_the_next_start(tmp_path: Path) -> None:
    port = Ports(tmp_path / "ports.json").take("api")

    assert Ports(tmp_path / "ports.json").take("api") == port


def test_a_recorded_port_that_was_taken_meanwhile_is_replaced_for_good(tmp_path: Path) -> None:
    record = tmp_path / "ports.json"
    with listening() as server:
        taken = server.getsockname()[1]
        Ports(record).keep("api", taken)

        other = Ports(record).take("api")

    assert other != taken
    assert Ports(record).take("api") == other


def test_two_parts_never_share_a_port(tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports.json")

    assert len({ports.take(str(number)) for number in range(50)}) == 50


def test_a_record_that_cannot_be_read_is_written_anew(tmp_path: Path) -> None:
    record = tmp_path / "ports.json"
    record.write_text("{")

    port = Ports(record).take("api")

    assert Ports(record).take("api") == port
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
