"""The page of `bigscl view` in a real browser: headless Chromium and Playwright. Skipped without them."""

import contextlib
import json
import re
import shutil
import time

import numpy as np
import pytest

from bigscl.data.answers import FILE, read_answers
from bigscl.tools.viewer.score_index import Query, listed
from tests.builders import make_shards, write_config
from tests.integration.runs import Running
from tests.test_tools.test_view_server import HOSTILE, hostile_run
from tests.test_tools.view_site import SECONDS, TOKEN, at, looking, serving, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("browsed")
    for name in ("dense", "weak"):
        shutil.copytree(runs / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def site(folder):
    with serving(folder / "dense", folder / "weak") as site:
        yield site


def keys(page):
    return page.locator(".tile a").evaluate_all("tiles => tiles.map(one => one.title)")


def listed_pairs(site, query):
    return listed(site.runs[0].index, query, site.runs[0].data.index)


def painted(page, selector=".picture canvas"):
    """Return the colours of the first canvas, `[W,W,4]`."""
    script = """one => [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data]"""
    values = np.array(page.locator(selector).first.evaluate(script), np.uint8)
    side = round((len(values) / 4) ** 0.5)
    return values.reshape(side, side, 4)


def test_grid_shows_images_with_heat_and_pages(page, site):
    page.goto(at(site))
    page.wait_for_selector(".tile img")
    first = keys(page)
    assert len(first) == 24
    wanted = listed_pairs(site, Query())
    index = site.runs[0].data.index
    assert first == [index.key(int(row)) for row in wanted["row"][:24]]
    until(page, "[...document.images].every(one => one.complete && one.naturalWidth)")
    heat = site.runs[0].store.peek([int(wanted["row"][0])]).heatmaps[0, wanted["class"][0]]
    alpha = painted(page)[..., 3].astype(float) / 255
    np.testing.assert_allclose(alpha, heat, atol=0.02)
    page.keyboard.press("]")
    until(page, "document.querySelectorAll('.tile').length === 6")
    assert "offset=24" in page.url
    page.go_back()
    until(page, "document.querySelectorAll('.tile').length === 24")
    assert keys(page) == first


def test_filters_change_the_grid_and_the_address_which_shows_the_same_again(page, browser, site):
    page.goto(at(site))
    page.select_option("[name=class]", "3")
    page.wait_for_url(re.compile("class=3"))
    page.select_option("[name=annotated]", "no")
    page.select_option("[name=present]", "yes")
    page.fill("[name=low]", "0.3")
    page.press("[name=low]", "Enter")
    page.wait_for_url(re.compile("low=0.3"))
    wanted = listed_pairs(site, Query(number=3, annotated=False, present=True, low=0.3))
    index = site.runs[0].data.index
    found = [index.key(int(row)) for row in wanted["row"]]
    assert 0 < len(found) < 24
    until(page, f"document.querySelectorAll('.tile').length === {len(found)}")
    assert keys(page) == found
    with looking(browser) as other:
        other.goto(page.url)
        other.wait_for_selector(".tile")
        assert keys(other) == found
        assert other.input_value("[name=class]") == "3"
    page.fill("[name=key]", "no such key")
    page.press("[name=key]", "Enter")
    page.wait_for_selector("text=No sample matches.")


def test_what_is_typed_survives_a_page_that_arrives_meanwhile(page, site):
    page.goto(at(site))
    for name, first, rest in [("key", "train_0000", "0"), ("low", "0.", "1")]:
        page.wait_for_selector(".tile")
        page.focus(f"[name={name}]")
        page.keyboard.type(first)
        page.evaluate("window.before = document.querySelector('.grid'); dispatchEvent(new Event('state'))")
        until(page, "document.querySelector('.grid') !== window.before")
        page.keyboard.type(rest)
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(f"{name}={first}{rest}(&|$)"))
        assert page.locator("form.filters, .summary, .grid").count() == 3


def test_sample_is_opened_and_looked_at_with_the_keyboard(page, site):
    page.goto(at(site))
    page.wait_for_selector(".tile")
    first, second = keys(page)[:2]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(".bars li.focus")
    assert page.text_content("h1") == first
    bars = page.locator(".bars li .name").all_text_contents()
    assert len(bars) == 10
    focus = page.text_content(".bars li.focus .name")
    page.keyboard.press("ArrowDown")
    page.wait_for_url(re.compile("focus="))
    assert page.text_content(".bars li.focus .name") == bars[bars.index(focus) + 1]
    assert page.locator("rect.box").count() > 0
    page.keyboard.press("b")
    until(page, "document.querySelectorAll('rect.box').length === 0")
    page.locator("#opacity").fill("20")
    assert page.locator(".picture canvas").first.evaluate("one => getComputedStyle(one).opacity") == "0.2"
    page.keyboard.press("m")
    assert (
        page.locator(".picture canvas").first.evaluate("one => getComputedStyle(one).imageRendering")
        == "pixelated"
    )
    assert "opacity=20" in page.url
    assert "smooth=no" in page.url
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    until(page, f"document.querySelector('h1').textContent === {json.dumps(second)}")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tile")


def test_epochs_of_a_tracked_sample_are_stepped_through(page, site):
    store = site.runs[0].store
    row = store.spec.history_samples[1]
    past = store.history(row)
    number = int(past[2].scores[0].argmax())
    page.goto(at(site, f"?page=sample&row={row}&focus={number}"))
    page.wait_for_selector("#epoch")
    now = painted(page)
    page.locator("#epoch").fill("0")
    page.wait_for_selector("text=after epoch 1")
    place = past[0].kept_classes()[0].tolist().index(number)
    alpha = painted(page)[..., 3].astype(float) / 255
    np.testing.assert_allclose(alpha, past[0].heatmaps[0, place], atol=0.02)
    assert not np.array_equal(painted(page), now)
    told = page.text_content(".bars li.focus b")
    assert float(told) == pytest.approx(float(past[0].scores[0, number]), abs=0.006)
    assert page.locator("svg.spark path").count() == 10
    page.keyboard.press(".")
    page.wait_for_selector("text=after epoch 2")


def test_two_runs_are_shown_side_by_side(page, site):
    page.goto(at(site, "?page=sample&row=4&against=1&focus=2"))
    page.wait_for_selector(".side + .side")
    scores = page.locator(".bars li.focus b").all_text_contents()
    wanted = [float(run.store.read([4]).scores[0, 2]) for run in site.runs]
    assert [float(one) for one in scores] == pytest.approx(wanted, abs=0.006)
    page.goto(at(site, "?against=1&sort=against"))
    page.wait_for_selector(".tile")
    apart = [abs(np.subtract(*[run.store.read([row]).scores[0].astype(float) for run in site.runs])).max()
             for row in range(30)]  # fmt: skip
    assert keys(page)[0] == site.runs[0].data.index.key(int(np.argmax(apart)))


def test_classes_lead_to_their_samples(page, site):
    page.goto(at(site, "?page=classes"))
    page.wait_for_selector("table")
    assert page.locator("tbody tr").count() == 10
    counts = site.runs[0].index.classes
    assert f"{counts.mined.sum():,}" in page.text_content(".facts")
    number = int(counts.mined.argmax())
    page.locator("tbody tr").nth(number).locator("a").click()
    page.locator("article.class a").first.click()
    page.wait_for_selector(".tile")
    assert len(keys(page)) == min(24, counts.mined[number])


def test_questions_are_answered_with_keys(page, site, folder):
    page.goto(at(site, f"?page=ask&token={TOKEN}"))
    page.wait_for_selector(".answer.yes")
    assert TOKEN not in page.url
    asked = []
    for key in "ynsy":
        asked.append((page.get_attribute(".picture img", "alt"), page.text_content("h1 strong")))
        page.keyboard.press(key)
    until(page, "document.querySelectorAll('.trail li').length === 4")
    page.keyboard.press("u")
    until(page, "document.querySelectorAll('.trail li').length === 3")
    assert (page.get_attribute(".picture img", "alt"), page.text_content("h1 strong")) == asked[3]
    page.wait_for_selector("text=1 yes, 1 no in the file")
    page.keyboard.press("n")
    page.wait_for_selector("text=1 yes, 2 no in the file")
    found = {pair: one.yes for pair, one in read_answers(folder / "dense" / FILE).standing.items()}
    assert found == {asked[0]: True, asked[1]: False, asked[3]: False}
    page.reload()
    page.wait_for_selector(".answer.yes")
    assert (page.get_attribute(".picture img", "alt"), page.text_content("h1 strong")) not in found


def test_without_the_token_questions_cannot_be_answered(page, site):
    page.goto(at(site, "?page=ask"))
    page.wait_for_selector("text=open the address that bigscl view printed")
    assert page.locator(".answer").count() == 0


def test_hostile_names_are_text(browser, tmp_path, index):
    with serving(hostile_run(tmp_path, index)) as site, looking_past_errors(browser) as (page, faults):
        for query in (
            "",
            "?page=sample&row=0",
            "?page=sample&row=5",
            "?page=classes&class=0",
            "?page=run",
            "?page=ask",
        ):
            page.goto(at(site, query))
            page.wait_for_load_state("networkidle")
            assert page.locator("main img[onerror], main script").count() == 0
        page.goto(at(site, "?page=classes"))
        page.wait_for_selector("table")
        assert HOSTILE in page.locator("tbody a").all_text_contents()
        page.goto(at(site, f"?key={HOSTILE[:10]}"))
        page.wait_for_selector(".tile")
        assert all(key.startswith("<img src=x") for key in keys(page))
    assert not [one for one in faults if "dialog" in one]


@contextlib.contextmanager
def looking_past_errors(browser):
    """A page whose unreadable images may fail to load."""
    context = browser.new_context()
    page, faults = context.new_page(), []
    page.on("dialog", lambda dialog: (faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
    yield page, faults
    context.close()


def test_curves_of_a_running_training_grow(page, tmp_path):
    shards = make_shards(tmp_path / "shards", 60, 16, val=8)
    config = write_config(
        tmp_path / "run.yaml", shards,
        schedule={"main": {"epochs": 60, "learning_rate": 2e-3}},
    )  # fmt: skip
    run = tmp_path / "run"
    with Running(run, config):
        deadline = time.monotonic() + SECONDS
        while not (run / "metrics.jsonl").exists() or not list(run.glob("store/snapshots/*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with serving(run) as site:
            page.goto(at(site, "?page=run"))
            page.wait_for_selector("path.curve")
            first = page.locator("path.curve").first.get_attribute("d")
            until(
                page,
                "before => document.querySelector('path.curve').getAttribute('d').length > before.length",
                first,
            )
            assert "alive" in page.text_content("#store") or page.wait_for_selector("text=alive")
            page.goto(at(site))
            page.wait_for_selector(".tile")


def test_keys_are_listed(page, site):
    page.goto(at(site))
    page.wait_for_selector(".tile")
    page.keyboard.press("?")
    assert "next and previous page" in page.text_content("dialog")
    page.keyboard.press("Escape")
    for key, name in {"2": "classes", "3": "run", "4": "ask", "1": "samples"}.items():
        page.keyboard.press(key)
        page.wait_for_url(re.compile(f"page={name}"))
