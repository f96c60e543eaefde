"""How is a speed script asked, and how does it tell what it measured?"""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
import transformers


class Tried(Protocol):
    """What a script runs for one shape."""

    @property
    def dtype(self) -> str: ...


T = TypeVar("T", bound=Tried)


def tell(
    arguments: list[str] | None,
    trials: Mapping[str, T],
    measure: Callable[[T, argparse.Namespace], dict[str, Any]],
    about: str,
) -> None:
    """Print what `measure` finds, the last line as JSON. The first of `trials` is the default."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(trials), default=next(iter(trials)))
    parser.add_argument("--graphs", action="store_true", help="capture steps and replay them")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"no CUDA device is visible to torch {torch.__version__}")
    trial = trials[chosen.shape]
    report = {
        "chip": torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": chosen.shape,
        "dtype": trial.dtype,
        "graphs": chosen.graphs,
        **measure(trial, chosen),
    }
    report = _rounded(report)
    for name, value in report.items():
        print(f"  {name:24}{value}")
    print(json.dumps(report))


def _rounded(value: Any) -> Any:
    """Numbers to four figures, wherever they stand."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
