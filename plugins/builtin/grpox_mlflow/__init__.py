"""MLflow tracking: parameters, metrics, completions and the outcome of a run, without slowing a step."""
