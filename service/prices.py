"""What do tokens cost, standard and at the batch price?"""

from dataclasses import dataclass
from decimal import Decimal

from service.catalog import Model

PER = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars: before and after the batch discount."""

    standard: Decimal
    paid: Decimal


def cost(model: Model, *, input_tokens: int, output_tokens: int) -> Cost:
    """Exact: decimals throughout, nothing is rounded. Cached tokens are priced as input."""
    standard = (input_tokens * model.price_input + output_tokens * model.price_output) / PER
    return Cost(standard=standard, paid=standard * (1 - model.discount))
