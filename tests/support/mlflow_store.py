"""Databases for MLflow, each a copy of one that MLflow made once a session, as it runs dozens of migrations."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from support import processes
from support.session import locked

TESTS = Path(__file__).parents[1]
APART = "import sys; sys.path.insert(0, {tests!r}); from support.mlflow_store import make; make({path!r})"


def migrated_store(folder: Path, name: str = "mlflow.db") -> Path:
    """Put a database without experiments, runs and models into `folder`, and return its path.

    MLflow adds the default experiment when it first opens the copy, so that artifacts lie beside the copy.
    """
    with locked("mlflow-store") as session:
        template = session / "mlflow.db"
        if not template.exists():
            unfinished = template.with_suffix(".new")
            if "mlflow" in sys.modules:
                make(str(unfinished))
            else:  # which takes seconds to import, and a worker whose runs are forked can do without it
                done = processes.run("-c", APART.format(tests=str(TESTS), path=str(unfinished)), cwd=session)
                assert done.returncode == 0, done.stderr
            unfinished.rename(template)
    return Path(shutil.copyfile(template, folder / name))


def make(path: str) -> None:
    """Have MLflow make the tables of a new database."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"sqlite:///{path}")
    _initialize_tables(engine)
    engine.dispose()
