"""What of the CUDA path can be held to account on a machine without a GPU?"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from engine.config import EngineConfig, Kind
from engine.encode.graphs import Captured, Run
from engine.encode.packed import Packed
from engine.encode.rectangles import in_rectangles, rectangles
from engine.encode.texts import Text
from engine.model import attention, varlen
from engine.model.attention import PACKED, Pack
from engine.model.load import Encoder, load_encoder
from engine.model.varlen import Bounds, attend, suits
from engine.request import EncodeRequest
from engine.transfer import download, upload
from tests.gpu import encode_speed
from tests.gpu.models import attend_slowly

CUDA = torch.device("cuda")
LENGTHS = [9, 5, 5, 1]


def kernel_by_its_description(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    offsets_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> torch.Tensor:
    """What torch's documentation says of varlen_attn, on a CPU."""
    assert offsets.dtype == torch.int32
    assert offsets is offsets_of_keys
    assert longest == longest_of_keys
    assert longest >= offsets.diff().max()
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    attended = torch.full_like(query, float("nan"))
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        place = torch.arange(end - begin)
        ahead = place[None, :] - place[:, None]
        seen = (ahead >= -left) | (left < 0)
        seen &= (ahead <= right) | (right < 0)
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        found = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        attended[begin:end] = found[0].transpose(0, 1)
    return attended


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 3), (True, 3)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_what_is_asked_of_the_kernel_is_attention_of_each_sequence_alone(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None, key_heads: int
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel_by_its_description)
    torch.manual_seed(1)
    query = torch.randn(sum(LENGTHS), 4, 8)
    key, value = torch.randn(2, sum(LENGTHS), key_heads, 8)
    bounds = Bounds.of(LENGTHS, torch.device("cpu"))
    found = attend(query, key, value, bounds, scale=0.3, causal=causal, window=window)
    expected = attend_slowly(query, key, value, LENGTHS, scale=0.3, causal=causal, window=window)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 3)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_torchs_own_description_of_the_kernel_takes_what_it_is_given(
    causal: bool, window: int | None, key_heads: int
) -> None:
    with FakeTensorMode():  # tensors of a device that need not be there
        query = torch.empty(20, 4, 16, device=CUDA, dtype=torch.bfloat16)
        key = torch.empty(20, key_heads, 16, device=CUDA, dtype=torch.bfloat16)
        bounds = Bounds(torch.empty(5, device=CUDA, dtype=torch.int32), longest=9)
        found = attend(query, key, key, bounds, scale=None, causal=causal, window=window)
    assert (found.shape, found.dtype, found.device.type) == (query.shape, query.dtype, "cuda")


def test_what_the_kernel_cannot_do_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    half = torch.bfloat16
    assert suits(CUDA, half, 64)
    assert suits(CUDA, torch.float16, 256)
    assert not suits(torch.device("cpu"), half, 64)
    assert not suits(CUDA, torch.float32, 64)
    assert not suits(CUDA, half, 264)
    assert not suits(CUDA, half, 36)
    assert not suits(CUDA, half, 64, softcap=50.0)
    assert not suits(CUDA, half, 64, sinks=torch.zeros(4))
    capability[0] = (7, 5)
    assert not suits(CUDA, half, 64)


def test_what_goes_up_comes_down_as_it_was() -> None:
    numbers = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    there = upload(numbers.to(torch.bfloat16), torch.device("cpu"))
    assert download(there).tolist() == numbers.tolist()


def test_rectangles_hold_every_token_once_in_few_calls_with_little_padding() -> None:
    draw = random.Random(1)
    lengths = sorted(min(512, max(3, round(draw.lognormvariate(4, 1)))) for _ in range(900))[::-1]
    made = list(rectangles(lengths))
    found = np.concatenate([places[mask == 1] for places, mask in made])
    assert found.tolist() == list(range(sum(lengths)))
    assert [int(n) for _, mask in made for n in mask.sum(axis=1)] == lengths
    assert len(made) <= 26
    assert sum(mask.size for _, mask in made) <= 1.15 * sum(lengths)


def test_what_a_head_makes_of_rectangles_is_what_it_makes_of_each_text() -> None:
    lengths = [9, 8, 8, 4, 1, 1]
    torch.manual_seed(1)
    hidden, ids = torch.randn(40, 3), torch.arange(40)
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    each = [slice(begin, begin + n) for begin, n in zip(starts, lengths, strict=True)]

    def texts_head(rows: torch.Tensor, own: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((rows * own.unsqueeze(-1)) * mask.unsqueeze(-1)).sum(dim=1)

    def tokens_head(rows: torch.Tensor, own: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return rows * own.unsqueeze(-1)

    found = torch.cat(list(in_rectangles(texts_head, hidden, ids, lengths)))  # type: ignore[arg-type]  # a head is only called
    one = [texts_head(hidden[None, x], ids[None, x], torch.ones(1, 1)) for x in each]
    torch.testing.assert_close(found, torch.cat(one))
    tokens = torch.cat(list(in_rectangles(tokens_head, hidden, ids, lengths)), dim=1)  # type: ignore[arg-type]  # likewise
    assert torch.equal(tokens[0], hidden[: sum(lengths)] * ids[: sum(lengths), None])


@pytest.fixture
def on_varlen(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """The tiny encoder, attending by what the kernel is said to do."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel_by_its_description)
    monkeypatch.setattr(attention, "suits", lambda *_: True)
    encoder = load_encoder(EngineConfig(model=tiny_encoder, kind=Kind.EMBED))
    encoder.model.set_attn_implementation(PACKED)
    return encoder


def ragged(count: int, seed: int) -> list[Text]:
    draw = random.Random(seed)
    lengths = sorted((draw.randint(2, 64) for _ in range(count)), reverse=True)
    return [
        Text.of(EncodeRequest(n, tuple(draw.randrange(3, 200) for _ in range(length))))
        for n, length in enumerate(lengths)
    ]


@torch.inference_mode()
def test_packs_of_a_captured_shape_come_out_as_they_do_uncaptured(on_varlen: Encoder) -> None:
    captures = []

    def capture(run: Run) -> Run:
        run()
        captures.append(run)
        return run

    captured = Captured(on_varlen, budget=4096, capture=capture)
    plain = Packed(on_varlen)
    for seed in range(3):
        batch = ragged(60, seed)
        found = np.stack(captured.rows(batch))
        np.testing.assert_allclose(found, np.stack(plain.rows(batch)), rtol=0, atol=1e-6)
    assert 1 <= len(captures) <= 3
    again = len(captures)
    captured.rows(ragged(60, 0))
    assert len(captures) == again
    captured.rows(ragged(3, 1))  # too small for a shape
    assert len(captures) == again


@torch.inference_mode()
def test_weights_that_moved_are_captured_anew(on_varlen: Encoder) -> None:
    captures = []

    def capture(run: Run) -> Run:
        captures.append(run)
        return run

    captured = Captured(on_varlen, budget=4096, capture=capture)
    captured.rows(ragged(60, 0))
    weight = next(on_varlen.whole.parameters())
    weight.data = weight.data.clone()
    captured.rows(ragged(60, 0))
    assert len(captures) == 2


@torch.inference_mode()
def test_a_shape_that_cannot_be_captured_runs_without(
    on_varlen: Encoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a layer that the kernel does not suit, here."""
    monkeypatch.setattr(attention, "suits", lambda *_: False)

    def capture(run: Run) -> Run:
        run()
        return run

    batch = ragged(60, 0)
    found = Captured(on_varlen, budget=4096, capture=capture).rows(batch)
    np.testing.assert_array_equal(found, Packed(on_varlen).rows(batch))
    assert "no graph could be captured" in caplog.text


@torch.inference_mode()
def test_a_pack_on_a_device_attends_by_the_kernel(
    on_varlen: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ragged(40, 2)
    lengths = [len(text.tokens) for text in batch]
    plain = Pack.of(lengths, torch.device("cpu"))
    there = Pack(plain.runs, Bounds.of(lengths, torch.device("cpu")), [])
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return kernel_by_its_description(*args, **options)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    packed = Packed(on_varlen)
    _, expected = packed.hidden(batch, plain)
    assert not calls
    _, found = packed.hidden(batch, there)
    assert len(calls) == 2
    torch.testing.assert_close(found[0, : sum(lengths)], expected[0, : sum(lengths)])


def test_the_programme_that_measures_a_device_runs_on_a_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    encode_speed.main(["--device", "cpu", "--shape", "tiny"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [point["budget"] for point in report["budgets"]] == [256, 512, 1024]
    assert report["tokens"] >= 6000
    assert report["tokens_per_s"] > 0
    assert report["share_of_gemm"] > 0
    assert report["share_of_copy"] > 0


def test_operations_are_those_that_torch_counts() -> None:
    layers = encode_speed.Layers(count=1, width=8, inner=32, bytes_per_number=4)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counted:
        hidden = torch.randn(5, 8)
        for _ in range(4):
            torch.nn.functional.linear(hidden, torch.randn(8, 8))
        scores = hidden @ hidden.T
        scores @ hidden
        inner = torch.nn.functional.linear(hidden, torch.randn(32, 8))
        torch.nn.functional.linear(inner, torch.randn(8, 32))
    assert layers.operations([5]) == counted.get_total_flops()
