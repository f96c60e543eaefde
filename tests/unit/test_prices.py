"""Is money exact?"""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.catalog import Model, ModelKind
from service.prices import Cost, cost


def model(price_input: str, price_output: str = "0", discount: str = "0.5") -> Model:
    return Model(
        id="m",
        kind=ModelKind.GENERATE,
        source="stub:",
        price_input=Decimal(price_input),
        price_output=Decimal(price_output),
        discount=Decimal(discount),
    )


@pytest.mark.parametrize(
    ("prices", "tokens", "standard", "paid"),
    [
        (("0.10", "0.40"), (3, 5), "0.0000023", "0.00000115"),
        (("0.02",), (1, 0), "0.00000002", "0.00000001"),
        (("0.02", "0", "0"), (1_000_000, 9), "0.02", "0.02"),
        (("0.02", "0", "1"), (1_000_000, 0), "0.02", "0"),
        (("0",), (10**9, 10**9), "0", "0"),
    ],
)
def test_tokens_times_price_less_the_discount(
    prices: tuple[str, ...], tokens: tuple[int, int], standard: str, paid: str
) -> None:
    made = cost(model(*prices), input_tokens=tokens[0], output_tokens=tokens[1])
    assert made == Cost(Decimal(standard), Decimal(paid))


counts = st.integers(min_value=0, max_value=10**9)


@given(st.lists(st.tuples(counts, counts), max_size=20))
def test_the_sum_of_lines_is_the_price_of_the_sum(lines: list[tuple[int, int]]) -> None:
    priced = model("0.15", "0.60", "0.25")
    each = [cost(priced, input_tokens=a, output_tokens=b) for a, b in lines]
    whole = cost(
        priced, input_tokens=sum(a for a, _ in lines), output_tokens=sum(b for _, b in lines)
    )
    assert sum((one.standard for one in each), Decimal(0)) == whole.standard
    assert sum((one.paid for one in each), Decimal(0)) == whole.paid
