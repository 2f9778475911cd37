"""The newcomer's first minute: the demo's parts, its page and files; and the measures of `compare`."""

import itertools
import json
import math
import re
import sys

import pytest
import torch
from torch import nn

import coresieve as cs
from coresieve import cli
from coresieve.lab import compare, data, demo, page
from coresieve.methods import METHODS


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return demo.run(tmp_path_factory.mktemp("demo"), quick=True)


# --- The demo -----------------------------------------------------------------------------------------------


def test_the_three_parts_are_disjoint_and_scaled():
    parts = demo.digits()
    images = [tuple(row.tolist()) for part in (parts.train, parts.calibration, parts.test) for row in part]
    assert len(images) == 1797
    assert len(set(images)) == len(images)  # no image twice, within or across the parts
    assert parts.train.min() == 0
    assert parts.train.max() == 1


def test_training_reads_digits_and_leaves_global_randomness_alone():
    before = torch.random.get_rng_state()
    parts = demo.digits()
    model = demo.train(parts, epochs=15)
    assert torch.equal(before, torch.random.get_rng_state())
    assert compare.accuracy(model, [parts.test], parts.test_labels) > 0.93


def test_the_demo_measures_every_method_at_every_size(result):
    cells = {(row["method"], row["keep"]) for row in result.rows}
    assert cells == {(method, keep) for method in METHODS for keep in demo.QUICK_SIZES}
    assert all(row["failed"] is None for row in result.rows)
    assert all(row["kept"] <= row["keep"] * 1.005 for row in result.rows)
    assert result.accuracy > 0.95
    at = {(entry["method"], entry["keep"]): entry for entry in result.summary}
    # coarse on purpose: it fails when sampling is broken, not when another seed is unlucky
    assert at["corenet++", 0.3]["error"] < at["uniform", 0.3]["error"]


def test_the_small_file_loads_into_the_demos_network(result):
    small = cs.load(str(result.file), into=demo.network())
    assert small.report.method == demo.SAVED_METHOD
    assert small.report.kept <= demo.SAVED_SIZE * 1.005
    parts = demo.digits()
    assert compare.accuracy(small.model, [parts.test], parts.test_labels) > 0.5


def test_the_page_is_whole_in_itself(result):
    text = result.page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", text)
    assert not re.findall(r"https?://|@import|url\(", text)
    assert text.count("<svg") == 2
    assert text.count('class="curve"') == 2 * len(METHODS)
    assert "prefers-color-scheme: dark" in text
    assert "coresieve demo --quick" in text
    assert f"torch&nbsp;{torch.__version__.split('+')[0]}" in text
    assert "nan" not in text.lower().replace("nanjing", "")


def test_the_same_command_makes_the_same_page_and_network(result, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_command", lambda *_: result.command)
    again = demo.run(tmp_path, quick=True)
    assert again.page.read_bytes() == result.page.read_bytes()
    one, two = (cs.load(str(run.file), into=demo.network()).model.state_dict() for run in (result, again))
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_command_prints_one_table_and_where_the_files_are(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert cli.main(["demo", "--quick", "--seeds", "1", "--out", str(out)]) == 0
    told, err = capsys.readouterr()
    assert err == ""
    assert "index.html" in told
    assert "small.safetensors" in told
    table = [line for line in told.splitlines() if line.strip().startswith(tuple(METHODS))]
    assert len(table) == len(METHODS)
    assert max(map(len, table)) <= 80


def test_the_command_in_json(tmp_path, capsys):
    assert cli.main(["demo", "--quick", "--seeds", "1", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["original"]["parameters"] == 112_810  # 65 * 300 + 301 * 300 + 301 * 10
    assert set(told["versions"]) >= {"coresieve", "torch", "Python"}
    assert len(told["rows"]) == len(METHODS) * len(demo.QUICK_SIZES)


@pytest.mark.parametrize("missing", ["sklearn.datasets", "jinja2"])
def test_a_missing_extra_is_named(missing, monkeypatch, tmp_path, capsys):
    data.digits.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 1
    assert "pip install coresieve[lab]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--quick", "--out", str(tmp_path / "file" / "demo")]) == 1
    assert "a folder that can be made" in capsys.readouterr().err


# --- The measures -------------------------------------------------------------------------------------------


def test_judge_by_hand():
    f = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
    f_hat = torch.tensor([[3.5, 1.0], [3.0, 2.0]])
    told = compare.judge(f, f_hat, torch.tensor([0, 1]))
    assert told == {
        "l1_error": 1.75,  # (0.5 + 3) / 2
        "error": 3.5 / 6,
        "flips": 0.5,
        "accuracy": 0.5,
        "accuracy_drop": 0.5,
    }


def test_one_output_is_no_vote_and_zero_outputs_have_no_relative_error():
    told = compare.judge(torch.zeros(3, 1), torch.ones(3, 1))
    assert told == {"l1_error": 1.0, "error": None}


def test_outputs_are_taken_in_eval_mode_and_modes_are_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)).train()
    model[0].eval()
    x = torch.ones(4, 2)
    assert torch.equal(compare.outputs(model, [x]), model[0](x))
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


def test_summary_leaves_failures_out_of_the_mean():
    rows = [{"method": "a", "keep": 0.1, "seed": s, "error": e} for s, e in enumerate([1.0, None, 3.0])]
    rows[1]["failed"] = "too small"
    told = compare.summary(rows)[0]
    assert (told["error"], told["runs"], told["failed"]) == (2.0, 3, "too small")
    assert told["error_std"] == pytest.approx(math.sqrt(2))


# --- The page -----------------------------------------------------------------------------------------------


def entry(method, keep, value, std=None, **more):
    return {
        "method": method,
        "keep": keep,
        "kept": keep,
        "error": value,
        "error_std": std,
        "failed": None,
    } | more


def render(entries, **more):
    figure = page.Figure("error", "Error", "axis", log=True, **more)
    return page.render(
        [page.Section([figure], entries)], title="t", lead="l", facts=[], notes=[], command="c", versions=[]
    )


def test_a_method_without_a_style_gets_one_of_its_own():
    styles = page.palette(["corenet", "new", "newer"])
    assert len({style["light"] for style in styles.values()}) == 3
    assert len({style["id"] for style in styles.values()}) == 3


def test_a_failed_cell_is_told_in_the_table_and_missing_in_the_curve():
    text = render([entry("a", 0.5, 0.1, 0.2), entry("a", 0.1, None, failed="<too> small")])
    assert "&lt;too&gt; small" in text
    assert text.count('class="marker"') == 2  # the one point, and the name's
    assert "nan" not in text.lower()


@pytest.mark.parametrize("entries", [[entry("a", 0.5, None)], [entry("a", 0.5, 0.1)], [entry("a", 0.5, 0.0)]])
def test_a_page_of_almost_nothing(entries):
    assert "</html>" in render(entries)


def test_spreads_below_zero_stay_inside_a_log_figure():
    text = render([entry("a", 0.5, 0.1, 5.0), entry("a", 0.1, 0.2, 0.1)])
    ys = [
        float(y)
        for path in re.findall(r'class="band" d="M([^"]*)Z"', text)
        for _, y in map(str.split, path.split("L"))
    ]
    assert len(ys) == 4
    assert all(page.TOP <= y <= page.BOTTOM for y in ys)


@pytest.mark.parametrize("wanted", [[5.0] * 9, [0.0, 1.0, 99.0, 100.0], [100.0, 50.0, 49.0, 0.0], []])
def test_names_do_not_overlap_and_stay_in_the_frame(wanted):
    places = page.spaced(wanted, gap=11, low=0, high=100)
    ordered = sorted(places)
    assert all(b - a >= 11 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)
    assert all((a < b) >= (wanted[i] < wanted[j]) for i, a in enumerate(places) for j, b in enumerate(places))


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "index.html"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        page.write(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
