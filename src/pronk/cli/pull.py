"""`pronk pull`: fetch a model before it is needed."""

from __future__ import annotations

from pronk.cli import console, options


@options.verb(
    epilog="""\b
Examples:
  pronk pull smollm2:135m
  pronk pull stories15M
  pronk pull owner/name --revision main

Files go to the user's cache directory, or to $PRONK_HOME; a Hugging Face repository to that of
huggingface_hub, which also obeys HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT."""
)
@options.model_argument
@options.revision_option
def command(model: str, revision: str | None) -> None:
    """Download a model, and print where it is."""
    from pronk.checkpoint.hub import resolve as hub

    console.write(f"{hub.pull(model, revision=revision)}\n")
