"""What can be set, under which name and with which default?

Every setting is an environment variable `HALFRATE_<NAME>`; the README's table lists them all. Read
once at a process's entry point and handed down.
"""

from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.catalog import DEFAULT_CATALOG

MIB = 1024 * 1024
GIB = 1024 * MIB


def _user_cache() -> Path:
    return Path.home() / ".cache" / "halfrate" / "models"


class Files(BaseSettings):
    """Where things lie on this machine; needs no running part."""

    model_config = SettingsConfigDict(env_prefix="HALFRATE_", frozen=True, extra="ignore")

    home: Path = Field(Path(".halfrate"), description="State of the embedded stack.")
    models: Path = Field(
        default_factory=_user_cache, description="Model cache, shared by all homes."
    )
    catalog: Path = Field(DEFAULT_CATALOG, description="The models.toml in use.")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR.")


class UnknownParameters(StrEnum):
    """What comes of a parameter of a line's body that no endpoint of the reference has."""

    ERROR = "error"
    IGNORE = "ignore"


class Limits(Files):
    """What a file and a line may hold; needs no running part."""

    max_file_bytes: PositiveInt = Field(512 * MIB, description="Largest POST /v1/files.")
    max_upload_bytes: PositiveInt = Field(8 * GIB, description="Largest file of POST /v1/uploads.")
    max_part_bytes: PositiveInt = Field(64 * MIB, description="Largest part of an upload.")
    max_body_bytes: PositiveInt = Field(1 * MIB, description="Largest JSON body of a request.")
    max_lines: PositiveInt = Field(1_000_000, description="Most lines of a batch.")
    max_line_bytes: PositiveInt = Field(10 * MIB, description="Longest line of an input file.")
    max_inputs: PositiveInt = Field(2_048, description="Most texts to be encoded of a line.")
    max_errors: PositiveInt = Field(1_000, description="Validation errors kept of a batch.")
    unknown_parameters: UnknownParameters = Field(
        UnknownParameters.ERROR,
        description="error: a parameter that nobody knows fails its line. ignore: it is dropped.",
    )
    file_days: PositiveFloat = Field(30, description="Days until a batch file expires by itself.")


class Settings(Limits):
    """What the API and the workers need: the parts by URL, the limits and the rhythm."""

    database_url: SecretStr = Field(description="postgresql://user:password@host:port/database")
    redis_url: SecretStr = Field(description="redis://:password@host:port/0")
    s3_endpoint_url: str | None = Field(None, description="None: AWS's own endpoint.")
    s3_region: str = Field("us-east-1", description="Region of the bucket.")
    s3_bucket: str = Field("halfrate", min_length=3, description="Bucket that holds all bytes.")
    s3_access_key_id: SecretStr | None = Field(None, description="None: boto3's own chain.")
    s3_secret_access_key: SecretStr | None = Field(None, description="None: boto3's own chain.")

    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="Port of the API.")
    database_pool: PositiveInt = Field(16, description="Database connections per process.")

    requests_per_minute: PositiveInt | None = Field(
        None, description="Requests a minute that a key may make; unset: any number."
    )
    max_requests: PositiveInt = Field(
        1_000, description="Requests an API process works on at once; more get 503."
    )
    max_uploads: PositiveInt = Field(
        64, description="Uploads an API process takes in at once, of ≤18 MiB each; more get 503."
    )
    metrics_token: Annotated[SecretStr, Field(min_length=16)] | None = Field(
        None,
        description="Bearer token of GET /metrics, at least 16 characters; unset: only callers on"
        " the API's own machine may read it.",
    )

    upload_hours: PositiveFloat = Field(1, description="Hours until an upload expires.")
    idempotency_hours: PositiveFloat = Field(24, description="Hours an Idempotency-Key is kept.")

    webhook_private_addresses: bool = Field(
        False, description="Webhooks may reach private addresses, such as this network's own."
    )

    lease_s: PositiveFloat = Field(30, description="A claim falls after so long without renewal.")
    renew_s: PositiveFloat = Field(10, description="A claim is renewed this often.")
    flush_s: PositiveFloat = Field(5, description="Finished lines are written back this often.")
    tick_s: PositiveFloat = Field(2, description="Beat compares work with workers this often.")
    shard_s: PositiveFloat = Field(5, description="Work planned into one shard, in seconds.")
    max_attempts: PositiveInt = Field(3, description="Tries of a line that may be tried again.")

    @property
    def lease(self) -> timedelta:
        """How long a claim holds without being renewed."""
        return timedelta(seconds=self.lease_s)


class PartUrls(BaseSettings):
    """Which parts are brought by the user? A part whose URL is set is not started by `up`."""

    model_config = SettingsConfigDict(env_prefix="HALFRATE_", frozen=True, extra="ignore")

    database_url: SecretStr | None = None
    redis_url: SecretStr | None = None
    s3_endpoint_url: str | None = None
