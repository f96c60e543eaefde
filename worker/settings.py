"""What can be set of a worker, beside what the whole service has (`service.settings`)?"""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class WorkerSettings(BaseSettings):
    """Read once, when a worker process starts."""

    model_config = SettingsConfigDict(env_prefix="HALFRATE_", frozen=True, extra="ignore")

    serve: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Models an engine worker serves, separated by commas."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    threads: PositiveInt | None = Field(None, description="CPU threads of torch; unset: its own.")
    token_budget: PositiveInt | None = Field(
        None, description="Most padded tokens of an engine step; unset: the engine's own."
    )
    slots: PositiveInt = Field(
        2,
        description="Shards an engine worker holds at once, per model; up to four times as many"
        " while lines that wait would not fill a generating engine.",
    )
    step_limit_s: PositiveFloat = Field(
        600,
        description="An engine worker ends, to be started anew, when a step of its engine or a"
        " renewal of its leases takes longer; a first step gets five times as long.",
    )
    cpu_slots: Annotated[int, Field(ge=3)] = Field(
        4, description="Processes of a CPU worker; one is kept free for ticks, one for webhooks."
    )

    @property
    def stage_slots(self) -> int:
        """Processes of a CPU worker that stages may hold."""
        return self.cpu_slots - 2

    @field_validator("serve", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value
