"""certify, verify and smallest from the shell: exit codes that a build can act on, and what is printed and stored."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coresieve import cli
from test_cli import NETS, answer, folder, shell  # noqa: F401  (a fixture)

MODEL = ["nets:build", "--weights", "weights.safetensors"]


@pytest.fixture
def made(folder, capsys):  # noqa: F811
    """The folder with held-out inputs, their labels and a small network in it."""
    fresh = torch.rand(800, 12, generator=torch.Generator().manual_seed(5))
    np.save("fresh.npy", fresh.numpy())
    np.save("labels.npy", np.arange(800) % 4)
    code, _, err = answer(
        capsys, ["compress", *MODEL, "--data", "x.npy", "--keep", "0.8", "--method", "magnitude"]
    )
    assert code == 0, err
    return folder


CERTIFY = ["certify", "nets:build", "small.safetensors", *MODEL[1:], "--heldout", "fresh.npy"]
VERIFY = ["verify", "small.safetensors", "--model", *MODEL, "--heldout", "fresh.npy"]
SMALLEST = ["smallest", *MODEL, "--data", "x.npy", "--heldout", "fresh.npy", "--method", "magnitude"]


def test_a_goal_decides_the_exit_code(made, capsys):
    code, out, err = answer(capsys, [*CERTIFY, "--max-flips", "90%"])
    assert (code, err) == (0, "")
    assert "Goal 90 %: met." in out
    code, out, _ = answer(capsys, [*CERTIFY, "--max-flips", "0.5%"])
    assert code == 3
    assert "NOT met" in out
    assert "598 inputs" not in out  # 800 are enough to show it; the network is what fails
    assert answer(capsys, CERTIFY)[0] == 0  # no goal, nothing to miss


def test_what_is_printed_fits_80_columns(made, capsys):
    _, out, _ = answer(capsys, [*CERTIFY, "--eps", "0.2", "--labels", "labels.npy"])
    assert max(map(len, out.splitlines())) < 80
    for name in ("flips", "coreset", "coreset_eps", "output_error", "accuracy_drop"):
        assert f"- {name}: " in out


def test_json(made, capsys):
    code, out, _ = answer(capsys, [*CERTIFY, "--max-flips", "0.001", "--json"])
    told = json.loads(out)
    assert (code, told["met"], told["claims"][0]["name"]) == (3, False, "flips")
    code, out, _ = answer(capsys, [*SMALLEST, "--max-flips", "20%", "--out", "s.safetensors", "--json"])
    assert (code, json.loads(out)["certificate"]["met"]) == (0, True)


def test_it_is_stored_and_verified(made, capsys):
    assert answer(capsys, VERIFY)[0] == 1  # no certificate yet
    assert answer(capsys, [*CERTIFY, "--eps", "0.3", "--write"])[0] == 0
    code, out, _ = answer(capsys, VERIFY)
    assert code == 0
    assert "Confirmed" in out
    np.save("fresh.npy", np.load("fresh.npy")[:-1])
    code, out, _ = answer(capsys, VERIFY)
    assert code == 3
    assert "held-out inputs are not those of the certificate" in out
    code, out, _ = answer(capsys, [*VERIFY, "--json"])
    assert (code, json.loads(out)["true"]) == (3, False)


def test_altered_weights_are_refused(made, capsys):
    answer(capsys, [*CERTIFY, "--write"])
    raw = bytearray((made / "small.safetensors").read_bytes())
    raw[-10] ^= 1
    (made / "small.safetensors").write_bytes(raw)
    code, _, err = answer(capsys, VERIFY)
    assert code == 1
    assert "damaged weights" in err


def test_smallest_writes_what_it_certified(made, capsys):
    code, out, err = answer(capsys, [*SMALLEST, "--max-flips", "20%", "--out", "best.safetensors"])
    assert (code, err) == (0, "")
    assert "Fixed-sequence testing" in out
    code, out, _ = answer(capsys, ["verify", "best.safetensors", *VERIFY[2:]])
    assert code == 0, out
    code, out, _ = answer(capsys, ["inspect", "best.safetensors"])
    assert "Certificate, 95 % confidence" in out
    assert "at most 20 % of fresh inputs" in out


def test_nothing_is_written_when_nothing_is_certified(made, capsys):
    code, out, err = answer(capsys, [*SMALLEST, "--max-flips", "0.1%", "--out", "best.safetensors"])
    assert (code, out) == (3, "")
    assert "2,995 inputs with none changed would be needed" in err
    assert not (made / "best.safetensors").exists()


def test_overlap_is_an_error(made, capsys):
    np.save("fresh.npy", np.concatenate([np.load("fresh.npy"), np.load("x.npy")[:20]]))
    code, _, err = answer(capsys, [*SMALLEST, "--max-flips", "20%", "--out", "b.safetensors"])
    assert code == 1
    assert "20 of 820 held-out inputs" in err


def test_a_state_dict_of_another_tool(made, capsys):
    weights = load_file("weights.safetensors")
    save_file({name: torch.where(w.abs() > 0.05, w, 0.0) for name, w in weights.items()}, "other.safetensors")
    tokens = [
        "certify",
        "nets:build",
        "other.safetensors",
        *MODEL[1:],
        "--heldout",
        "fresh.npy",
        "--max-flips",
        "50%",
    ]
    code, out, _ = answer(capsys, tokens)
    assert code == 0
    assert "flips" in out
    save_file({"0.weight": weights["0.weight"]}, "other.safetensors")
    code, _, err = answer(capsys, tokens)
    assert code == 1
    assert "other.safetensors does not fit" in err


@pytest.mark.parametrize(
    ("tokens", "code", "message"),
    [
        ([*CERTIFY, "--max-flips", "some"], 2, "not a share"),
        ([*CERTIFY, "--claim", "speed"], 1, "one of flips"),
        ([*CERTIFY, "--confidence", "95"], 1, "confidence=95"),
        ([*SMALLEST, "--out", "best.safetensors"], 1, "no goal"),
        ([*SMALLEST, "--max-flips", "1%"], 1, "is there already"),
        (
            ["certify", "nets:build", "none.safetensors", *MODEL[1:], "--heldout", "fresh.npy"],
            1,
            "none.safetensors",
        ),
        (["verify", "weights.safetensors", *VERIFY[2:]], 1, "without a certificate"),
        ([*CERTIFY[:2], "weights.safetensors", *CERTIFY[3:], "--write"], 1, "which holds the original"),
        ([*CERTIFY, "--labels", "complex.npy"], 1, "expected real numbers"),
        ([*CERTIFY, "--labels", "two.npz"], 1, "an array named 'y'. Try: a file with that array alone"),
        ([*SMALLEST, "--max-flips", "1%", "--seed", "1.5"], 2, "not a whole number"),
    ],
)
def test_bad_input(made, capsys, tokens, code, message):
    np.save("complex.npy", np.zeros(800, np.complex64))
    np.savez("two.npz", a=np.zeros(800), b=np.zeros(800))
    weights = (made / "weights.safetensors").read_bytes()
    got, out, err = answer(capsys, tokens)
    assert (got, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert (made / "weights.safetensors").read_bytes() == weights


def test_the_exit_code_does_not_depend_on_the_reader(made):
    certify = " ".join([*CERTIFY, "--max-flips"])
    assert shell(f"$C {certify} 90% | true").returncode == 0
    run = shell(f"$C {certify} 0.5% --json | true")
    assert (run.returncode, run.stderr) == (3, "")


def test_help_names_the_exit_code(capsys):
    assert cli.main(["certify", "--help"]) == 0
    assert "3 the goal of a certificate is not met" in " ".join(capsys.readouterr().out.split())
    assert NETS
