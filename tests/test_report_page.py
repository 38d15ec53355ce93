"""The page and its figures, and that a browser shows them."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import browser
import numpy as np
import pytest
import report_data
from PIL import Image

from export import report
from export.report import ink
from export.report.drawings import drawings
from plugins.errors import UserError

SHAPE = {"name": "tiny", "num_layers": 2, "num_kv_heads": 1, "head_dim": 16}


def small(*labels: str, benches: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """One model, one length, only the subjects of `labels` and few kinds of questions."""
    evaluation = report_data.evaluation(SHAPE, 3, (4096,))
    for name, key in (("subjects", "label"), ("cells", "subject")):
        evaluation[name] = [entry for entry in evaluation[name] if entry[key] in labels]
    kept = ("ppl", "kld", "niah", "multiturn")
    evaluation["cells"] = [cell for cell in evaluation["cells"] if cell["task"] in kept]
    return {"format": 1, "evaluations": [evaluation], "benches": list(benches)}


class Reader(HTMLParser):
    """Checks that tags close in order; keeps ids, tag names and text."""

    VOID = ("meta", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [str(value) for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [str(value) for name, value in attributes if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(folder: Path) -> Reader:
    reader = Reader()
    reader.feed((folder / "report.html").read_text(encoding="utf-8"))
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    return reader


def test_the_written_report_is_the_one_given_with_its_verdicts(tmp_path: Path) -> None:
    data = small("int4", "vqkv 0.28")
    before = copy.deepcopy(data)
    report.write(data, tmp_path / "new")
    assert data == before
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written == {**data, "verdicts": report.verdicts(data)}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["report.html", "report.json"]


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    report.write(small("int4", "vqkv 0.28", benches=(report_data.latency(),)), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    tags = read(tmp_path).tags
    assert not {"script", "img", "iframe", "object"} & set(tags)
    addresses = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)|@import', page)
    assert {(first or second)[:1] for first, second in addresses} <= {"#", "d"}
    assert 'rel="icon" href="data:,"' in page


def test_names_are_words_and_never_markup(tmp_path: Path) -> None:
    data = small("int4", "vqkv 0.28")
    evaluation = data["evaluations"][0]
    evaluation["model"]["name"] = evaluation["subjects"][0]["summary"] = "<script>alert(1)</script>"
    for entry in (*evaluation["subjects"], *evaluation["cells"]):
        for key in ("label", "subject"):
            if entry.get(key) == "int4":
                entry[key] = '<b onload="x">int4'
    report.write(data, tmp_path)
    reader = read(tmp_path)
    assert "script" not in reader.tags
    assert "<script>alert(1)</script>" in reader.text
    assert '<b onload="x">int4' in reader.text


@pytest.mark.parametrize(
    ("labels", "tasks"),
    [
        (("deltakv 0.29",), ("ppl", "kld", "niah")),
        (("int4", "deltakv 0.29"), ("niah",)),
        (("int4", "deltakv 0.29"), ("kld",)),
        (("int4", "kivi2"), ("ppl",)),
        ((), ()),
    ],
)
def test_what_was_not_measured_is_left_out(tmp_path: Path, labels: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    data = small(*labels)
    evaluation = data["evaluations"][0]
    evaluation["cells"] = [cell for cell in evaluation["cells"] if cell["task"] in tasks]
    report.write(data, tmp_path)
    kinds = {name.split("-tiny")[0] for name in report.figures(data)}
    expected = {
        "ppl": {"frontier-ppl"},
        "kld": {"frontier-kld", "positions"},
        "niah": {"accuracy", "needle"},
    }
    assert kinds == set().union(*(expected[task] for task in tasks)) if tasks else not kinds
    assert read(tmp_path).tags.count("svg") == len(report.figures(data))


def test_numbers_that_are_not_finite_do_not_stop_a_report(tmp_path: Path) -> None:
    data = small("int4", "vqkv 0.28", "kivi2", benches=(report_data.latency(), report_data.oom()))
    evaluation = data["evaluations"][0]
    for cell in evaluation["cells"]:
        if cell["subject"] == "kivi2":
            cell |= {"value": math.nan, "change": math.inf, "interval": [math.nan, math.inf], "top1": None}
            for spot in cell.get("positions", ()):
                spot |= {"kl": math.nan, "change": None}
    evaluation["subjects"][0]["fractions"] = {}
    for bench in data["benches"]:
        bench["engines"][1] = {**dict.fromkeys(bench["engines"][1]), "label": "broken", "method": "vqkv"}
    report.write(data, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert any(cell["value"] is None for cell in written["evaluations"][0]["cells"])
    assert "nan" not in read(tmp_path).text.lower().split()
    report.write(written, tmp_path)


def test_a_collapsed_method_does_not_hide_the_others(tmp_path: Path) -> None:
    data = small("int4", "vqkv 0.28", "kivi2")
    for cell in data["evaluations"][0]["cells"]:
        if cell["subject"] == "kivi2" and cell["task"] == "ppl":
            cell |= {"change": 900.0, "value": 26.6 * 901, "interval": [700.0, 1200.0]}
    drawing = next(drawing for drawing in drawings(data) if drawing.name.startswith("frontier-ppl"))
    with ink.style():
        axes = drawing.draw().axes[0]
        pixels = axes.transData.transform([(0.3, 0.0), (0.3, 0.01), (0.3, 900.0)])[:, 1]
    assert pixels[1] - pixels[0] > 8
    assert pixels[2] < axes.bbox.y1


def test_a_report_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="format 2"):
        report.write({"format": 2}, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        report.write({"format": 1}, tmp_path / "file")


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write({"format": 1, "evaluations": []}, tmp_path)
    old = (tmp_path / "report.html").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UserError, match="No space left"):
        report.write(small("int4"), tmp_path)
    assert (tmp_path / "report.html").read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 2


def test_figures_are_well_formed_and_follow_the_pages_colours() -> None:
    for name, text in report.figures(small("int4", "vqkv 0.28", "deltakv 0.29")).items():
        root = ElementTree.fromstring(text)
        assert root.get("viewBox") and root.get("aria-label")
        own = [element.get("id") for element in root.iter() if element.get("id")]
        assert own and all(str(identity).startswith(f"{name}-") for identity in own)
        assert "var(--ink, #1d2126)" in text and not re.search(r"(?<!, )#1d2126", text)


@pytest.mark.parametrize("format", ["png", "svg"])
def test_figures_are_saved_as_files(tmp_path: Path, format: str) -> None:
    data = {"format": 1, "evaluations": [], "benches": [report_data.oom()]}
    paths = report.save_figures(data, tmp_path / "figures", format)
    assert [path.name for path in paths] == [f"{name}.{format}" for name in report.figures(data)]
    for path in paths:
        if format == "png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert pixels.shape[1] > 900 and pixels[0, 0] == 255 and pixels.std() > 5
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_another_file_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gif"):
        report.save_figures({"format": 1}, tmp_path, "gif")


def test_labels_of_points_keep_apart_and_in_the_frame() -> None:
    data = small(*(label for label, *_ in report_data.SUBJECTS))
    drawing = next(drawing for drawing in drawings(data) if drawing.name.startswith("frontier-kld"))
    with ink.style():
        figure = drawing.draw()
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == len(report_data.SUBJECTS)
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_names_at_the_ends_of_lines_move_only_as_far_as_needed() -> None:
    assert ink.spread([1.0, 5.0, 9.0], 3.0) == [1.0, 5.0, 9.0]
    assert ink.spread([5.0, 5.0], 2.0) == [4.0, 6.0]
    placed = ink.spread([10.0, 0.0, 0.5, 0.2], 1.0)
    assert placed[0] == 10.0
    assert [placed[1], placed[3], placed[2]] == pytest.approx([-0.766667, 0.233333, 1.233333], abs=1e-5)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[browser.Page, str, int]]:
    """A browser's page, the address of the full report and how many figures it has."""
    folder = tmp_path_factory.mktemp("page")
    data = report_data.full()
    report.write(data, folder)
    try:
        with browser.opened() as opened:
            yield opened, (folder / "report.html").as_uri(), len(drawings(data))
    except browser.NoBrowser as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_browser_shows_the_whole_page(page: tuple[browser.Page, str, int], width: int, dark: bool) -> None:
    tab, address, figures = page
    tab.open(address, width, dark)
    boxes = tab.value(
        "[...document.querySelectorAll('figure svg')].map(svg => { const box = svg.getBoundingClientRect();"
        " return [box.width, box.height, svg.querySelectorAll('text').length, svg.querySelectorAll('path').length]; })"
    )
    assert len(boxes) == figures == 23
    assert all(wide > 0.85 * min(width, 450) and tall > 80 for wide, tall, _, _ in boxes)
    assert all(texts > 5 and paths > 5 for _, _, texts, paths in boxes)
    assert tab.value("document.querySelectorAll('table').length") == 1 + 2 * 2 * 2 + 2 + 2
    # wide tables scroll within themselves, never the page
    assert tab.value("document.scrollingElement.scrollWidth") == width
    assert tab.value("document.scrollingElement.scrollHeight") > 10_000
    assert tab.messages == []
    assert set(tab.requests) == {address}
    tab.value("document.querySelector('figure').scrollIntoView({behavior: 'instant'})")
    pixels = np.asarray(Image.open(io.BytesIO(tab.screenshot(whole=False))).convert("RGB"))
    assert pixels.shape[:2] == (900, width)
    assert (pixels[0, 0].mean() < 60) == dark
    colours = {tuple(colour) for colour in pixels.reshape(-1, 3)}
    assert {(92, 179, 230), (240, 138, 69)} <= colours if dark else {(0, 114, 178), (213, 94, 0)} <= colours


def test_links_of_the_contents_lead_somewhere(page: tuple[browser.Page, str, int]) -> None:
    tab, address, _ = page
    tab.open(address, 1280)
    links = "[...document.querySelectorAll('nav a')]"
    assert tab.value(f"{links}.length") == 4
    assert tab.value(f"{links}.every(link => document.getElementById(link.hash.slice(1)))") is True
