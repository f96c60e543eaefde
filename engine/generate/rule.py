"""What does a layer ask of attention?"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

# What models hand on that says nothing about attention over our own memory.
IGNORED = frozenset(
    {
        "cache_position",
        "dropout",  # none: the model is in eval mode
        "deterministic",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class NotSupportedError(Exception):
    """The model asks of attention what is not done here; it takes the padded way."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one layer asks of attention."""

    scale: float
    window: int | None = None  # a key at this distance or more is not seen
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: a score each head may give to nothing


def rule_of(
    module: Any,  # noqa: ANN401 the attention layer that calls
    query: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Rule:
    """What a layer asks for by these. Raises NotSupportedError where it is not done here."""
    known = {name: options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux")}
    causal = options.pop("is_causal", None)
    if mask is not None or causal is False or not getattr(module, "is_causal", True):
        msg = "attention that is not causal, or under the model's own mask"
        raise NotSupportedError(msg)
    strange = [n for n, given in options.items() if given is not None and n not in IGNORED]
    if strange:
        msg = f"attention with {', '.join(strange)}"
        raise NotSupportedError(msg)
    return Rule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=known["sliding_window"],
        softcap=known["softcap"],
        sinks=known["s_aux"],
    )
