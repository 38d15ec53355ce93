"""What a build prints of the choice of layers."""

from pathlib import Path

import pytest

from export.show import ALTERNATIVES, show_report

LAYERS = {str(layer): {"error": 0.01 * layer} for layer in (1, 2, 4, 5)}


def shown(capsys: pytest.CaptureFixture[str], choice: dict) -> list[str]:
    """Lines of the report of a build whose codec was chosen so."""
    report = {
        "checks": [],
        "method": {"name": "deltakv", "ratio": 0.2912},
        "memory": [],
        "fixed_bytes": 0,
        "limits": {"frozen_rope": [], "max_length": 64},
        "quality": None,
        "codec": {"choice": choice},
    }
    capsys.readouterr()
    show_report(report, Path("engine"))
    return capsys.readouterr().out.splitlines()


def alternative(full: list[int], error: float) -> dict:
    return {
        "full_layers": full,
        "stride": 8,
        "latents": "24x4",
        "ratio": 0.2912,
        "error": error,
    }


def test_a_choice_is_shown_with_the_best_others_and_a_line_per_layer(capsys):
    layers = {
        layer: told | {"observer": 0 if layer < "3" else 3, "missed": 0.125, "coverage": 0.75}
        for layer, told in LAYERS.items()
    }
    others = [alternative(list(range(count)), 0.5 + count) for count in range(1, 9)]
    lines = shown(
        capsys, {"full_layers": [0, 3], "layers": layers, "alternatives": [*others, alternative([0, 3], 0.25)]}
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    wanted = [["0,3 (chosen)", "8", "24x4", "0.2912", "0.2500"], ["0", "8", "24x4", "0.2912", "1.5000"]]
    assert cells[:2] == wanted
    assert len([row for row in cells if "24x4" in row]) == ALTERNATIVES
    assert cells[ALTERNATIVES:] == [
        ["1", "0.01000", "0", "0.12500", "75.0%"],
        ["2", "0.02000", "0", "0.12500", "75.0%"],
        ["4", "0.04000", "3", "0.12500", "75.0%"],
        ["5", "0.05000", "3", "0.12500", "75.0%"],
    ]


def test_layers_that_read_everything_have_their_errors_side_by_side(capsys):
    training = {"steps": 1200, "held_out_before": 0.02, "held_out_after": 0.0125}
    choice = {"full_layers": [0, 3], "layers": LAYERS, "alternatives": [alternative([0, 3], 0.25)]}
    lines = shown(capsys, {**choice, "training": training})
    assert "1  0.01000     2  0.02000     4  0.04000     5  0.05000" in "\n".join(lines)
    told = " ".join(" ".join(lines).split())
    assert "1,200 steps of training took the held-out next-token term from 0.02 to 0.0125 nats" in told


@pytest.mark.parametrize("choice", [{}, {"training": {"steps": 3}}])
def test_without_a_choice_nothing_is_said_of_it(capsys, choice):
    assert shown(capsys, choice)[-1].startswith("Method deltakv, ratio 0.2912")
    assert not any("configurations" in line or "layer" in line for line in shown(capsys, choice))
