"""Compiled libraries, kept for fresh clones in $XDG_CACHE_HOME/modelrelay/libraries, by default below ~/.cache.

A run of suites compiles some 300 crates in several ways, and in a fresh clone each of them again. Cargo names a compiled crate by a
hash of its source, features, profile, flags and compiler, and finds it in another target folder too: a crate that does not fit is
compiled as usual. Crates of this repository are not kept.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelrelay" / "libraries"
# Sets of libraries that are kept: of this state of Cargo.lock, and of the one before.
KEPT_SETS = 2
OURS = "modelrelay"
# Folders below target, such as debug or x86_64-unknown-linux-gnu/release.
FINGERPRINTS = ("*/.fingerprint", "*/*/.fingerprint")
HASH = re.compile(r"-([0-9a-f]{16})(?:\.|$)")
# Large files that are never changed in place: a second name costs no space.
LINKED = (".rlib", ".rmeta", ".so")


def store(root):
    """Returns the folder for the libraries of this compiler and this repository's state."""
    compiler = subprocess.run(["rustc", "-vV"], capture_output=True, check=True).stdout
    state = b"".join((root / name).read_bytes() for name in ("Cargo.lock", "Cargo.toml"))
    return CACHE / "-".join(hashlib.sha256(text).hexdigest()[:8] for text in (compiler, state))


def restore(store, target):
    """Puts the kept libraries into the folders of `target` that have none. Returns their number.

    Without a set for this state, the newest one of the same compiler has most of them. What is left over from it goes with the
    next compiler, since all sets do."""
    if not store.exists():
        store = max(of_compiler(store), key=lambda folder: folder.stat().st_mtime, default=store)
    fresh = [kept for kept in folders(store) if not (target / kept / ".fingerprint").exists()]
    number = sum(transfer(store / kept, target / kept) for kept in fresh)
    if store.exists():
        os.utime(store)
    return number


def save(store, target):
    """Keeps the libraries of `target`, and forgets the sets that were used least recently. Returns the number of new ones."""
    number = sum(transfer(target / built, store / built) for built in folders(target))
    if store.exists():
        os.utime(store)
    sets = sorted(store.parent.glob("*"), key=lambda folder: folder.stat().st_mtime)
    for old in sets[:-KEPT_SETS]:
        shutil.rmtree(old, ignore_errors=True)
    return number


def of_compiler(store):
    return list(store.parent.glob(f"{store.name.split('-', maxsplit=1)[0]}-*"))


def folders(base):
    return sorted(found.parent.relative_to(base) for pattern in FINGERPRINTS for found in base.glob(pattern))


def transfer(source, destination):
    """Adds the libraries of one folder to another one. Returns their number."""
    units = {unit.name for unit in (source / ".fingerprint").iterdir() if not unit.name.startswith(OURS)}
    units -= {unit.name for unit in destination.glob(".fingerprint/*")}
    hashes = {match[1] for unit in units if (match := HASH.search(unit))}
    for file in (source / "deps").iterdir():
        if (match := HASH.search(file.name)) and match[1] in hashes:
            place(file, destination / "deps" / file.name)
    # The fingerprints last: without one, cargo ignores the rest.
    for part in ("build", ".fingerprint"):
        for unit in units:
            if (source / part / unit).exists():
                shutil.copytree(source / part / unit, destination / part / unit, symlinks=True, dirs_exist_ok=True)
    return len(units)


def place(source, destination):
    """Adds a file at once, because another run may add it too."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = destination.with_name(f"{destination.name}.{os.getpid()}")
    if not (source.suffix in LINKED and linked(source, fresh)):
        shutil.copy2(source, fresh)
    os.replace(fresh, destination)
    # The two may already have been the same file, and then stay both.
    fresh.unlink(missing_ok=True)


def linked(source, destination):
    """Gives a file a second name. False if that is impossible, for example because the cache is on another disk."""
    try:
        os.link(source, destination)
    except OSError:
        return False
    return True
