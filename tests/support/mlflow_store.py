"""Databases for MLflow, each a copy of one that MLflow made once a session, as it runs dozens of migrations."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.session import locked


def migrated_store(folder: Path, name: str = "mlflow.db") -> Path:
    """Put a database without experiments, runs and models into `folder`, and return its path.

    MLflow adds the default experiment when it first opens the copy, so that artifacts lie beside the copy.
    """
    with locked("mlflow-store") as session:
        template = session / "mlflow.db"
        if not template.exists():
            unfinished = template.with_suffix(".new")
            _make(unfinished)
            unfinished.rename(template)
    return Path(shutil.copyfile(template, folder / name))


def _make(path: Path) -> None:
    """Have MLflow make the tables of a new database."""
    # Its import takes seconds, and one process of a session needs it.
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"sqlite:///{path}")
    _initialize_tables(engine)
    engine.dispose()
