"""The page of one small network: what it tells, that it is whole in itself, and how a browser lays it out."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import coresieve as cs
from coresieve import storage
from coresieve.certificate import Certificate, Claim
from coresieve.compact import pack
from coresieve.compact.bounds import least
from coresieve.lab import network_page, sizes
from coresieve.report import LayerReport, Report
from coresieve.rounding import Rounding, rounded
from networks import build
from test_cli import answer, folder  # noqa: F401  (a fixture)

COMPRESS = ["compress", "nets:build", "--weights", "weights.safetensors", "--data", "x.npy", "--keep", "0.3"]
BENCH = ["bench", "nets:build", "small.safetensors", "--weights", "weights.safetensors", "--seconds", "0.02"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def whole_in_itself(text):
    return not re.findall(
        r"(?:src|href)\s*=\s*[\"'](?!data:)|https?:|@import|url\(|<script|<link(?! rel=\"icon\")", text
    )


# --- What it tells ------------------------------------------------------------------------------------------


@pytest.fixture
def compact(folder, capsys):  # noqa: F811
    assert answer(capsys, [*COMPRESS, "--compact", "--bits", "8"])[0] == 0
    return folder / "small.safetensors"


def test_inspect_writes_the_bytes_of_each_layer(compact, capsys):
    code, out, err = answer(capsys, ["inspect", "small.safetensors", "--page", "out.html"])
    assert (code, err) == (0, "")
    assert out.rstrip().endswith("Page  out.html")
    text = Path("out.html").read_text()
    assert whole_in_itself(text)
    assert text.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in text
    about = storage.read_header(compact)["file"]
    for name in ("0", "2", "4"):
        size = sum(t["bytes"] for n, t in about["tensors"].items() if n.startswith(f"{name}."))
        row = re.search(rf'<tr><th scope="row">{name}</th>(.*)</tr>', text)
        assert row is not None
        assert f"<td>{size:,}</td>" in row[1]
    header = about["bytes"] - sum(t["bytes"] for t in about["tensors"].values())
    assert f"<td>{header:,}</td>" in text
    assert f"<td>{about['bytes']:,}</td>" in text
    for told in ("positions", "values, coded", "header", "bound, bits", "8 bits", "A priori error bound",
                 "The file carries none", "coresieve inspect small.safetensors --page out.html"):  # fmt: skip
        assert told in text
    assert "Latency" not in text


def test_bench_adds_times_and_memory(compact, capsys):
    code, _, err = answer(capsys, [*BENCH, "--batch", "1,8", "--page", "out.html", "--json"])
    assert (code, err) == (0, "")
    text = Path("out.html").read_text()
    assert whole_in_itself(text)
    for told in ("batch of 1<", "batch of 8<", "accelerated", "as it is", "Memory of the weights", "How each layer",
                 "file of the original", "--batch 1,8"):  # fmt: skip
        assert told in text
    assert text.count('class="spread" d=') == 4


def test_bench_of_another_tools_file(folder, capsys):  # noqa: F811
    shutil.copy("weights.safetensors", "small.safetensors")
    assert answer(capsys, [*BENCH, "--batch", "1", "--page", "out.html"])[0] == 0
    assert "A network without a report." in Path("out.html").read_text()


def claim(**more):
    facts = {
        "observed": 0.01,
        "bound": 0.0432,
        "points": 400,
        "alpha": 0.025,
        "counts": {"changed": 4},
        "goal": 0.05,
    }
    return Claim(**{"name": "flips", "sentence": "at most 4.32 % of fresh inputs change", **facts, **more})


def certificate(**more):
    claims = [claim(), claim(name="coreset", sentence="too few points", observed=None, bound=None, goal=0.1)]
    facts = {"procedure": "Exact limits.", "digests": {"small": "ab" * 32}, "notes": ["mind this"],
             "a_priori": "none: vacuous", "tested": [{"keep": 0.1, "passed": True}], "version": "0.1"}  # fmt: skip
    return Certificate(claims=claims, confidence=0.95, points=400, **{**facts, **more})


def saved(path, model, **more):
    storage.save_model(path, model, {}, **more)
    return path


def test_the_certificate_is_told_in_full_with_the_a_priori_bound_beside_it(tmp_path):
    path = saved(tmp_path / "small.safetensors", nn.Linear(3, 2))
    text = network_page.render(path, "c", report=None, certificate=certificate())
    for told in ("at most 4.32 %", "Goal 5 %", ">met<", "NOT met", "nothing is claimed", "95 %", "400 held-out",
                 "97.5 %", "Exact limits.", "independent draws", "Note: mind this.", "none: vacuous", "ab" * 32,
                 "changed: 4", "0.1</th><td>yes"):  # fmt: skip
        assert told in text, told


def test_what_a_file_names_is_text_and_no_markup(tmp_path):
    model = nn.Module()
    evil = "<script>alert(1)</script>"
    model.register_module(evil, nn.Linear(3, 2))
    path = saved(tmp_path / "<b>.safetensors", model)
    line = LayerReport(evil, 2, 4, 8, 3)
    report = Report(evil, evil, 0, evil, layers=[line], notes=[evil], guarantee=evil)
    text = network_page.render(
        path, evil, report=report, certificate=certificate(notes=[evil], a_priori=evil)
    )
    assert whole_in_itself(text)
    assert "<b>.saf" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("model", [nn.Module(), nn.Linear(2, 2), nn.BatchNorm1d(3)])
def test_a_page_of_almost_nothing(tmp_path, model):
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    text = network_page.render(
        saved(tmp_path / "s.safetensors", model, compact=True), "c", report=None, certificate=None
    )
    assert "</html>" in text
    assert not re.search(r"\b(?:nan|inf)\b", text)


@pytest.mark.parametrize("ratios", [(0.2, 0.5, 0.6), (30.0, 40.0, 50.0), (0.9, 1.0, 1.1)])
def test_bars_stay_in_their_frame_and_end_within_their_spread(ratios):
    row = {"batch": 64, "milliseconds": {"original": 1.0, "compressed": 1.1, "accelerated": 1 / ratios[1]},
           "compressed_faster": (0.8, 0.9, 1.2), "accelerated_faster": ratios}  # fmt: skip
    name, bars = network_page._latency(row)
    assert name == "batch of 64"
    original, _, fast = bars
    assert fast.spread[0] <= fast.parts[0].width <= fast.spread[1] <= 100
    assert fast.parts[0].width / original.parts[0].width == pytest.approx(1 / ratios[1], rel=0.01)


def test_a_bar_of_bytes_is_as_long_as_its_parts(tmp_path):
    small = cs.compress(*build("plain"), keep=0.3, method="corenet+", seed=0)
    small.save(tmp_path / "s.safetensors", compact=True)
    layers = sizes.by_layer(sizes.weighed(tmp_path / "s.safetensors"), small.report.layers)
    assert sum(layer.kept for layer in layers) == small.report.parameters_after
    assert [layer.before for layer in layers] == [4 * line.rows * line.edges for line in small.report.layers]
    bars = network_page._went(layers, (tmp_path / "s.safetensors").stat().st_size)
    assert max(sum(part.width for part in bar.parts) for bar in bars) == pytest.approx(100, abs=0.1)
    for bar in bars:
        ends = [part.start + part.width for part in bar.parts]
        assert all(a == pytest.approx(b.start, abs=0.02) for a, b in zip(ends, bar.parts[1:], strict=False))


# --- The bound ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "low", "high"), [
    ({"bits": 8}, 1.0, 1.06), ({"bits": 4}, 1.0, 1.12), ({"dtype": "float16"}, 0.75, 1.0), ({}, 0.75, 1.0),
])  # fmt: skip
def test_the_coder_comes_near_the_bound(how, low, high):
    g = torch.Generator().manual_seed(0)
    w = torch.where(torch.rand(300, 400, generator=g) < 0.1, torch.randn(300, 400, generator=g), 0.0)
    rounding = Rounding.of(**how)
    w = w if rounding is None else rounded(w, rounding)
    bound = least(w, "" if rounding is None else str(rounding))
    assert bound.kept == int(w.count_nonzero())
    assert low <= len(pack(w).code) / bound.bytes <= high


# --- What it refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small.safetensors", "x.npy", "out", "folder.html"])
def test_a_page_never_takes_the_name_of_something_else(compact, capsys, name):
    Path("folder.html").mkdir()
    before = compact.read_bytes()
    for command in (["inspect", "small.safetensors"], [*BENCH, "--batch", "1"]):
        code, out, err = answer(capsys, [*command, "--page", name])
        assert (code, out) == (1, "")
        assert f"--page {name}" in err
        assert "Try:" in err
    assert compact.read_bytes() == before


def test_without_jinja2_the_word_is_clear_and_comes_before_the_work(compact, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    monkeypatch.setattr("coresieve.inputs.load_model", lambda *_: pytest.fail("worked first"))
    for command in (["inspect", "small.safetensors"], [*BENCH, "--batch", "1"]):
        code, _, err = answer(capsys, [*command, "--page", "out.html"])
        assert code == 1
        assert "coresieve[lab]" in err
    assert answer(capsys, ["inspect", "small.safetensors"])[0] == 0


# --- In a browser -------------------------------------------------------------------------------------------

WIDTHS = (390, 1200)
MEASURE = """
<script>
addEventListener("load", () => {
  const told = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, view = frame.contentWindow, width = page.documentElement.clientWidth;
    const inside = e => e.closest(".wide") || e.closest("pre") || e.closest("svg");
    const right = e => e.getBoundingClientRect().right;
    const out = [...page.querySelectorAll("body *")].filter(e => !inside(e) && right(e) > width + 0.5);
    const color = e => [view.getComputedStyle(e).color, view.getComputedStyle(page.body).backgroundColor];
    return {width, scroll: page.documentElement.scrollWidth, out: out.map(e => e.outerHTML.slice(0, 80)),
            dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
            tables: [...page.querySelectorAll(".wide")].map(e => [e.clientWidth, e.scrollWidth]),
            bars: [...page.querySelectorAll(".bar svg")].map(e => e.getBoundingClientRect().width),
            colors: ["h1", ".soft", ".told b", "td", ".claim p"].map(s => color(page.querySelector(s)))};
  });
  document.body.innerHTML = "<pre id=told></pre>";
  document.getElementById("told").textContent = JSON.stringify(told);
});
</script>
"""


def browse(folder, how):  # noqa: F811
    run = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder}/browser",
    ]
    done = subprocess.run([*run, *how], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def luminance(color):
    parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
    return sum(k * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
               for k, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))  # fmt: skip


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def long_page(tmp_path_factory):
    """A page with all parts, and long names."""
    folder = tmp_path_factory.mktemp("page")  # noqa: F811
    model = nn.Module()
    model.encoder_with_quite_a_long_name_of_its_own = nn.Sequential(
        nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 4)
    )
    path = saved(folder / ("a_network_of_" + "many_words_" * 6 + ".safetensors"), model, compact=True)
    lines = [LayerReport(f"encoder_with_quite_a_long_name_of_its_own.{i}", 40, 65, 2600, 260, draws=10**6, error=0.3)
             for i in (0, 2)]  # fmt: skip
    report = Report("corenet++", "keep=0.1", 0, "0.1", layers=lines, notes=["it stays exact: " + "x" * 90])
    rows = [{"batch": n, "milliseconds": {"original": 1234.5, "compressed": 1300.0, "accelerated": 98.7},
             "per_second": {"original": 1e6, "accelerated": 1e7}, "compressed_faster": (0.5, 0.9, 1.1),
             "accelerated_faster": (9.1, 12.5, 14.0), "largest_difference": 1e-6} for n in (1, 512)]  # fmt: skip
    sizes = {"memory": [10**7, 10**6], "file": [10**7, path.stat().st_size]}
    timing = network_page.Timing(rows, sizes, 2, "Batch of 1: 12.5 times faster than the original.")
    text = network_page.render(path, "coresieve bench " + "word " * 40, report=report, certificate=certificate(),
                               timing=timing)  # fmt: skip
    (folder / "page.html").write_text(text)
    return folder


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: how the page is laid out is not seen"
)
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_lays_it_out_on_a_phone_and_a_desk(long_page, dark):
    text = (long_page / "page.html").read_text()
    frames = "".join(
        f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{html.escape(text)}"></iframe>'
        for w in WIDTHS
    )
    (long_page / "frames.html").write_text(f"<!doctype html><body>{frames}{MEASURE}")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom = browse(long_page, [scheme, "--dump-dom", (long_page / "frames.html").as_uri()])
    told = json.loads(html.unescape(re.search(r'<pre id="told">(.*?)</pre>', dom, re.S)[1]))
    if any(frame["dark"] != dark for frame in told):
        pytest.skip("this chromium does not take the colour scheme that is asked for")
    assert [frame["width"] for frame in told] == list(WIDTHS)
    for frame in told:
        assert frame["scroll"] <= frame["width"]
        assert frame["out"] == []
        assert min(frame["bars"]) > 200
        for ink, paper in frame["colors"]:
            assert contrast(ink, paper) >= 4.5
            assert (luminance(paper) < 0.1) == dark
    phone, desk = told
    assert any(scroll > seen for seen, scroll in phone["tables"])  # wide tables are swiped
    assert any(scroll <= seen for seen, scroll in desk["tables"])


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not drawn")
@pytest.mark.parametrize("width", WIDTHS)
def test_a_screenshot_shows_bars(long_page, width):
    image = pytest.importorskip("matplotlib.image")
    shot = long_page / f"{width}.png"
    browse(
        long_page, [f"--window-size={width},3000", f"--screenshot={shot}", (long_page / "page.html").as_uri()]
    )
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (3000, width)
    for color in ((107, 114, 128), (11, 107, 203), (224, 122, 0)):  # before, after, header
        assert (abs(pixels - color).max(axis=2) <= 1).sum() > 100
