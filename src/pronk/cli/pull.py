"""`pronk pull`: fetch a model before it is needed."""

from __future__ import annotations

from pronk.cli import console, options
from pronk.cli.verb import verb


@verb(
    epilog="""\b
Examples:
  pronk pull smollm2:135m
  pronk pull stories15M
  pronk pull owner/name --revision main

A model that pronk knows by name goes to the user's cache folder, or to $PRONK_HOME. A Hugging Face
repository goes to huggingface_hub's cache, which honours HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT."""
)
@options.model_argument
@options.revision_option
def command(model: str, revision: str | None) -> None:
    """Download a model, and print its path."""
    from pronk.checkpoint.hub import resolve as hub

    console.write(f"{hub.pull(model, revision=revision)}\n")
