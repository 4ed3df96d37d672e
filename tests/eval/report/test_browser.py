# SPDX-License-Identifier: Apache-2.0
"""The pages in a real browser: everything that can be clicked is clicked."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report import compare
from kvpress_eval.report.show import show, to_html
from kvpress_eval.report.write import write_outputs
from kvpress_eval.results.answer_pairs import compare_answers
from kvpress_eval.results.read import read_runs
from kvpress_eval.run.runner import run
from playwright import sync_api as playwright
from rich.console import Console

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PRESSES = ("none", "streaming_llm:0.5", "adakv(snapkv:0.5,window_size=16)", "kivi:bits=4,residual_length=16")

CUT = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"
"""Elements with a part outside their edges."""


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two leaderboards: one press was run at one of the lengths only."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for folder, presses, lengths in zip(folders, (PRESSES, ("random:0.5",)), ((128, 256), (128,)), strict=True):
        config = RunConfig(
            presses=presses,
            tasks=("niah_single",),
            lengths=lengths,
            depths=(0.0, 1.0),
            samples=1,
            max_new_tokens=3,
            threads=1,
            out=folder,
        )
        run(config, Console(file=io.StringIO()))
    return write_outputs(folders, folders[0] / "report.html")[0]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig(presses=PRESSES, lengths=(16,), threads=1)
    text = "The code for paint is 8392. A school and a valley falls slowly. The king waits beside the tree. " * 4
    path = tmp_path_factory.mktemp("show") / "show.html"
    path.write_text(to_html(*show(config, text, None), "a text"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, report: Path) -> Path:
    presses = ("streaming_llm:0.5", "adakv(snapkv:0.5,window_size=16)")
    text = "The code for paint is 8392. A school and a valley falls slowly. The king waits beside the tree. " * 4
    results = show(RunConfig(presses=presses, lengths=(16,), threads=1), text, None)
    answers = compare_answers(read_runs([report.parent]).cells, *presses)
    path = tmp_path_factory.mktemp("compare") / "compare.html"
    path.write_text(compare.to_html(presses, *results, "a text", answers), encoding="utf-8")
    return path


def opened(
    browser: playwright.Browser, path: Path, width: int = 1280, *, script: bool = True, scheme: str = "light"
) -> Iterator[playwright.Page]:
    """Open a page; check at the end that it requested nothing from the network and logged nothing."""
    context = browser.new_context(
        viewport={"width": width, "height": 800}, java_script_enabled=script, color_scheme=scheme
    )
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    yield page
    assert {url.partition("#")[0] for url in requests} == {path.as_uri()}
    assert complaints == []
    context.close()


@pytest.fixture
def report_page(browser: playwright.Browser, report: Path) -> Iterator[playwright.Page]:
    yield from opened(browser, report)


@pytest.fixture
def show_page(browser: playwright.Browser, shown: Path) -> Iterator[playwright.Page]:
    yield from opened(browser, shown)


def column(page: playwright.Page, number: int) -> list[str]:
    """Return the sorting values of a column of the first leaderboard."""
    cells = page.locator("table.sortable").first.locator(f"tbody tr > :nth-child({number})")
    return [cell.get_attribute("data-v") or "" for cell in cells.all()]


def held(view: playwright.Locator) -> list[int]:
    """Return the numbers of the tokens that are not shown as gone."""
    shades = view.locator(".text span").evaluate_all("spans => spans.map(span => +span.dataset.k)")
    return [number for number, shade in enumerate(shades) if shade]


def test_the_leaderboard_sorts(report_page: playwright.Page) -> None:
    board = report_page.locator("table.sortable").first
    heading = board.get_by_role("columnheader", name="cache KiB")
    heading.get_by_role("button").click()
    sizes = [float(value) for value in column(report_page, 7)]
    assert sizes == sorted(sizes, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    heading.get_by_role("button").press("Enter")
    assert [float(value) for value in column(report_page, 7)] == sizes[::-1]
    board.get_by_role("button", name="press").click()
    assert column(report_page, 1) == sorted(PRESSES, reverse=True)
    for _ in range(2):
        board.get_by_role("button", name="vs none", exact=True).click()
        *differences, last = column(report_page, 4)
        assert "" not in differences
        assert last == ""  # no press has no difference from itself: it comes last in either order


def test_two_presses_are_chosen(report_page: playwright.Page) -> None:
    pairs = report_page.locator("details.pairs").first
    pairs.locator("summary").click()
    rows = pairs.locator("tbody tr:visible")
    assert rows.count() == len(PRESSES) * (len(PRESSES) - 1) / 2
    first, second = pairs.get_by_role("combobox").all()
    first.select_option("streaming_llm:0.5")
    assert rows.count() == len(PRESSES) - 1
    second.select_option("none")
    assert rows.count() == 1
    assert set(rows.locator("[data-v]").all_inner_texts()) >= {"none", "streaming_llm:0.5"}
    first.select_option("")
    assert rows.count() == len(PRESSES) - 1


def test_all_links_lead_somewhere(report_page: playwright.Page, show_page: playwright.Page) -> None:
    for page, fewest in ((report_page, 12), (show_page, len(PRESSES))):
        links = page.locator("a").all()
        assert len(links) >= fewest
        for link in links:
            link.click()
            target = page.locator(":target")
            assert f"#{target.get_attribute('id')}" == link.get_attribute("href")
            # Visible below the bar with the links, unless the page ends first.
            assert target.evaluate("e => e.getBoundingClientRect().top") >= -1
            assert target.evaluate("e => e.getBoundingClientRect().top < innerHeight")


def test_details_open(report_page: playwright.Page) -> None:
    details = report_page.locator("details")
    assert (
        details.count() == 2 * (len(PRESSES) + 1) + 1
    )  # kept tokens and pairs of presses; the second leaderboard has one press more
    closed = report_page.locator("details:not(.pairs)").first
    assert closed.get_attribute("open") is None
    closed.locator("summary").click()
    assert closed.locator(".text").is_visible()
    closed.locator("summary").click()
    assert not closed.locator(".text").is_visible()


def test_layers_and_heads_switch(report_page: playwright.Page, show_page: playwright.Page) -> None:
    report_page.locator("details:not(.pairs)", has_text="adakv").first.evaluate("e => e.open = true")
    for view in (
        report_page.locator("details:not(.pairs)", has_text="adakv").first.locator(".kept"),
        show_page.locator("section", has_text="adakv").first.locator(".kept"),
    ):
        tokens = view.locator(".text span").count()
        before = held(view)
        for row in view.locator("tbody tr").all():
            layer = row.locator("th button")
            by_head = []
            for number, button in enumerate(row.locator("td button").all()):
                button.click()
                assert button.get_attribute("aria-pressed") == "true"
                assert view.locator("[aria-pressed=true]").count() == 1
                assert view.locator("output").inner_text() == f"{layer.inner_text()}, head {number}"
                by_head.append(held(view))
                assert round(100 * len(by_head[-1]) / tokens) == int(button.inner_text())
            layer.click()
            assert held(view) == sorted(set().union(*by_head))
        assert by_head[0] != by_head[1]
        view.get_by_role("button", name="all", exact=True).click()
        assert held(view) == before
        assert view.locator("output").inner_text() == "all layers and heads"


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1280])
def test_pages_fit_any_screen(
    browser: playwright.Browser, report: Path, shown: Path, compared: Path, width: int, scheme: str, script: bool
) -> None:
    for path in (report, shown, compared):
        for page in opened(browser, path, width, scheme=scheme, script=script):
            page.locator("summary").evaluate_all("all => all.forEach(summary => summary.parentElement.open = true)")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator(".scroll, nav, .plots > *").evaluate_all(CUT) == []
            plots = page.locator(".plots svg:visible")
            assert {svg.get_attribute("class") for svg in plots.all()} <= {"narrow" if width == 400 else "wide"}
            ink, paper = page.locator("body").evaluate(
                "body => [getComputedStyle(body).color, getComputedStyle(body).backgroundColor]"
            )
            assert luminance(ink) < luminance(paper) if scheme == "light" else luminance(ink) > luminance(paper)
            assert page.locator(".text").last.is_visible()
            assert (page.locator("th button").count() > 0) == script


def test_scripts_in_answers_cannot_run(browser: playwright.Browser, report: Path, tmp_path: Path) -> None:
    """The browser refuses scripts even if the template let one through."""
    path = tmp_path / "attacked.html"
    attack = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    path.write_text(report.read_text(encoding="utf-8").replace("<h1>", attack + "<h1>", 1), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.title() != "taken"
    assert page.locator("th button").count() > 0
    page.close()


def luminance(colour: str) -> float:
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
