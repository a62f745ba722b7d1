"""`pronk push`: a model, an adapter or a run's result, to the Hugging Face hub."""

from __future__ import annotations

import click

from pronk.cli import console
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb


@verb(
    epilog="""\b
Examples:
  pronk push mine me/mine --dry-run
  pronk push mine me/mine
  pronk push smollm2-mine.gguf me/mine-gguf --public

FOLDER is a model in Hugging Face's layout, a LoRA adapter, the folder of a training run (its adapter, or its
model/, with its README.md), or one GGUF file. Weights, configuration, tokenizer, template, card and licence
go there; checkpoints, logs and options do not. The token is huggingface_hub's: HF_TOKEN, or that of
`hf auth login`; HF_ENDPOINT is honoured."""
)
@click.argument("folder", type=NAME)
@click.argument("repository", type=NAME)
@click.option(
    "--private/--public",
    default=True,
    show_default=True,
    help="Make a new repository private, or public; one that is there stays what it is.",
)
@click.option(
    "--revision",
    type=NAME,
    metavar="BRANCH",
    help="Commit to this branch, which must be there.  [default: main]",
)
@click.option("--message", type=NAME, metavar="TEXT", help="Say this of the commit.  [default: the folder's name]")
@click.option("--dry-run", is_flag=True, help="Print what would be uploaded, and send nothing.")
def command(
    folder: str, repository: str, private: bool, revision: str | None, message: str | None, dry_run: bool
) -> None:
    """Upload a model or an adapter to the Hugging Face hub.

    It is one commit, whose address is printed; a REPOSITORY (owner/name) that is not there yet is made.
    """
    from pronk.checkpoint.hub import upload

    found = upload.push(folder, repository, private=private, revision=revision, message=message, dry_run=dry_run)
    console.write(found if dry_run else f"{found}\n")
