"""MLflow tracking: parameters, metrics, completions and the fate of a run, without slowing a step."""
