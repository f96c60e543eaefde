"""Do the kernels do on the device as SDPA does?"""

import pytest
import torch

from engine.generate import triton_spans
from engine.generate.kv import Heads
from tests.gpu.spans import BOUNDS, Case, Text, check

pytestmark = pytest.mark.gpu

TEXTS = [Text(1500, 1, (700, 701)), Text(90, 33, (4,)), Text(0, 130), Text(511, 1), Text(0, 1)]
# No fewer bits are lost on the device, but products are summed in another order.
LENIENT = 4


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(
    ("heads", "group"),
    [
        (Heads(2, 64, 64), 4),
        (Heads(1, 128, 128), 8),
        (Heads(2, 80, 80), 1),
        (Heads(1, 256, 256), 2),
        (Heads(1, 64, 64), 71),
        (Heads(2, 24, 40), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 100])
def test_rows_read_what_they_see(
    cuda: torch.device, dtype: torch.dtype, heads: Heads, group: int, window: int | None
) -> None:
    case = Case(TEXTS, heads, group, dtype, window, device="cuda")
    bound = BOUNDS[dtype] * LENIENT
    for found, expected in zip(case.attended(), case.expected(), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=bound)


def test_softcap_and_sinks_are_honoured(cuda: torch.device) -> None:
    check(Case(TEXTS, Heads(2, 64, 64), 4, torch.bfloat16, None, 5.0, True, device="cuda"))


def test_neighbours_room_and_programs_change_no_bit(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Text(before, 1) for before in (3000, 513, 40, 9000)]
    case = Case(texts, Heads(2, 64, 64), 4, torch.bfloat16, device="cuda")
    together = case.attended()
    for programs in (1, 10**6):
        monkeypatch.setattr(triton_spans, "_PROGRAMS", programs)
        assert all(map(torch.equal, together, case.attended(spare=3)))
