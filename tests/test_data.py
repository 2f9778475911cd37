"""Image sets: the three formats give the same numbers, bad files are refused, downloads resume and are checked."""

import functools
import gzip
import hashlib
import http.server
import io
import tarfile
import threading

import duckdb
import numpy as np
import pytest
import torch
from PIL import Image

from coresieve import cli
from coresieve.errors import FileError
from coresieve.lab import data, fetch, formats

RNG = np.random.default_rng(0)
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def images(n, shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8), RNG.integers(0, 10, n)


def idx_bytes(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder, train, test, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for split, (x, y) in (("train", train), ("t10k", test)):
        for what, array in (("images-idx3", x[:, 0]), ("labels-idx1", y)):
            raw = idx_bytes(array)
            path = folder / f"{split}-{what}-ubyte{'.gz' * zipped}"
            path.write_bytes(gzip.compress(raw) if zipped else raw)


def write_binary(folder, train, test):
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        np.concatenate([y.astype(np.uint8)[:, None], x.reshape(len(x), -1)], axis=1) for x, y in (train, test)
    ]
    for k, part in enumerate(np.array_split(records[0], 5), 1):
        (folder / f"data_batch_{k}.bin").write_bytes(part.tobytes())
    (folder / "test_batch.bin").write_bytes(records[1].tobytes())


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(folder, train, test, column="image"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, (x, y) in (("train", train), ("test", test)):
        with duckdb.connect() as db:
            db.execute("create table t (p blob, label bigint)")
            db.executemany(
                "insert into t values (?, ?)", [(png(i), int(k)) for i, k in zip(x, y, strict=True)]
            )
            rows = f"select {{'bytes': p, 'path': null::varchar}} as {column}, label from t"
            db.execute(f"copy ({rows}) to '{folder}/{split}-00000-of-00001.parquet' (format parquet)")


@pytest.fixture
def small_sets(monkeypatch, tmp_path):
    """Sets of the real shapes and few images; CORESIEVE_DATA is this folder."""
    monkeypatch.setenv("CORESIEVE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few = {name: data.SOURCES[name].__class__(**vars(data.SOURCES[name]) | {"images": (40, 12), "elsewhere": ()})
           for name in data.SOURCES}  # fmt: skip
    monkeypatch.setattr(data, "SOURCES", few)
    monkeypatch.setattr(data, "CALIBRATION", 10)
    data._parted.cache_clear()
    yield tmp_path
    data._parted.cache_clear()


def test_every_format_gives_the_same_parts(small_sets):
    train, test = images(40, COLOUR), images(12, COLOUR)
    found = {}
    for name, write in (("binary", write_binary), ("parquet", write_parquet)):
        folder = small_sets / name / "cifar10"
        write(folder, train, test)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CORESIEVE_DATA", str(small_sets / name))
            data._parted.cache_clear()
            assert data.find("cifar10")[0] == name
            found[name] = data.load("cifar10"), data.digest("cifar10")
    (one, digest), (two, other) = found.values()
    assert digest == other
    for part in ("train", "train_labels", "calibration", "test", "test_labels"):
        assert torch.equal(getattr(one, part), getattr(two, part))
    assert one.inputs == 3072


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_zipped_or_plain(small_sets, zipped):
    train, test = images(40, GREY), images(12, GREY)
    write_idx(small_sets / "MNIST" / "raw", train, test, zipped)
    parts = data.load("mnist")
    assert [len(x) for x in (parts.train, parts.calibration, parts.test)] == [30, 10, 12]
    mean, std = parts.train.mean(), parts.train.std(correction=0)
    assert (abs(float(mean)) < 1e-5, abs(float(std) - 1) < 1e-5) == (True, True)
    assert torch.equal(parts.test_labels, torch.from_numpy(test[1]))
    # no image is in two parts, and none is lost
    rows = {row.numpy().tobytes() for part in (parts.train, parts.calibration, parts.test) for row in part}
    assert len(rows) == 52


def test_each_channel_is_normalised_by_itself(small_sets):
    train, test = images(40, COLOUR), images(12, COLOUR)
    train[0][:, 0] //= 4
    write_binary(small_sets / "cifar10", train, test)
    x = data.load("cifar10").train.view(-1, 3, 1024)
    assert x.mean(dim=(0, 2)).abs().max() < 1e-5
    assert (x.std(dim=(0, 2), correction=0) - 1).abs().max() < 1e-5


def test_without_training_images_the_rest_is_the_same(small_sets):
    write_idx(small_sets / "mnist", images(40, GREY), images(12, GREY))
    whole, light = data.load("mnist"), data.load("mnist", train=False)
    assert len(light.train) == 0
    assert torch.equal(whole.calibration, light.calibration)
    assert torch.equal(whole.test, light.test)


def test_a_systems_package_is_found(small_sets, monkeypatch):
    there = small_sets / "usr" / "datasets"
    write_idx(there, images(40, GREY), images(12, GREY), zipped=True)
    here = data.SOURCES["fashion-mnist"]
    found = here.__class__(**vars(here) | {"elsewhere": (str(there),)})
    monkeypatch.setitem(data.SOURCES, "fashion-mnist", found)
    assert data.find("fashion-mnist")[1] == there
    assert len(data.load("fashion-mnist").test) == 12


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / "t10k-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b\x08 not really"), "a whole file"),
        (lambda f: (f / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"hello world")), "00 00 08"),
        (lambda f: (f / "t10k-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(idx_bytes(np.zeros((12, 28, 28)))[:-1])), "9,424 for shape"),
        (lambda f: (f / "t10k-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(idx_bytes(np.zeros(11)))), "n images"),
        (lambda f: (f / "t10k-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(idx_bytes(np.full(12, 10)))), "labels 0 to 9"),
        (lambda f: write_idx(f, images(39, GREY), images(12, GREY), zipped=True), "39 training images"),
        (lambda f: (f / "train-labels-idx1-ubyte.gz").unlink(), "no MNIST in"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(small_sets, spoil, told):
    folder = small_sets / "mnist"
    write_idx(folder, images(40, GREY), images(12, GREY), zipped=True)
    spoil(folder)
    with pytest.raises(FileError, match=told):
        data.load("mnist")


def test_other_damaged_formats(small_sets):
    folder = small_sets / "cifar10"
    write_binary(folder, images(40, COLOUR), images(12, COLOUR))
    (folder / "test_batch.bin").write_bytes(b"\0" * 3000)
    with pytest.raises(FileError, match="whole records of 3,073 bytes"):
        data.load("cifar10")
    path = small_sets / "x.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(FileError, match="a parquet file that can be read"):
        formats.parquet([path])
    duckdb.sql("select 1 as label, 'x' as name").write_parquet(str(small_sets / "y.parquet"))
    with pytest.raises(FileError, match="the columns label, name"):
        formats.parquet([small_sets / "y.parquet"])


def test_an_unknown_set():
    with pytest.raises(FileError, match="one of digits, mnist, fashion-mnist, cifar10"):
        data.load("imagenet")


def test_the_list_tells_what_is_where(small_sets, capsys):
    write_idx(small_sets / "mnist", images(40, GREY), images(12, GREY))
    assert cli.main(["data", "list"]) == 0
    told = capsys.readouterr().out
    assert "missing" in told
    assert "IDX" in told
    assert str(small_sets) in told.replace("\n", "")


# --- Downloads ----------------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; breaks off after `limit` bytes; knows ranges unless told not to."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    limit: int | None = None
    ranges = True
    asked: list = []  # noqa: RUF012

    def do_GET(self):
        raw = self.files.get(self.path.rpartition("/")[2])
        if raw is None:
            self.send_error(404)
            return
        wanted = self.headers.get("Range") if self.ranges else None
        self.asked.append(wanted)
        start = int(wanted.split("=")[1].rstrip("-")) if wanted else 0
        if start >= len(raw):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(raw) - start))
        self.end_headers()
        end = len(raw) if self.limit is None else min(len(raw), start + self.limit)
        self.wfile.write(raw[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(small_sets, monkeypatch):
    """A home for CIFAR-10 on this machine."""
    write_binary(small_sets / "made" / "cifar-10-batches-bin", images(40, COLOUR), images(12, COLOUR))
    packed = small_sets / "cifar-10-binary.tar.gz"
    with tarfile.open(packed, "w:gz") as file:
        file.add(small_sets / "made" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    raw = packed.read_bytes()
    handler = type(
        "Handler", (Server,), {"files": {packed.name: raw}, "limit": None, "ranges": True, "asked": []}
    )
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=functools.partial(httpd.serve_forever, 0.05), daemon=True).start()
    home = f"http://127.0.0.1:{httpd.server_port}/"
    source = data.SOURCES["cifar10"]
    files = ((packed.name, hashlib.md5(raw).hexdigest()),)
    monkeypatch.setitem(
        data.SOURCES, "cifar10", source.__class__(**vars(source) | {"home": home, "files": files})
    )
    yield handler
    httpd.shutdown()
    httpd.server_close()


def test_a_set_is_fetched_checked_and_unpacked(server, small_sets, capsys):
    assert cli.main(["data", "fetch", "cifar10"]) == 0
    assert len(data.load("cifar10").test) == 12
    assert server.asked == [None]
    assert cli.main(["data", "fetch", "cifar10"]) == 0
    assert server.asked == [None]  # what is there and right is not fetched again
    assert not list((small_sets / "cifar10").glob("*.part"))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_resumes(server, small_sets, ranges):
    server.limit, server.ranges = 50_000, ranges
    with pytest.raises(FileError, match="run it again"):
        fetch.fetch("cifar10")
    have = (small_sets / "cifar10" / "cifar-10-binary.tar.gz.part").stat().st_size
    assert 50_000 - fetch.PIECE < have <= 50_000
    server.limit = None
    fetch.fetch("cifar10")
    assert server.asked == ([None, f"bytes={have}-"] if ranges else [None, None])
    assert len(data.load("cifar10").test) == 12


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server, small_sets):
    server.files = {name: raw[:-1] + b"x" for name, raw in server.files.items()}
    with pytest.raises(FileError, match="whose MD5 is not"):
        fetch.fetch("cifar10")
    assert not list((small_sets / "cifar10").iterdir())


def test_no_network_is_said_in_clear_words(server, small_sets, monkeypatch, capsys):
    source = data.SOURCES["cifar10"]
    closed = source.__class__(**vars(source) | {"home": "http://127.0.0.1:9/"})
    monkeypatch.setitem(data.SOURCES, "cifar10", closed)
    assert cli.main(["data", "fetch", "cifar10"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "a machine with a network" in told
    server.files = {}
    monkeypatch.setitem(data.SOURCES, "cifar10", source)
    with pytest.raises(FileError, match="404"):
        fetch.fetch("cifar10")
