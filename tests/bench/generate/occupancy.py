"""How full are the seats of a batch, step by step, when it is static and when it is continuous?"""

from pathlib import Path
from typing import Any

from engine.request import GenerateRequest

_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 220, 50, 40


def draw(target: Path, requests: list[GenerateRequest], run: Any, *, seats: int) -> None:
    """Write an SVG. Static: batches of like prompt length that wait for their longest answer.

    Both are counted in steps that make an answer's next token; steps of prompts are left out.
    """
    continuous = [running for _, decoded, running in run.steps if decoded]
    order = sorted(range(len(requests)), key=lambda n: -len(requests[n].prompt))
    static: list[int] = []
    for start in range(0, len(order), seats):
        lengths = [len(run.answers[n]) for n in order[start : start + seats]]
        static += [sum(length > step for length in lengths) for step in range(max(lengths))]
    steps = max(len(static), len(continuous))
    curves = (("static", static, "#b44"), ("continuous", continuous, "#264"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 80}" height="{_HEIGHT + 90}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH + 80}" height="{_HEIGHT + 90}" fill="#fff"/>',
    ]
    for number, (name, curve, colour) in enumerate(curves):
        points = " ".join(
            f"{_LEFT + step * _WIDTH / steps:.1f},{_TOP + _HEIGHT * (1 - taken / seats):.1f}"
            for step, taken in enumerate(curve)
        )
        mean = sum(curve) / len(curve) / seats
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{_LEFT + 340 * number}" y="20" fill="{colour}">'
            f"{name}: {len(curve)} steps, {mean:.0%} of {seats} seats taken</text>",
        ]
    bottom = _TOP + _HEIGHT
    parts += [
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="#888"/>',
        f'<text x="{_LEFT - 24}" y="{_TOP + 4}">{seats}</text>',
        f'<text x="{_LEFT - 14}" y="{bottom}">0</text>',
        f'<text x="{_LEFT}" y="{bottom + 24}">steps (0 to {steps}), '
        f"{len(requests)} lines of 16 to 128 tokens out</text>",
        "</svg>",
    ]
    target.write_text("\n".join(parts) + "\n", encoding="utf-8")
