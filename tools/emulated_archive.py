"""The archives a test build leaves in build/emulated: csrc/launch with the emulator, and the bindings."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Folders of csrc that each is made of.
LAUNCH = ("core", "kernels", "launch", "params", "simt")
BINDINGS = ("bind", "core", "params")


def archive(name: str, folders: tuple[str, ...]) -> Path | None:
    """One of them, if it is no older than what it is made of; made anew by a build, never by itself."""
    path = REPOSITORY / "build" / "emulated" / f"lib{name}.a"
    sources = [source for folder in folders for source in (REPOSITORY / "csrc" / folder).rglob("*.*")]
    newest = max(source.stat().st_mtime for source in sources)
    return path if path.exists() and path.stat().st_mtime >= newest else None


def emulated_archive() -> Path:
    """What programs that run the launch code are linked with."""
    path = archive("paged_ops_emulated", LAUNCH)
    if path is None:
        raise RuntimeError("libpaged_ops_emulated.a is missing or older than csrc: run `make build`")
    return path
