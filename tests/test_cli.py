"""The commands as a person or a script meets them: what they print, write and refuse, and exit codes."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import coresieve as cs
from coresieve import cli, cli_arguments, storage, terminal

NETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))

def other():
    return nn.Sequential(nn.Linear(12, 41), nn.ReLU(), nn.Linear(41, 4))

def chatty():
    print("building")
    return build()

def broken():
    raise RuntimeError("no config\\nat all")

def leaves():
    raise SystemExit(0)

class Leaves(nn.Sequential):
    def forward(self, x):
        raise SystemExit(0)

def leaves_later():
    return Leaves(*build())

def regression():
    return nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))

def average():
    model = build()
    model.register_forward_hook(lambda module, args, output: output.mean())
    return model

def needs(width):
    return nn.Linear(width, width)

def list_of():
    return [nn.Linear(2, 2)]

ready = build()
number = 3

class Zoo:
    @staticmethod
    def small():
        return build()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model's code, its weights and some data, being the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    (tmp_path / "nets.py").write_text(NETS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
        x = torch.rand(400, 12)
    save_model(model, "weights.safetensors")
    np.save("x.npy", x.numpy())
    np.save("y.npy", model(x).argmax(1).numpy())
    return tmp_path


COMPRESS = ["compress", "nets:build", "--weights", "weights.safetensors", "--data", "x.npy"]
COMPARE = ["compare", "nets:build", "--weights", "weights.safetensors", "--data", "x.npy"]


def answer(capsys, tokens):
    """(exit code, stdout, stderr)"""
    code = cli.main(tokens)
    return code, *capsys.readouterr()


# --- Help ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [["--help"], ["compress", "--help"], ["--version"]])
def test_help_is_quick_because_it_imports_nothing_heavy(tokens):
    heavy = {"torch", "numpy", "numba", "scipy", "matplotlib", "jinja2", "sklearn", "safetensors"}
    code = (
        f"import sys; from coresieve.cli import main; main({tokens}); exit(len({heavy} & set(sys.modules)))"
    )
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    # about 0.2 s of the processor, however busy the machine is
    assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 0.6
    assert "coresieve" in run.stdout or cs.__version__ in run.stdout


def test_python_m_is_the_same_command():
    run = subprocess.run([sys.executable, "-m", "coresieve", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, cs.__version__)


def test_help_tells_the_exit_codes_and_every_method(capsys):
    from coresieve.methods import METHODS

    code, out, _ = answer(capsys, ["compress", "--help"])
    assert code == 0
    assert "130 interrupted" in " ".join(out.split())
    told = " ".join(out.replace("│", " ").split())
    assert all(f" {name}" in told for name in METHODS)


# --- Usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["nope"], "Unknown command"),
        (["compress"], "MODEL"),
        (COMPRESS, "exactly one budget"),
        ([*COMPRESS, "--keep", "0.1", "--eps", "0.5"], "exactly one budget"),
        ([*COMPRESS, "--keep", "ten"], "not a share"),
        ([*COMPARE, "--keep", "0.1,ten"], "not a share"),
        (COMPARE, "--keep"),
        ([*COMPRESS, "--keep", "0.1", "--seed", "x"], "--seed"),
        ([*COMPRESS, "--keep", "0.1", "--seed", "1.5"], "'1.5' is not a whole number"),
        ([*COMPARE, "--keep", "0.1", "--seeds", "2.5"], "'2.5' is not a whole number"),
    ],
)
def test_a_command_line_that_makes_no_sense_exits_2(folder, capsys, tokens, message):
    code, out, err = answer(capsys, tokens)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.1", 0.1), (" 12.5 %", 0.125), ("100%", 1.0)])
def test_a_share_is_written_either_way(text, value):
    assert cli_arguments.fraction(text) == value


# --- compress and inspect -----------------------------------------------------------------------------------


def test_compress_writes_a_file_that_loads(folder, capsys):
    code, out, err = answer(capsys, [*COMPRESS, "--keep", "30%", "--seed", "3"])
    assert (code, err) == (0, "")  # no progress where there is no terminal
    assert "Saved small.safetensors" in out
    assert max(map(len, out.splitlines())) <= 80
    import nets  # type: ignore[import-not-found]

    small = cs.load("small.safetensors", into=nets.build())
    assert small.report.seed == 3
    assert 0 < small.report.kept <= 0.305
    assert small.model(torch.rand(2, 12)).shape == (2, 4)


def test_compress_is_the_library_call(folder, capsys):
    """The batches that a command counts are chosen from as the one tensor would be."""
    assert cli.main([*COMPRESS, "--keep", "0.3"]) == 0
    import nets  # type: ignore[import-not-found]

    model = nets.build()
    load_model(model, "weights.safetensors")
    wanted = cs.compress(model, np.load("x.npy"), keep=0.3)
    found = cs.load("small.safetensors", into=nets.build())
    x = torch.rand(5, 12)
    assert torch.equal(wanted.model(x), found.model(x))


def test_json_is_all_that_is_on_stdout(folder, capsys):
    code, out, _ = answer(
        capsys,
        [
            *COMPRESS,
            "--eps",
            "0.9",
            "--delta",
            "0.1",
            "--method",
            "corenet",
            "--out",
            "a.safetensors",
            "--json",
        ],
    )
    told = json.loads(out)
    assert code == 0
    assert told["out"] == "a.safetensors"
    assert told["bytes"] == (folder / "a.safetensors").stat().st_size
    assert told["report"]["method"] == "corenet"
    assert told["report"]["budget"] == "eps=0.9, delta=0.1"


def test_what_a_model_prints_is_not_our_answer(folder, capsys):
    code, out, err = answer(capsys, ["compress", "nets:chatty", *COMPRESS[2:], "--keep", "0.5", "--json"])
    assert (code, err) == (0, "building\n")
    assert json.loads(out)["report"]["budget"] == "keep=0.5"


def test_include_and_exclude_may_be_repeated(folder, capsys):
    patterns = ["--include", "0", "--include", "2", "--exclude", "0"]
    code, out, _ = answer(capsys, [*COMPRESS, "--keep", "0.5", *patterns, "--json"])
    layers = {line["name"]: line for line in json.loads(out)["report"]["layers"]}
    assert code == 0
    assert layers["2"]["after"] < layers["2"]["before"]
    assert all(line["after"] == line["before"] for name, line in layers.items() if name != "2")


def test_inspect_shows_what_was_saved(folder, capsys):
    assert cli.main([*COMPRESS, "--keep", "0.3", "--method", "svd"]) == 0
    capsys.readouterr()
    code, out, err = answer(capsys, ["inspect", "small.safetensors"])
    assert (code, err) == (0, "")
    assert all(word in out for word in ("svd", "keep=0.3", cs.__version__, "total"))
    code, out, _ = answer(capsys, ["inspect", "small.safetensors", "--json"])
    told = json.loads(out)
    assert told["report"]["method"] == "svd"
    assert told["file"]["tensors"]


def test_a_compact_file_of_so_many_bytes(folder, capsys):
    code, out, err = answer(capsys, [*COMPRESS, "--max-bytes", "8kB", "--bits", "8", "--json"])
    assert err == ""
    told = json.loads(out)
    assert code == 0
    assert told["bytes"] == (folder / "small.safetensors").stat().st_size <= 8000
    assert (told["report"]["budget"], told["report"]["rounding"]) == ("max_bytes=8000", "8 bits")
    code, out, _ = answer(capsys, ["inspect", "small.safetensors"])
    assert code == 0
    assert all(word in out for word in ("positions", "values", "header", "0.weight"))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("how", [["--compact"], ["--dtype", "bfloat16"]])
def test_compact_is_smaller_and_as_exact(folder, capsys, how):
    assert cli.main([*COMPRESS, "--keep", "0.3", "--out", "plain.safetensors"]) == 0
    assert cli.main([*COMPRESS, "--keep", "0.3", *how]) == 0
    import nets  # type: ignore[import-not-found]

    small = cs.load("small.safetensors", into=nets.build())
    plain = cs.load("plain.safetensors", into=nets.build())
    assert small.compact
    same = all(
        torch.equal(a, b) for a, b in zip(small.model.parameters(), plain.model.parameters(), strict=True)
    )
    assert same == (how == ["--compact"])


@pytest.mark.parametrize("text", ["6kX", "nan", "-"])
def test_max_bytes_that_are_no_number(folder, capsys, text):
    code, _, err = answer(capsys, [*COMPRESS, f"--max-bytes={text}"])
    assert code == 2
    assert "200kB" in err


ROW = {"name": "0", "rows": 1, "edges": 1, "before": 1}
REPORT = {"method": "svd", "budget": "keep=0.1", "seed": 0, "version": "1", "layers": [ROW]}


@pytest.mark.parametrize(
    "header",
    [
        {"report": {"layers": 5}},
        {"report": REPORT | {"layers": [ROW | {"before": "many"}]}},
        {"report": REPORT, "certificate": {"claims": [], "digests": {}, "confidence": "high"}},
        {
            "report": REPORT,
            "certificate": {"claims": [], "digests": {}, "confidence": "x", "points": 1, "procedure": ""},
        },
    ],
)
def test_inspect_of_a_header_of_another_making(folder, capsys, header):
    storage.save_model("odd.safetensors", nn.Linear(1, 1), header)
    code, out, err = answer(capsys, ["inspect", "odd.safetensors"])
    assert (code, out) == (1, "")
    assert "malformed" in err
    storage.save_model("odd.safetensors", nn.Linear(1, 1), {"report": REPORT})
    assert answer(capsys, ["inspect", "odd.safetensors"])[0] == 0


# --- compare ------------------------------------------------------------------------------------------------


def test_compare_measures_every_method_at_every_size(folder, capsys):
    code, out, _ = answer(
        capsys, [*COMPARE, "--keep", "0.5,20%", "--seeds", "2", "--labels", "y.npy", "--json"]
    )
    told = json.loads(out)
    assert code == 0
    from coresieve.methods import METHODS

    counts = {name: sum(row["method"] == name for row in told["rows"]) for name in METHODS}
    assert counts == {
        name: 4 if method.random else 2 for name, method in METHODS.items()
    }  # no second seed for nothing
    assert (counts["corenet"], counts["svd"], counts["sieve"]) == (4, 2, 2)
    for row in told["rows"]:
        assert row["failed"] is None
        assert row["accuracy_drop"] == pytest.approx(row["flips"])  # the labels are the model's own
        assert row["kept"] <= row["keep"] * 1.005


def test_compare_fits_a_terminal_of_80_columns(folder, capsys):
    x = np.load("x.npy")
    np.savez("both.npz", calib=x[:300], test=x[300:])
    np.save("test.npy", x[300:])
    np.save("right.npy", np.load("y.npy")[300:])
    tokens = [
        *COMPARE[:-1],
        "both.npz",
        "--data-key",
        "calib",
        "--heldout",
        "test.npy",
        "--labels",
        "right.npy",
    ]
    # --data-key is for the files that hold several arrays; test.npy holds one
    code, out, err = answer(capsys, [*tokens, "--keep", "0.3", "--methods", "corenet,svd", "--seeds", "2"])
    assert (code, err) == (0, "")
    assert "300 inputs calibrate, 100 others judge (test.npy)" in out
    assert max(map(len, out.splitlines())) <= 80
    assert all(word in out for word in ("corenet", "svd", "flips", "accuracy", "30 % asked"))


def test_compare_keeps_a_cell_that_failed_with_its_reason(folder, capsys):
    code, out, _ = answer(
        capsys, [*COMPARE, "--keep", "0.0005", "--methods", "svd,uniform", "--seeds", "1", "--json"]
    )
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [row["method"] for row in rows] == ["svd", "uniform"]
    assert all((row["failed"] is None) != (row["error"] is None) for row in rows)


# --- What bad input gets ------------------------------------------------------------------------------------

W, D = "weights.safetensors", "x.npy"


@pytest.mark.parametrize(
    ("model", "weights", "data", "more", "message"),
    [
        ("nets", W, D, [], "expected package.module:factory"),
        ("nots:build", W, D, [], "no module 'nots'"),
        ("bad:build", W, D, [], "importing bad raised SyntaxError"),
        ("lacks:build", W, D, [], "pip install not_there"),
        ("nets:bild", W, D, [], "Try: nets:build"),
        ("nets:number", W, D, [], "is a int"),
        ("nets:number.width", W, D, [], "no 'width'"),
        ("nets:leaves", W, D, [], "nets:leaves() raised SystemExit at nets.py:19 (0)"),
        ("nets:leaves_later", W, D, [], "the model's own code ended the program (SystemExit: 0)"),
        ("quits:build", W, D, [], "importing quits raised SystemExit at quits.py:1 (0)"),
        ("nets:list_of", W, D, [], "made a list"),
        ("nets:needs", W, D, [], "a factory without arguments"),
        ("nets:broken", W, D, [], "RuntimeError at nets.py:16 (no config at all)"),
        (
            "nets:other",
            W,
            D,
            [],
            "error: --weights weights.safetensors does not fit the model (size mismatch",
        ),
        ("nets:build", "none.safetensors", D, [], "none.safetensors does not exist"),
        ("nets:build", "model.pt", D, [], "a pickle can run any code"),
        ("nets:build", "cut.safetensors", D, [], "a whole safetensors file"),
        ("nets:build", W, "none.npy", [], "none.npy does not exist"),
        ("nets:build", W, "n" * 300, [], "File name too long"),
        ("nets:build", "n" * 300, D, [], "File name too long"),
        ("nets:build", W, ".", [], "ls . to see"),
        ("nets:build", W, "complex.npy", [], "complex.npy holds torch.complex64: expected real numbers"),
        ("nets:build", W, "x.csv", [], "ends in .npy, .npz or .safetensors"),
        ("nets:build", W, "objects.npy", [], "nothing pickled"),
        ("nets:build", W, "cut.npy", [], "a whole file"),
        ("nets:build", W, "cut.npz", [], "a whole file"),
        ("nets:build", W, "words.npy", [], "numbers that torch knows"),
        ("nets:build", W, "empty.npy", [], "some rows"),
        ("nets:build", W, "two.npz", [], "holds a, b: expected an array named 'x'"),
        ("nets:build", W, "two.npz", ["--data-key", "c"], "holds a, b: expected an array named 'c'"),
        ("nets:build", W, "wide.npy", [], ", 13) and type torch.float32"),
        ("nets:build", W, "nan.npy", [], "NaN"),
        ("nets:build", W, D, ["--method", "corenett"], "corenett"),
        ("nets:build", W, D, ["--include", "nothing*"], "nothing*"),
        ("nets:build", W, D, ["--seed", "-1"], "seed=-1"),
        ("nets:build", W, D, ["--out", "none/small.safetensors"], "a folder that exists"),
        ("nets:build", W, D, ["--out", W, "--force"], "one of the inputs"),
        ("nets:build", W, D, ["--out", "."], "--out . is a folder"),
        ("nets:build", W, D, ["--out", "n" * 300], "File name too long"),
        ("nets:build", W, D, ["--out", "/dev/null", "--force"], "not a regular file"),
        ("nets:build", W, D, ["--out", "two.npz"], "--force to replace it"),
    ],
)
def test_bad_input_exits_1_with_one_message_and_writes_nothing(
    folder, capsys, model, weights, data, more, message
):
    (folder / "bad.py").write_text("def build(:")
    (folder / "quits.py").write_text("raise SystemExit(0)")
    np.save("complex.npy", np.zeros((50, 12), np.complex64))
    (folder / "lacks.py").write_text("import not_there")
    (folder / "model.pt").write_bytes(b"pickle")
    (folder / "x.csv").write_text("1,2")
    (folder / "cut.safetensors").write_bytes((folder / W).read_bytes()[:-9])
    (folder / "cut.npy").write_bytes((folder / D).read_bytes()[:-9])
    np.savez("two.npz", a=np.zeros(3), b=np.zeros(3))
    (folder / "cut.npz").write_bytes((folder / "two.npz").read_bytes()[:-9])
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save("words.npy", np.array(["a", "b"]))
    np.save("empty.npy", np.zeros((0, 12)))
    np.save("wide.npy", np.zeros((50, 13)))
    np.save("nan.npy", np.full((50, 12), np.nan))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    tokens = ["compress", model, "--weights", weights, "--data", data, "--keep", "0.3", *more]
    code, out, err = answer(capsys, tokens)
    assert (code, out) == (1, "")
    assert message in err
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("tokens", [["--keep", "12"], ["--keep", "0"], ["--keep", "nan"], ["--eps", "1.5"]])
def test_a_budget_out_of_range_fails_before_torch_loads(tokens):
    code = (
        f"import sys; from coresieve.cli import main; code = main({[*COMPRESS, *tokens]}); assert code == 1"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()


def test_labels_must_belong_to_what_judges(folder, capsys):
    np.save("short.npy", np.zeros(7, dtype=int))
    code, _, err = answer(capsys, [*COMPARE, "--keep", "0.5", "--labels", "short.npy"])
    assert code == 1
    assert "7 labels: expected one for each of the 400 inputs that judge" in err


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.full(400, 7), "labels with 7: expected classes from 0 to 3"),
        (np.full(400, -1), "labels with -1"),
        (np.full(400, 0.5), "labels with fractions"),
        (np.full(400, np.nan), "labels with fractions"),
    ],
)
def test_labels_are_classes(folder, capsys, labels, message):
    np.save("odd.npy", labels)
    code, out, err = answer(capsys, [*COMPARE, "--keep", "0.5", "--labels", "odd.npy"])
    assert (code, out) == (1, "")
    assert message in err


def test_labels_of_a_network_that_is_no_classifier(folder, capsys):
    save_model(nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1)), "regression.safetensors")
    tokens = [
        "compare",
        "nets:regression",
        "--weights",
        "regression.safetensors",
        *COMPARE[4:],
        "--keep",
        "0.5",
    ]
    code, _, err = answer(capsys, [*tokens, "--labels", "y.npy"])
    assert code == 1
    assert "where the model is no classifier" in err


def test_inputs_that_judge_are_others_than_those_that_calibrate(folder, capsys):
    np.save("mixed.npy", np.concatenate([np.load("x.npy")[:9], np.ones((30, 12))]))
    code, _, err = answer(capsys, [*COMPARE, "--keep", "0.5", "--heldout", "mixed.npy"])
    assert code == 1
    assert "9 of 39 inputs in --heldout, which --data also holds" in err


def test_compare_of_inputs_that_are_infinite(folder, capsys):
    np.save("far.npy", np.full((30, 12), np.inf))
    code, out, err = answer(capsys, [*COMPARE, "--keep", "0.5", "--heldout", "far.npy"])
    assert (code, out) == (1, "")
    assert "NaN or infinity in the original's answers to the inputs that judge" in err


def test_compare_of_a_model_that_answers_with_one_number(folder, capsys):
    code, out, err = answer(capsys, ["compare", "nets:average", *COMPARE[2:], "--keep", "0.5"])
    assert (code, out) == (1, "")
    assert "an answer for each input" in err


def test_a_file_that_is_not_ours(folder, capsys):
    code, out, err = answer(capsys, ["inspect", W])
    assert (code, out) == (1, "")
    assert W in err


def test_ctrl_c_exits_130_without_a_traceback(folder, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coresieve.inputs.load_model", interrupt)
    code, out, err = answer(capsys, [*COMPRESS, "--keep", "0.5"])
    assert (code, out, err) == (130, "", "interrupted\n")


# --- Models that are given in other ways --------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["nets:Zoo.small", "nets:ready"])
def test_a_factory_may_be_nested_and_a_module_may_be_ready_made(folder, capsys, spec):
    assert cli.main(["compress", spec, *COMPRESS[2:], "--keep", "0.5"]) == 0


@pytest.mark.parametrize("kind", ["npz", "safetensors", "float64", "uint8", "uint16", "bool", ">f4", ">i8"])
def test_data_in_other_files_and_number_types(folder, capsys, kind):
    from safetensors.numpy import save_file

    x = np.load("x.npy")
    if kind == "npz":
        np.savez("data.npz", x=x, other=x[:3])
    elif kind == "safetensors":
        save_file({"inputs": x}, "data.safetensors")
    else:
        np.save("data.npy", (x * 200).astype(kind))
    data = next(path.name for path in folder.glob("data.*"))
    assert cli.main([*COMPRESS[:-1], data, "--keep", "0.5"]) == 0


# --- Pipes, logs and terminals ------------------------------------------------------------------------------


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a shell makes of it, with pipefail; $C is the command."""
    script = f'set -o pipefail; C="{sys.executable} -m coresieve"; {command}'
    given = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")} | env
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=given)


@pytest.fixture
def small(folder, capsys):
    assert cli.main([*COMPRESS, "--keep", "0.3", "--method", "magnitude"]) == 0
    capsys.readouterr()
    return folder


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_reader_who_leaves_is_no_fault(small, more):
    run = shell(f"$C inspect small.safetensors {more} | true")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("more", ["", "--json"])
def test_an_answer_that_cannot_be_written_is_an_error(small, more):
    run = shell(f"$C inspect small.safetensors {more} > /dev/full")
    assert run.returncode == 1
    assert run.stderr.startswith("error: the answer, which could not be written (No space left on device)")
    assert run.stderr.count("\n") == 1


def test_streams_that_are_closed_or_narrow(small):
    assert shell("$C inspect small.safetensors >&-").returncode == 0
    assert shell("$C inspect none.safetensors 2>&-").returncode == 1
    run = shell("$C inspect small.safetensors", COLUMNS="0", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert run.returncode == 0
    assert "magnitude" in run.stdout


def test_colours_that_are_asked_for_bring_no_bar_into_a_log(small):
    run = shell("$C inspect small.safetensors", FORCE_COLOR="1", TERM="xterm")
    assert (run.returncode, run.stderr) == (0, "")
    assert "\x1b[" in run.stdout  # else this would be no test


def test_ctrl_c_at_any_moment_leaves_no_file_and_no_traceback(folder):
    """At the first import, while torch loads, and later: whatever it meets."""
    code = "import sys; from coresieve.__main__ import run; print('up', flush=True); sys.exit(run())"
    for moment in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0):
        command = [sys.executable, "-c", code, *COMPRESS, "--keep", "0.3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            time.sleep(moment)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        if out:  # it was quicker: all is done
            (folder / "small.safetensors").unlink()
            continue
        assert "Traceback" not in err
        assert (process.returncode, out) == (130, "")
        assert err in ("", "interrupted\n")
        assert not list(folder.glob("*small*"))
        assert not list(folder.glob(".coresieve*"))


# --- The terminal -------------------------------------------------------------------------------------------


def test_counted_batches_are_a_list_that_can_be_read_again():
    batches = terminal.Progress().over([torch.zeros(2), torch.zeros(3)], "reading", then="done")
    assert isinstance(batches, list)
    assert [len(batch) for batch in batches] == [len(batch) for batch in batches] == [2, 3]


def test_our_warnings_are_one_line_and_others_are_untouched(capsys):
    import warnings

    with terminal.progress():
        warnings.warn("a [small] sample", cs.errors.CoresieveWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: a [small] sample\n"
