"""The page of a run in headless Chromium: it plays, steps, shows, fits a phone and prints, and fetches nothing."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.tools.run_files import COLOURS, FRAMES, make_run
from tools import report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("browser") / "first")
    assert report.main([str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Open:
    """An open page, with what it logged, raised and asked the network for."""

    def __init__(self, browser, file, width=1280, height=900, scheme="light"):
        self.said, self.asked = [], []
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.until("[...document.querySelectorAll('video')].every((video) => video.readyState >= 2)")

    def until(self, expression):
        """Wait for JavaScript to be true; Playwright's own wait uses eval, which the page's policy forbids."""
        for _ in range(500):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(10)
        raise AssertionError(f"never true: {expression}")

    def times(self):
        return self.page.evaluate("[...document.querySelectorAll('video')].map((video) => video.currentTime)")

    def frame(self):
        return self.page.locator("output.frame").text_content()

    def until_frame(self, number):
        self.until(f"document.querySelector('output.frame').textContent === '{number}/{FRAMES}'")

    def to_videos(self):
        self.page.locator(".player .controls").scroll_into_view_if_needed()


@pytest.fixture
def show(browser):
    """Return how to open a page, which is closed at the end."""
    pages = []

    def show(file, **options):
        pages.append(Open(browser, file, **options))
        return pages[-1]

    yield show
    for opened in pages:
        opened.context.close()


@pytest.fixture
def opened(show, file):
    return show(file)


def test_the_space_bar_plays_all_videos_and_stops_them_and_nothing_is_logged_or_fetched(opened, file):
    opened.to_videos()
    opened.page.keyboard.press("Space")
    opened.until("[...document.querySelectorAll('video')].every((video) => video.currentTime > 0.1)")
    assert opened.page.locator("button.play").text_content() == "Pause"
    opened.page.keyboard.press("Space")
    times = opened.times()
    assert len(times) == 3 and max(times) - min(times) < 0.2
    opened.page.wait_for_timeout(300)
    assert opened.times() == times
    assert opened.page.locator("button.play").text_content() == "Play"
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [file.as_uri()]
    # At the end, playing begins again.
    opened.page.locator("button.play").click()
    opened.until_frame(FRAMES)
    opened.until_frame(2)


def test_arrows_and_the_scrub_bar_step_frames_of_all_videos(opened):
    opened.until_frame(FRAMES)  # the last is shown first
    assert opened.times() == pytest.approx([(FRAMES - 0.5) / 15] * 3, abs=0.01)
    opened.to_videos()
    opened.page.locator("input.scrub").fill("0")
    opened.until_frame(1)
    opened.page.locator("input.scrub").blur()
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    opened.until_frame(4)
    opened.page.keyboard.press("ArrowLeft")
    opened.until_frame(3)
    opened.page.locator("input.scrub").fill("7")
    opened.until_frame(8)
    opened.page.locator("button.back").click()
    opened.until_frame(7)
    opened.until("[...document.querySelectorAll('video')].every((video) => !video.seeking)")
    assert opened.times() == pytest.approx([6.5 / 15] * 3, abs=0.01)


def colour(opened, share):
    picture = Image.open(io.BytesIO(opened.page.locator(".compare canvas").first.screenshot()))
    return np.array(picture.convert("RGB"))[picture.height // 3, int(share * (picture.width - 1))]


def test_the_slider_uncovers_the_video_before_training(opened):
    def shows(share, panel):
        for _ in range(50):
            if np.abs(colour(opened, share).astype(int) - COLOURS[panel]).max() < 16:
                return True
            opened.page.wait_for_timeout(50)
        return False

    assert shows(0.25, "base") and shows(0.75, "now")
    opened.page.locator("input.wipe").fill("100")
    assert shows(0.25, "base") and shows(0.75, "base")
    opened.page.locator("input.wipe").fill("0")
    assert shows(0.25, "now") and shows(0.75, "now")
    box = opened.page.locator(".compare canvas").first.bounding_box()
    opened.page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])
    assert shows(0.5, "base") and shows(0.75, "now")
    # The other panels stand below.
    names = opened.page.locator(".clip").first.locator(".panel span").all_text_contents()
    assert names == ["before", "now", "source", "true view"]


def test_the_tab_key_passes_the_links_then_the_player(opened):
    passed = []
    while len(passed) < 40 and "rate" not in passed:
        opened.page.keyboard.press("Tab")
        passed.append(opened.page.evaluate("document.activeElement.className"))
    assert passed[0] == "skip"
    assert passed[-6:] == ["play", "back", "forward", "scrub", "wipe", "rate"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_has_a_size_and_letters_of_the_page_s_font(show, file, scheme):
    opened = show(file, width=390, scheme=scheme)
    plots = opened.page.locator(".plot svg, .paths svg")
    assert plots.count() >= 12
    for place in range(plots.count()):
        box = plots.nth(place).bounding_box()
        assert 200 < box["width"] <= 390 and box["height"] > 40
    fonts = opened.page.evaluate(
        "[...document.querySelectorAll('svg text')].map((text) => [getComputedStyle(text).fontFamily,"
        " parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)])"
    )
    body = opened.page.evaluate("getComputedStyle(document.body).fontFamily")
    assert {family for family, _ in fonts} == {body} and min(size for _, size in fonts) >= 8
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(int(part) for part in ground[4:-1].split(",")) < 60) == (scheme == "dark")


def long_numbers(run):
    """Give a run metrics with long names and changes as small as those of a short run."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("room_pose", "target_view_displacement", "room_trans_residual", "target_view_mismatch"):
        before, after = -0.0308982, -0.0308977
        summary["before"][f"eval/{name}"] = before
        summary["after"] |= {f"eval/{name}": after, f"eval/{name}_ci95": [-0.0000504, 0.0000446]}
        rows[0] |= {f"eval/{name}": before, f"eval_floor/{name}": -0.0566812}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the page of a run with long numbers, that of two such runs, and that of six with long names."""
    folder = tmp_path_factory.mktemp("pages")
    names = ["a", "b", *(f"tiny_recam_2026-11-24_22-53-2{place}" for place in range(4))]
    weights = [f"--config.reward.weights.room_rot={place + 1}" for place in range(len(names))]
    runs = [long_numbers(make_run(folder / name, w, videos=False)) for name, w in zip(names, weights, strict=True)]
    found = {"one": runs[:1], "two": runs[:2], "six": runs}
    for name, own in found.items():
        assert report.main([*map(str, own), "--out", str(folder / f"{name}.html")]) == 0
    return {name: folder / f"{name}.html" for name in found}


def outside(opened, selector):
    """Return the texts of visible elements that no box shows whole: beyond the window, or cut by a scrolling box."""
    return opened.page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].filter((element) => {
            const own = element.getBoundingClientRect();
            const box = element.closest(".wide")?.getBoundingClientRect();
            const right = Math.min(window.innerWidth, box ? box.right : Infinity);
            return own.width && (own.right > right + 1 || own.left < -1);
        }).map((element) => element.textContent)""",
        selector,
    )


@pytest.mark.parametrize("page", ["one", "two", "six"])
@pytest.mark.parametrize("width", [360, 390, 768, 900, 1024, 1400])
def test_the_page_never_scrolls_sideways(show, pages, page, width):
    opened = show(pages[page], width=width, height=800)
    for details in opened.page.locator("summary").all():
        details.click()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.said == []


@pytest.mark.parametrize("width", [360, 390, 761, 768, 900, 1024, 1400])
def test_every_cell_is_in_sight(show, pages, width):
    opened = show(pages["two"], width=width, height=800)
    assert opened.page.locator(".held-out .chip").count() >= 6
    assert outside(opened, ".held-out :is(td, .chip, small)") == []
    assert outside(opened, "#side-by-side :is(td, .chip, small)") == []
    assert outside(opened, "#differences :is(td, code)") == []
    # A phone names the run beside each of its values.
    labels = opened.page.evaluate(
        "[...document.querySelectorAll('#side-by-side tbody tr:first-child td')]"
        ".map((cell) => getComputedStyle(cell, '::before').content)"
    )
    assert labels == (['"a"', '"b"'] if width <= 390 else ["none", "none"])


def test_a_printed_page_has_whole_tables_on_white(show, pages):
    opened = show(pages["two"], width=718, height=1000, scheme="dark")
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert outside(opened, ":is(.held-out, .runs) :is(td, .chip, small)") == []
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert min(int(part) for part in background[4:-1].split(",")) > 200
    assert opened.page.locator(".held-out thead").first.is_visible()  # as a table, not restacked as on a phone


def test_the_page_prints_without_its_controls(opened):
    opened.page.emulate_media(media="print")
    assert not opened.page.locator(".controls").is_visible() and not opened.page.locator("nav").is_visible()
    printed = opened.page.pdf(format="A4")
    assert printed.startswith(b"%PDF") and len(printed) > 20_000


def test_without_scripts_the_videos_have_the_browser_s_own_controls(browser, file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    video = page.locator("video").first
    assert video.is_visible() and video.get_attribute("controls") is not None
    assert not page.locator(".controls").is_visible()
    context.close()
