"""The HTML report in a real browser, from disk: no console message, sorting, links, both colour schemes, print."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from html_page import Page
from sample_session import SAMPLES

from fusescout.report import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--enable-logging=stderr"),
]
WITNESS = """<script>
const all = (selector) => [...document.querySelectorAll("#candidates-table " + selector)];
const button = (text) => all("thead button").find((b) => b.textContent === text);
const column = (k) => all("tbody tr").map((r) => r.cells[k].textContent).join("|");
const log = [];
button("No.").click(); log.push(column(0));
button("No.").click(); log.push(column(0));
button("Sites").click(); log.push(column(2));
log.push(all("[aria-sort]").map((h) => h.textContent + " " + h.getAttribute("aria-sort")).join());
document.body.dataset.witness = log.join(";");
</script></body>"""


def browse(page: str, tmp_path: Path, *flags: str, fragment: str = "") -> tuple[str, str]:
    """Open a page from disk; gives standard output and the console's lines."""
    assert CHROMIUM is not None
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    result = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, file.as_uri() + fragment],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout, "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)


def pixels(png: bytes) -> tuple[int, int, tuple[int, ...], int]:
    """Width, height, the top-left colour and the number of distinct rows of an 8-bit PNG."""
    width, height = struct.unpack(">II", png[16:24])
    data, at = b"", 8
    while at < len(png):
        size = struct.unpack(">I", png[at : at + 4])[0]
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    raw = zlib.decompress(data)
    stride = len(raw) // height
    return width, height, tuple(raw[1:4]), len({raw[k * stride : (k + 1) * stride] for k in range(height)})


@pytest.mark.parametrize("sample", ["accepted", "hostile", "large"])
def test_runs_without_a_console_message(sample: str, tmp_path: Path) -> None:
    dom, console = browse(render(SAMPLES[sample](), "html"), tmp_path, "--dump-dom")
    assert console == ""
    page = Page(dom)
    assert page.open == []
    assert page.all("button"), "the script did not run: no sort buttons"
    assert len(page.all("script")) == 2


def test_the_page_policy_stops_foreign_scripts(tmp_path: Path) -> None:
    page = render(SAMPLES["accepted"](), "html").replace("</body>", WITNESS)
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert "data-witness" not in dom.split("</head>")[1].split("<header>")[0]
    assert "Content Security Policy" in console


def test_sorting(tmp_path: Path) -> None:
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*>', "", render(SAMPLES["accepted"](), "html"))
    dom, console = browse(page.replace("</body>", WITNESS), tmp_path, "--dump-dom")
    assert console == ""
    body = next(attrs for tag, attrs in Page(dom).elements if tag == "body")
    assert body["data-witness"] == "4|3|2|1;1|2|3|4;24|12|1|1;Sites descending"


def test_links_open_what_they_point_to(tmp_path: Path) -> None:
    page = render(SAMPLES["accepted"](), "html")
    dom, _ = browse(page, tmp_path, "--dump-dom", fragment="#box-3")
    boxes = {a["id"]: "open" in a for a in Page(dom).all("details") if a.get("id")}
    assert [box for box, is_open in boxes.items() if is_open] == ["box-3"]


@pytest.mark.parametrize(("width", "scheme", "paper"), [(1280, 0, (21, 24, 28)), (400, 1, (255, 255, 255))])
def test_draws_dark_and_light_wide_and_narrow(width: int, scheme: int, paper: tuple[int, ...], tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    flags = [f"--window-size={width},1200", f"--blink-settings=preferredColorScheme={scheme}"]
    _, console = browse(render(SAMPLES["accepted"](), "html"), tmp_path, f"--screenshot={shot}", *flags)
    assert console == ""
    drawn_width, height, corner, rows = pixels(shot.read_bytes())
    assert (drawn_width, height, corner) == (width, 1200, paper)
    assert rows > 200


def test_prints(tmp_path: Path) -> None:
    pdf = tmp_path / "report.pdf"
    page = render(SAMPLES["accepted"](), "html")
    _, console = browse(page, tmp_path, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert console == ""
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))
    assert 2 <= pages <= 12
