"""What a run file may say under ``tracking: {mlflow: ...}``."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


class MlflowConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tracking_uri: str | None = None
    """Where MLflow keeps runs, for example ``http://host:5000``; default: the environment's
    MLFLOW_TRACKING_URI, else ``sqlite:///mlflow.db`` in the working directory."""
    experiment: str = Field("grpox", min_length=1)
    """Experiment the run belongs to; created when it does not exist."""
    run_name: str | None = None
    """Name of the run; default: one that MLflow invents."""
    log_completions: bool = True
    """Upload the completions that the run saves (logging.save_completions_every), and the report, which shows
    some, as artifacts."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Further tags of the run."""

    @field_validator("tracking_uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "holds a password, and the config is logged: use the environment's MLFLOW_TRACKING_URI, "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri
