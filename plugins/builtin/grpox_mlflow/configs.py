"""Keys of a run file under ``tracking.mlflow``."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from grpox_mlflow.naming import model_name_problem


class MlflowConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tracking_uri: str | None = None
    """Address of MLflow's store, for example ``http://host:5000``; default: MLFLOW_TRACKING_URI in the
    environment, else ``sqlite:///mlflow.db`` in the working directory."""
    experiment: str = Field("grpox", min_length=1, max_length=250)
    """Experiment of the run; created if it does not exist."""
    run_name: str | None = Field(None, min_length=1, max_length=250)
    """Name of the run; default: the name of the run's folder, ``mine`` of ``runs/mine``."""
    log_completions: bool = True
    """Upload as artifacts the saved completions (logging.save_completions_every) and tokens (record.tokens), a
    table of some completions, and the report."""
    traces: int = Field(0, ge=0, le=64)
    """Number of rollouts of each generation batch to log as traces, with their rewards as feedback; MLflow
    accepts about thirteen per second."""
    register_as: str | None = None
    """Name of a registered model; the run's checkpoints and trained model become its versions. Default:
    register none."""
    upload_gib: float = Field(1.0, ge=0)
    """Largest size in GiB of a registered model whose files are uploaded; the version of a larger model or of a
    checkpoint points to its folder."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Additional tags of the run."""

    @field_validator("register_as")
    @classmethod
    def _a_model_name(cls, name: str | None) -> str | None:
        if name is not None and (problem := model_name_problem(name)):
            raise ValueError(problem)
        return name

    @field_validator("tracking_uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "contains a password, but the config is logged: use MLFLOW_TRACKING_URI in the environment, "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri
