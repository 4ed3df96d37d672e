# SPDX-License-Identifier: Apache-2.0
"""The page of the server in a real browser: compress a text, ask about it, look at its kept tokens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.report.page import SHADES
from kvpress_eval.serve.access import ApiKeys
from kvpress_eval.serve.api import ApiSettings
from kvpress_eval.serve.page import FILES
from playwright import sync_api as playwright

from tests.eval.serve.servers import PRESSES, RunningServer, running, text_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
Open = Callable[..., playwright.Page]

KEY = "a-key-of-sixteen-characters"
QUESTION = "What is the code for tiger?"
CONTRASTS = """() => {
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const luminance = (c) => 0.2126 * light(c[0]) + 0.7152 * light(c[1]) + 0.0722 * light(c[2]);
  const paper = (e) => e ? over(parse(getComputedStyle(e).backgroundColor), paper(e.parentElement)) : [255, 255, 255];
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && !e.disabled
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && !["OPTION", "NOSCRIPT"].includes(e.tagName));
  return shown.map((e) => {
    const [a, b] = [parse(getComputedStyle(e).color).slice(0, 3), paper(e)].map(luminance).sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
  });
}"""
"""Contrast of each element with text (WCAG 2.2, 1.4.3), and the beginning of the element."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as current:
        yield current


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: playwright.Browser) -> Iterator[Open]:
    """Open pages of a server; check at the end that they reached no other server, and that no script failed."""
    contexts: list[tuple[playwright.BrowserContext, str, list[str], list[str]]] = []

    def opened(server: RunningServer, width: int = 1280, scheme: str = "light") -> playwright.Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        urls: list[str] = []
        failures: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda message: failures.append(message.text))
        contexts.append((context, server.url, urls, failures))
        page.goto(f"{server.url}/")
        return page

    yield opened
    for context, url, urls, failures in contexts:
        assert all(each.startswith(url) for each in urls)
        # The browser itself logs responses with an error status.
        assert [each for each in failures if not each.startswith("Failed to load resource: the server responded")] == []
        context.close()


def compress(page: playwright.Page, text: str, press: str = PRESSES[0]) -> None:
    page.get_by_label("Paste a text").fill(text)
    page.get_by_label("Press").select_option(press)
    page.get_by_role("button", name="Compress").click()
    playwright.expect(page.locator("#progress")).to_contain_text("Compressed")
    playwright.expect(page.get_by_role("heading", name="Kept tokens")).to_be_visible()


def ask(page: playwright.Page, question: str, tokens: int = 12) -> str:
    """Send a question, and return the answer once it has ended."""
    page.get_by_label("Longest answer").fill(str(tokens))
    page.get_by_label("Question about the text").fill(question)
    page.get_by_role("button", name="Send").click()
    playwright.expect(page.get_by_role("log")).to_have_attribute("aria-busy", "false")
    return page.locator("#log article.answer div").last.text_content() or ""


def answer_of(server: RunningServer, document: str, messages: list[dict[str, str]], tokens: int = 12) -> str:
    completion: Any = server.client().chat.completions.create(
        model="reference", messages=messages, max_tokens=tokens, temperature=0, extra_body={"document": document}
    )
    return str(completion.choices[0].message.content)


def test_a_text_is_compressed_and_questions_are_answered(server: RunningServer, visit: Open) -> None:
    page = visit(server)
    with page.expect_response("**/v1/documents") as upload:
        compress(page, text_of(5, 25))
    document = upload.value.json()
    numbers = page.locator("#sizes dd").all_inner_texts()
    assert numbers[0] == str(document["tokens"])
    kib = [round(document[name] / 1024, 1) for name in ("bytes_uncompressed", "bytes")]
    shown = [float(number.split()[0]) * (1024 if "MiB" in number else 1) for number in numbers[1:3]]
    assert shown == pytest.approx(kib, rel=0.05)
    assert float(numbers[3]) == pytest.approx(kib[0] / kib[1], abs=0.05)
    messages = [{"role": "user", "content": QUESTION}]
    answer = ask(page, QUESTION)
    assert answer == answer_of(server, document["id"], messages)
    # A second question continues the conversation; without it, the answer would be another one.
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And near the hill?"}]
    expected = answer_of(server, document["id"], messages)
    assert expected != answer_of(server, document["id"], messages[-1:])
    assert ask(page, "And near the hill?") == expected
    page.get_by_role("button", name="Forget questions").click()
    assert page.locator("#log article").count() == 0
    assert ask(page, QUESTION) == answer


def test_kept_tokens_are_shown(server: RunningServer, visit: Open) -> None:
    page = visit(server)
    with page.expect_response("**/tokens?*") as response:
        compress(page, text_of(6, 8) + " <b>bold</b>", PRESSES[2])
    kept = response.value.json()
    spans = page.locator("#map span")
    assert spans.all_text_contents() == kept["texts"]
    assert page.locator("#map b").count() == 0
    shades = spans.evaluate_all("all => all.map(span => +span.dataset.k)")
    assert [shade == 0 for shade in shades] == [share == 0 for share in kept["shares"]]
    assert max(shades) == SHADES
    assert all(abs(shade - SHADES * share) < 1 + 1e-3 for shade, share in zip(shades, kept["shares"], strict=True))
    colours = spans.evaluate_all("all => all.map(span => getComputedStyle(span).backgroundColor)")
    assert len(set(zip(shades, colours, strict=True))) == len(set(shades)) > 3  # every shade has its colour
    assert f"{kept['evicted']} of {kept['total']} tokens are held by no head" in page.locator("#kept").inner_text()
    assert not page.get_by_role("button", name="Next").is_visible()


def test_a_long_text_is_shown_in_parts(server: RunningServer, visit: Open) -> None:
    """The server's answer is replaced by that for 9000 tokens."""
    page = visit(server)
    part = {"press": "none", "total": 9000, "kept": 1, "evicted": 0, "texts": ["a", "b"], "shares": [1, 0]}

    def fulfil(route: playwright.Route) -> None:
        start = int(route.request.url.partition("start=")[2].partition("&")[0])
        texts = ["text"] * min(4096, 9000 - start)
        route.fulfill(body=json.dumps({**part, "start": start, "texts": texts, "shares": [1] * len(texts)}))

    page.route("**/tokens?*", fulfil)
    compress(page, text_of(1, 2))
    ranges = [page.locator("#range").inner_text()]
    for _ in range(2):
        page.get_by_role("button", name="Next").click()
        playwright.expect(page.locator("#range")).not_to_have_text(ranges[-1])
        ranges.append(page.locator("#range").inner_text())
    assert ranges == ["Tokens 1 to 4096 of 9000", "Tokens 4097 to 8192 of 9000", "Tokens 8193 to 9000 of 9000"]
    assert page.get_by_role("button", name="Next").is_disabled()
    page.get_by_role("button", name="Previous").click()
    playwright.expect(page.locator("#range")).to_have_text(ranges[1])


def test_a_file_is_read(server: RunningServer, visit: Open, tmp_path: Path) -> None:
    page = visit(server)
    path = tmp_path / "story.txt"
    path.write_text("The king waits — here.", encoding="utf-8")
    page.get_by_label("Text file", exact=True).set_input_files(path)
    playwright.expect(page.get_by_label("Paste a text")).to_have_value("The king waits — here.")
    transfer = page.evaluate_handle(
        "() => { const t = new DataTransfer(); t.items.add(new File(['A queen.'], 'b.txt')); return t; }"
    )
    page.dispatch_event("#text", "drop", {"dataTransfer": transfer})
    playwright.expect(page.get_by_label("Paste a text")).to_have_value("A queen.")
    path.write_bytes(b"\xff\xfe\x00\x01")
    page.get_by_label("Text file", exact=True).set_input_files(path)
    playwright.expect(page.get_by_role("alert")).to_have_text("story.txt is not a text file in UTF-8.")


def test_a_stopped_answer_frees_its_row(server: RunningServer, visit: Open) -> None:
    page = visit(server)
    compress(page, text_of(7, 4))
    page.get_by_label("Longest answer").fill("3000")
    page.get_by_label("Question about the text").fill(QUESTION)
    page.get_by_label("Question about the text").press("Enter")
    playwright.expect(page.locator("#log article.answer div")).to_have_text(re.compile(r".{20}", re.DOTALL))
    page.get_by_role("button", name="Stop").click()
    server.wait_until_idle()
    playwright.expect(page.get_by_role("button", name="Send")).to_be_visible()
    playwright.expect(page.get_by_role("alert")).to_have_text("")


def test_an_error_of_the_server_is_shown(server: RunningServer, visit: Open) -> None:
    page = visit(server)
    compress(page, text_of(8, 4))
    page.get_by_label("Longest answer").fill("90000")
    page.get_by_label("Question about the text").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("shorten")
    assert page.locator("#log article").count() == 0
    playwright.expect(page.get_by_label("Question about the text")).to_have_value(QUESTION)
    assert ask(page, QUESTION)
    playwright.expect(page.get_by_role("alert")).to_have_text("")


def test_a_key_is_kept_for_the_session(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    with running(api=ApiSettings("reference", None, keys=ApiKeys(path))) as server:
        page = visit(server)
        field = page.get_by_label("Key of this server")
        playwright.expect(field).to_be_visible()
        assert page.get_by_role("button", name="Compress").is_disabled()
        for key, is_right in (("another key", False), (KEY, True)):
            field.fill(key)
            page.get_by_role("button", name="Use key").click()
            playwright.expect(field).to_be_visible(visible=not is_right)
            message = "" if is_right else "no valid API key: send it as `Authorization: Bearer KEY`"
            playwright.expect(page.get_by_role("alert")).to_have_text(message)
        page.reload()
        playwright.expect(page.locator("#model")).to_have_text("reference")
        assert not field.is_visible()
        compress(page, text_of(2, 3))
        assert page.evaluate("localStorage.length") == 0
        playwright.expect(visit(server).get_by_label("Key of this server")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1280])
def test_the_page_fits_any_screen(server: RunningServer, visit: Open, width: int, scheme: str) -> None:
    page = visit(server, width, scheme)
    compress(page, text_of(6, 8), PRESSES[2])
    ask(page, "W" * 90)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    assert page.locator(".panel, #log, #map, button").evaluate_all(cut) == []
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert [each for each in contrasts if each[0] < 4.5] == []


def test_the_keyboard_reaches_all_controls_and_each_has_a_name(server: RunningServer, visit: Open) -> None:
    page = visit(server)
    compress(page, text_of(6, 8))
    ask(page, QUESTION)
    page.get_by_role("heading", level=1).click()  # Tab starts behind it
    names = []
    for _ in range(20):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id"))
        if names[-1] == "map":
            break
    assert names == ["text", "file", "press", "compress", "log", "question", "longest", "send", "clear", "map"]
    tree = page.locator("body").aria_snapshot()
    roles = ("textbox", "combobox", "spinbutton", "button", "log", "region")
    entries = [line.strip(" -").rstrip(":") for line in tree.splitlines()]
    assert [each for each in entries if each in roles] == []  # an entry without a name has its role only
    assert any(each.startswith('textbox "Paste a text') for each in entries)


def test_files_have_a_strict_policy(server: RunningServer) -> None:
    for path in FILES:
        response = server.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert "://" not in response.text.replace("http://www.w3.org/2000/svg", "")


def test_an_injected_script_cannot_run(server: RunningServer, browser: playwright.Browser) -> None:
    """The policy holds even if a text became HTML."""
    page = browser.new_page()
    page.goto(f"{server.url}/")
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("""document.body.insertAdjacentHTML("beforeend", "<p onclick='document.title = 1'>x</p>")""")
        page.get_by_text("x", exact=True).click()
    assert page.title() == "kvpress serve"
    page.close()
