"""Do captured shapes hold every pack, with little room left over, and are they few?"""

import random

from engine.plan.shapes import shape_of

BUDGET = 50_000


def test_at_most_six_percent_of_a_shapes_tokens_belong_to_nobody() -> None:
    for tokens in range(1024, BUDGET + 1):
        shape = shape_of([tokens], budget=BUDGET)
        assert shape is not None
        assert tokens <= shape.tokens <= BUDGET
        assert (shape.tokens - tokens) / shape.tokens <= 0.06


def test_shapes_are_few() -> None:
    tokens = range(1024, BUDGET + 1)
    shapes = {shape.tokens for n in tokens if (shape := shape_of([n], budget=BUDGET))}
    assert len(shapes) <= 16 * 6
    assert BUDGET in shapes


def test_a_shape_has_room_for_every_sequence_of_its_pack() -> None:
    draw = random.Random(5)
    for _ in range(500):
        lengths = [draw.randint(1, 512) for _ in range(draw.randint(8, 150))]
        shape = shape_of(lengths, budget=BUDGET)
        if sum(lengths) < 1024:
            assert shape is None
            continue
        assert shape is not None
        assert shape.rows >= len(lengths)
        assert shape.longest >= max(lengths)
        assert shape.rows < 2 * len(lengths)
        assert shape.longest < 2 * max(lengths)


def test_a_pack_beyond_the_budget_has_no_shape() -> None:
    assert shape_of([BUDGET, 1], budget=BUDGET) is None
