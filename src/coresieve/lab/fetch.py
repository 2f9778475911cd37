"""Download a data set from its usual public home: resumed where it stopped, refused on a wrong checksum.

What has arrived of a file stays beside it as `<name>.part`, and the next try asks for the rest. pooch checks the MD5; a
file that is there and right is not fetched again.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab.data import SOURCES, folder, source

Tick = Callable[[str, int, int | None], None]  # (file, bytes here, bytes in all)
PIECE = 1 << 13  # the last one is lost when a connection breaks
TIMEOUT = 30  # seconds without a byte


def fetch(name: str, into: Path | None = None, tick: Tick = lambda *_: None) -> Path:
    """The set's files below `into` (CORESIEVE_DATA, or the user's cache folder); the folder they are in."""
    if name == "digits":
        raise FileError(
            "digits, which ship with scikit-learn", f"one of {', '.join(SOURCES)}", "using them as they are"
        )
    here = source(name)
    place = (into or folder()) / here.folders[0]
    for file, md5 in here.files:
        path = _file(f"{here.home}{file}", md5, place, tick)
        if file.endswith(".tar.gz"):
            _unpack(path)
    return place


def _file(url: str, md5: str, place: Path, tick: Tick) -> Path:
    try:
        import pooch
        import requests
    except ImportError as reason:
        raise MissingExtraError(
            "a download without pooch", "what fetches and checks it", "pip install coresieve[lab]"
        ) from reason
    name = url.rpartition("/")[2]
    part = place / f"{name}.part"

    def resume(url: str, output_file: Any, _: Any) -> None:
        """Ask for what is missing of the part that is here, then hand over the whole."""
        _download(requests, url, part, lambda have, of: tick(name, have, of))
        Path(output_file).write_bytes(part.read_bytes())

    pooch.get_logger().setLevel("ERROR")  # what happens is told by the bar and by errors
    try:
        place.mkdir(parents=True, exist_ok=True)
        found = Path(pooch.retrieve(url, f"md5:{md5}", name, place, downloader=resume))  # pyright: ignore[reportArgumentType]
    except requests.RequestException as reason:
        hint = "a machine with a network, then run it again (what has arrived stays), or copy the files there by hand"
        raise FileError(f"{url} ({_short(reason)})", "an answer from the network", hint) from reason
    except ValueError as reason:  # pooch: the hash does not match
        part.unlink(missing_ok=True)
        raise FileError(f"{url}, whose MD5 is not {md5}", "the file as it was published",
                        "running it again; if it stays so, the file has changed there") from reason  # fmt: skip
    except OSError as reason:
        raise FileError(
            f"{place} ({reason.strerror})", "a folder that can be written", "--into another one"
        ) from reason
    part.unlink(missing_ok=True)
    return found


def _download(requests: Any, url: str, part: Path, tick: Callable[[int, int | None], None]) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with requests.get(url, stream=True, timeout=TIMEOUT, headers=headers) as answer:
        if answer.status_code == 416:  # nothing is missing: the checksum will tell whether it is right
            return
        answer.raise_for_status()
        resumed = answer.status_code == 206
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        of = None if length is None else have + int(length)
        with part.open("ab" if resumed else "wb") as file:
            for piece in answer.iter_content(PIECE):
                file.write(piece)
                have += len(piece)
                tick(have, of)
    if of is not None and have < of:
        raise requests.ConnectionError(f"the connection ended after {have:,} of {of:,} bytes")


def _short(reason: Exception) -> str:
    text = str(reason).split("(Caused by", 1)[-1].strip(") ")
    return f"{type(reason).__name__}: {text[:160]}"


def _unpack(archive: Path) -> None:
    """What is in it, beside it; a name that would lead elsewhere is refused."""
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(archive.parent, filter="data")
    except (tarfile.TarError, OSError, EOFError) as reason:
        raise FileError(
            f"{archive} ({reason})", "an archive that can be unpacked", f"rm {archive}, fetch again"
        ) from reason
