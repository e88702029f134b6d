"""Keys of a run file under ``tracking.mlflow``."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from grpox_mlflow.naming import model_name_problem


class MlflowConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tracking_uri: str | None = None
    """Where MLflow keeps runs, for example ``http://host:5000``; default: the environment's
    MLFLOW_TRACKING_URI, else ``sqlite:///mlflow.db`` in the working directory."""
    experiment: str = Field("grpox", min_length=1, max_length=250)
    """Experiment the run belongs to; created when it does not exist."""
    run_name: str | None = Field(None, min_length=1, max_length=250)
    """Name of the run; default: one that MLflow invents."""
    log_completions: bool = True
    """Upload the completions that the run saves (logging.save_completions_every), and the report and a table,
    which show some, as artifacts."""
    traces: int = Field(0, ge=0, le=64)
    """Rollouts drawn from each generation batch that become traces, their rewards feedback; MLflow takes about
    thirteen a second."""
    register_as: str | None = None
    """Name of the registered model whose versions the run's checkpoints and its trained model become; default:
    none are registered."""
    upload_gib: float = Field(1.0, ge=0)
    """Size up to which the files of a registered model are uploaded; of a larger one, and of checkpoints, the
    version points to the folder."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Further tags of the run."""

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
                "holds a password, and the config is logged: use the environment's MLFLOW_TRACKING_URI, "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri
