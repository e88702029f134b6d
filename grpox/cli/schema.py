"""`grpox schema`: the run file's JSON schema."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the run file's JSON schema, the parameters of every installed component included.

    \b
    An editor that knows it completes and checks run files as you type.
    With the YAML language server, write the schema to a file:
      grpox schema > grpox.schema.json
    and name that file in the first line of run.yaml:
      # yaml-language-server: $schema=grpox.schema.json
    """
    from grpox.cli.arguments import discovered
    from grpox.plugins.registry import Registry
    from grpox.runfile.schema import run_schema

    typer.echo(json.dumps(run_schema(Registry(discovered())), indent=2))
