"""``rag-demo snapshot``: copies of an index that never change."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import click

from rag_demo.commands.options import folder_argument, open_saved, say

_LATEST = "latest"


@click.command()
@folder_argument
@click.option(
    "--to",
    "folder_of_snapshots",
    required=True,
    metavar="SNAPSHOTS",
    type=click.Path(path_type=Path),
    help="Folder for 000001, 000002, ... and the link latest.",
)
def snapshot(folder: Path, folder_of_snapshots: Path) -> None:
    """Copy the index in DIR into a new numbered folder, which never changes.

    Replicas serve SNAPSHOTS/latest, or fetch the newest number. Other processes may change DIR
    meanwhile.
    """
    folder_of_snapshots.mkdir(parents=True, exist_ok=True)
    numbers = [int(each.name) for each in folder_of_snapshots.iterdir() if each.name.isdigit()]
    target = folder_of_snapshots / f"{max(numbers, default=0) + 1:06}"
    unfinished = folder_of_snapshots / f".{target.name}-{os.getpid()}"
    try:
        with contextlib.closing(open_saved(folder)) as store:
            store.save(unfinished, store.manifest.model)
            count = store.count
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    link = folder_of_snapshots / f".{_LATEST}-{os.getpid()}"
    link.symlink_to(target.name)
    link.replace(folder_of_snapshots / _LATEST)
    say(f"{target}: {count} texts")
