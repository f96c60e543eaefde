"""What can go wrong outside a request? (A request's own faults are `Failure` results.)

EngineError
├── ModelLoadError   a folder that holds no model this engine can run rightly
├── TemplateError    messages that the model's chat template refuses (also a ValueError)
└── UnknownPrompt    a prompt_name that the model does not have (also a ValueError)
"""

from collections.abc import Iterable


class EngineError(Exception):
    """The engine cannot do what was asked; the message says why."""


class ModelLoadError(EngineError):
    """The model folder is incomplete, or asks for something this engine does not do."""


class TemplateError(EngineError, ValueError):
    """The model's chat template refused the messages."""


class UnknownPrompt(EngineError, ValueError):
    """The model has no prompt of that name; the message says which it has."""

    @classmethod
    def of(cls, name: str, known: Iterable[str]) -> "UnknownPrompt":
        """The refusal of `name` where these are known."""
        listed = ", ".join(sorted(known))
        return cls(
            f"This model has no prompt {name!r}; it has {listed}."
            if listed
            else f"This model has no prompt {name!r}; it has none."
        )
