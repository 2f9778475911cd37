"""coresieve bench: what it prints and what it refuses."""

import json

import torch
from safetensors.torch import load_file, save_file

from test_cli import answer, folder  # noqa: F401  (a fixture)

COMPRESS = ["compress", "nets:build", "--weights", "weights.safetensors", "--data", "x.npy", "--keep", "0.3"]
BENCH = ["bench", "nets:build", "small.safetensors", "--weights", "weights.safetensors", "--seconds", "0.02"]


def test_side_by_side(folder, capsys):  # noqa: F811
    assert answer(capsys, COMPRESS)[0] == 0
    code, out, err = answer(capsys, [*BENCH, "--batch", "1,8"])
    assert (code, err) == (0, "")
    for told in (
        "original ms",
        "accelerated",
        "inputs/s",
        "weights in memory",
        "file",
        "Batch of 1: ",
        "Batch of 8: ",
    ):
        assert told in out
    code, out, _ = answer(capsys, [*BENCH, "--batch", "8", "--data", "x.npy", "--json"])
    told = json.loads(out)
    assert [row["batch"] for row in told["rows"]] == [8]
    assert told["rows"][0]["largest_difference"] < 1e-5
    assert told["bytes"]["file"] == [
        (folder / n).stat().st_size for n in ("weights.safetensors", "small.safetensors")
    ]
    low, middle, high = told["rows"][0]["accelerated_faster"]
    assert low <= middle <= high


def test_a_state_dict_of_another_tool(folder, capsys):  # noqa: F811
    state = load_file("weights.safetensors")
    save_file(state, "small.safetensors")
    before = torch.get_num_threads()
    assert answer(capsys, [*BENCH, "--batch", "2", "--threads", "2"])[0] == 0
    assert torch.get_num_threads() == before


def test_what_it_refuses(folder, capsys):  # noqa: F811
    assert answer(capsys, COMPRESS)[0] == 0
    for batch in ("0", "-1", ""):
        assert answer(capsys, [*BENCH, f"--batch={batch}"])[0] in (1, 2)
    assert answer(capsys, [*BENCH, "--batch", "one"])[0] == 2
    code, _, err = answer(capsys, [*BENCH, "--batch", "1", "--threads", "0"])
    assert code == 1
    assert "--threads 0" in err
