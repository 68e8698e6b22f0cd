"""The page of 512 ranks, and in a real browser: charts, filters, copying, a phone, dark mode, paper; and no network.

The two pages are opened once. A browser that is busy ends processes when it likes, so none is started within a test.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from ddp_nanguard.cli import main as cli
from tests.golden import GOLDEN
from tests.page_dumps import NASTY, STEP, layer, packed_in, unpacked, wide_dump

pytest.importorskip("jinja2", reason="the page needs the extra [report]")
pytest.importorskip("plotly", reason="the page needs the extra [report]")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
HOVER_BOX = "document.querySelector('#chart-steps .hoverlayer .hovertext').getBoundingClientRect().toJSON()"
WIDE = {"width": 1200, "height": 900}
WAIT_FOR_NARROW_CHART = """() => new Promise((done) => {
    const chart = document.querySelector("#chart-ranks .main-svg");
    const look = () => chart.clientWidth <= 390 ? done() : setTimeout(look, 20);
    look();
})"""


class Opened:
    """A page with all that it has asked for and complained of."""

    def __init__(self, browser, file, **options):
        self.file, self.requests, self.complaints = file, [], []
        self.context = browser.new_context(viewport=WIDE, **options)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def load(self, until="html.drawn"):
        self.page.goto(self.file.as_uri())
        self.page.wait_for_selector(until, state="attached")
        return self


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The pages of a real fault on two ranks and of one on 512."""
    root = tmp_path_factory.mktemp("pages")
    found = {}
    for name, dump in (("real", GOLDEN), ("wide", wide_dump(root / "dumps"))):
        found[name] = root / f"{name}.html"
        assert cli.main(["report", str(dump), "-o", str(found[name])]) == 0
    return found


@pytest.fixture(scope="module")
def wide_html(files):
    return files["wide"].read_text()


def test_a_page_of_512_ranks_is_small_and_names_no_address(wide_html):
    assert len(wide_html.encode()) <= 2.5e6 and wide_html.count('<tr class="affected') == 3
    without_plotly = wide_html.replace(packed_in(wide_html, "plotly"), "")
    assert not re.search(r"""https?://|(?:src|href)=["'](?!data:)|url\(|@import""", without_plotly)
    assert "Affected: 3 of 512 ranks." in wide_html and "cuda:5, NVIDIA H200" in wide_html


def test_the_layers_that_a_page_names_are_those_of_the_dump(wide_html):
    rows = json.loads(unpacked(wide_html, "charts"))["maps"]["ranks"]["rows"]
    assert rows[3]["text"] == f"forward · {NASTY} · output" and len(rows) == 81
    assert rows[20]["short"] == "m.d.l.20.s.output_projection"


@pytest.fixture(scope="module")
def opened(files):
    """All pages, open: with scripts, without any, and with a browser that cannot unpack."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is looked at by playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium to look at the page with")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        pages = {name: Opened(browser, file).load() for name, file in files.items()}
        pages["no scripts"] = Opened(browser, files["real"], java_script_enabled=False).load("main")
        old = pages["old"] = Opened(browser, files["real"])
        old.page.add_init_script("delete window.DecompressionStream")
        old.load("text=This browser cannot unpack the charts")
        yield pages
        browser.close()


@pytest.fixture
def real(opened):
    yield opened["real"].page
    _as_before(opened["real"].page)


@pytest.fixture
def wide(opened):
    yield opened["wide"].page
    _as_before(opened["wide"].page)


def _as_before(page):
    page.emulate_media(media="screen", color_scheme="light")
    page.set_viewport_size(WIDE)


def hover(page, chart, across, down):
    """Hover over a place of a chart, from 0 to 1; what it tells there."""
    area = page.locator(f"{chart} .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(0, 0)
    page.wait_for_selector(f"{chart} .hoverlayer text", state="detached")  # of the place before
    page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
    page.wait_for_selector(f"{chart} .hoverlayer text")
    return " | ".join(page.locator(f"{chart} .hoverlayer text").all_text_contents())


def background(page, element):
    return page.evaluate("(element) => getComputedStyle(document.querySelector(element)).backgroundColor", element)


def test_the_timeline_tells_each_step_on_hover(real, wide):
    assert hover(real, "#chart-timeline", 0.5, 0.5) == "1 | loss 344.5 | largest output 40 | largest gradient 90.843"
    assert "loss NaN" in hover(real, "#chart-timeline", 0.83, 0.5)
    assert "largest float16: 65504" in wide.locator("#chart-timeline").text_content()


def test_the_heat_maps_tell_the_whole_name_on_hover(real, wide):
    assert hover(real, "#chart-steps", 0.5, 1.5 / 7) == "forward · root · outputstep 1: 3e0 to 1e1"
    assert hover(real, "#chart-ranks", 0.75, 1.5 / 7) == "forward · root · outputrank 1: NaN"
    assert hover(wide, "#chart-steps", 12.5 / 13, 20.5 / 81) == f"forward · {layer(20)} · outputstep {STEP}: Inf"
    assert hover(wide, "#chart-steps", 0.5 / 13, 3.5 / 81).startswith(f"forward · {NASTY} · outputstep {STEP - 12}: ")
    assert "0" in hover(wide, "#chart-steps", 0.5 / 13, 80.5 / 81).rpartition(": ")[2]


def test_ranks_are_filtered_by_text_and_by_what_they_saw(wide):
    rows = wide.locator("#table-ranks tbody tr:visible")
    assert rows.count() == 512 and "began here" in rows.first.text_content()
    wide.get_by_label("only affected").check()
    assert rows.locator("th").all_text_contents() == ["37", "38", "301"]
    wide.get_by_label("filter the rows").fill("node-004")
    assert wide.locator("#ranks output").text_content() == "2 of 512 rows"
    wide.get_by_label("only affected").uncheck()
    assert rows.count() == 8
    wide.get_by_label("filter the rows").fill("")


def test_a_button_copies_the_command(real):
    real.get_by_label("copy the command to show").click()
    search = real.get_by_label("filter the rows")
    search.focus()
    real.keyboard.press("Control+V")
    assert search.input_value() == f"ddp-nanguard show {GOLDEN}"
    search.fill("")


@pytest.mark.parametrize("name", ["real", "wide"])
def test_nothing_is_wider_than_a_phone(request, name):
    page = request.getfixturevalue(name)
    page.set_viewport_size({"width": 390, "height": 844})
    page.evaluate(WAIT_FOR_NARROW_CHART)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    ends = page.evaluate("[...document.querySelectorAll('main > *')].map((each) => each.getBoundingClientRect().right)")
    assert max(ends) <= 390
    labels = (
        "[...document.querySelectorAll('#chart-steps .ytick text')].map((each) => each.getBoundingClientRect().left)"
    )
    assert min(page.evaluate(labels)) >= 0, "no label is cut off"


def test_page_and_charts_are_dark_where_the_reader_wants_that_and_light_on_paper(real):
    chart = "#chart-timeline .main-svg"
    assert (background(real, "body"), background(real, chart)) == (LIGHT, LIGHT)
    real.emulate_media(color_scheme="dark")
    assert (background(real, "body"), background(real, chart)) == (DARK, DARK)
    real.emulate_media(media="print", color_scheme="dark")
    assert (background(real, "body"), background(real, chart)) == (LIGHT, LIGHT)


def test_paper_has_no_buttons_and_no_more_ranks_than_are_affected(wide):
    wide.emulate_media(media="print")
    wide.set_viewport_size({"width": 688, "height": 1000})
    assert wide.locator("#table-ranks tbody tr:visible").count() == 3
    assert wide.get_by_text("On paper the affected ranks alone.").is_visible()
    assert not wide.locator("button.copy").first.is_visible() and not wide.get_by_label("filter the rows").is_visible()
    assert wide.evaluate("document.documentElement.scrollWidth") == 688


def test_without_scripts_the_facts_and_tables_are_there(opened):
    page = opened["no scripts"].page
    assert page.get_by_text("finite in, NaN out").first.is_visible()
    assert not page.locator(".chart").first.is_visible() and not page.locator(".filter").first.is_visible()
    assert page.locator("#timeline tr.marked td").all_text_contents() == ["NaN", "NaN", "NaN"]
    assert page.locator("#by-rank").get_by_text("is drawn by a script").is_visible()
    assert page.locator("#table-ranks tbody tr").count() == 2


def test_an_old_browser_is_told_why_there_are_no_charts(opened):
    page = opened["old"].page
    assert page.get_by_text("This browser cannot unpack the charts").count() == 3
    assert page.locator(".chart").count() == 0 and len(opened["old"].complaints) == 1


def test_no_page_asks_the_network_or_complains(opened):
    """Last, after all that was done with them."""
    for name, each in opened.items():
        assert each.requests == [each.file.as_uri()], name
        assert each.complaints == [] or name == "old", name
    assert {Path(each.file).stat().st_size < 2.5e6 for each in opened.values()} == {True}
