"""What can go wrong outside a request? (A request's own faults are `Failure` results.)

EngineError
├── ModelLoadError   a folder that holds no model this engine can run rightly
└── TemplateError    messages that the model's chat template refuses (also a ValueError)
"""


class EngineError(Exception):
    """The engine cannot do what was asked; the message says why."""


class ModelLoadError(EngineError):
    """The model folder is incomplete, or asks for something this engine does not do."""


class TemplateError(EngineError, ValueError):
    """The model's chat template refused the messages."""
