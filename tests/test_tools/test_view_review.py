"""Review on the page in a real browser: answers in bulk, keyboard, layout, touch, and accessibility."""

import csv
import json
import shutil

import pytest

from bigscl.data.answers import FILE, read_answers
from tests.test_tools.view_site import TOKEN, at, looking, serving, until

pytestmark = pytest.mark.timeout(300)
DESKTOP = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, runs):
    folder = tmp_path_factory.mktemp("reviewed")
    for number, name in enumerate(("dense", "weak")):
        shutil.copytree(runs / name, folder / name)
        lines = [
            {"kind": "train", "step": step, "loss": (1 + step % 2) / (step + number)} for step in range(1, 30)
        ]
        (folder / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def site(folder):
    with serving(folder / "dense", folder / "weak") as site:
        yield site


@pytest.fixture
def answers(folder):
    """The file of answers, which no test has written to yet."""
    file = folder / "dense" / FILE
    file.unlink(missing_ok=True)
    return file


def opened(page, site, query=""):
    page.goto(at(site, f"?token={TOKEN}&{query}"))
    page.wait_for_selector(".tile")


def tiles(page, script):
    """Return what a script says of each tile."""
    return page.locator(".tile").evaluate_all(f"tiles => tiles.map(tile => {script})")


def keys_of(page):
    return tiles(page, "tile.querySelector('a').title")


def shown(page):
    """Return what the tiles say was answered: key to yes or no."""
    said = tiles(page, "tile.querySelector('.said')?.textContent.slice(2)")
    return {key: text for key, text in zip(keys_of(page), said, strict=True) if text}


def chosen(page):
    return page.locator(".tile.chosen").count()


def standing(file):
    return {answer.key: answer.yes for answer in read_answers(file).standing.values()}


# Answers in bulk


def test_tiles_are_selected_by_click_and_answered_together(page, site, answers, browser):
    opened(page, site)
    keys = keys_of(page)
    page.locator(".tile").nth(1).hover()
    page.locator(".pick").nth(1).click()
    page.locator(".tile a").nth(4).click(modifiers=["Shift"])
    assert chosen(page) == 4
    # While there is a selection, a click on an image adds to it.
    page.locator(".tile a").nth(2).click()
    page.locator(".tile a").nth(6).click()
    assert chosen(page) == 4
    page.click(".bulk .yes")
    page.wait_for_selector("text=4 answered yes")
    wanted = {keys[number]: "yes" for number in (1, 3, 4, 6)}
    assert shown(page) == wanted
    until(page, "document.querySelectorAll('.tile.chosen').length === 0")
    page.locator(".pick").nth(3).click(force=True)
    page.click(".bulk .no")
    page.wait_for_selector("text=1 answered no")
    with looking(browser) as other:
        opened(other, site)
        assert shown(other) == {**wanted, keys[3]: "no"}
    assert standing(answers) == {keys[1]: True, keys[3]: False, keys[4]: True, keys[6]: True}
    # The answer before stands again; then there is none.
    page.click(".bulk button >> text=undo")
    page.wait_for_selector("text=1 undone")
    assert shown(page) == wanted
    page.click(".bulk button >> text=undo")
    page.wait_for_selector("text=4 undone")
    page.reload()
    page.wait_for_selector(".tile")
    assert shown(page) == {}
    assert standing(answers) == {}
    assert len(answers.read_text().splitlines()) == 10


def test_tiles_are_selected_and_answered_with_the_keyboard(page, site, answers):
    opened(page, site)
    keys = keys_of(page)
    for key in ("ArrowRight", "x", "Shift+ArrowRight", "Shift+ArrowDown"):
        page.keyboard.press(key)
    columns = len(set(tiles(page, "tile.offsetLeft")))
    assert chosen(page) == 3
    page.keyboard.press("n")
    page.wait_for_selector("text=3 answered no")
    wanted = {keys[number]: "no" for number in (0, 1, 1 + columns)}
    assert shown(page) == wanted
    # The tile in focus alone, then the next page and back, and undo there.
    page.keyboard.press("y")
    page.wait_for_selector("text=1 answered yes")
    assert shown(page) == {**wanted, keys[1 + columns]: "yes"}
    page.keyboard.press("]")
    until(page, "document.querySelectorAll('.tile').length === 6")
    page.keyboard.press("[")
    until(page, "document.querySelectorAll('.tile').length === 24")
    page.keyboard.press("u")
    page.wait_for_selector("text=1 undone")
    assert shown(page) == wanted
    page.keyboard.press("a")
    assert chosen(page) == 24
    page.keyboard.press("a")
    assert chosen(page) == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert chosen(page) == 1
    # Enter opens a sample even then; on the way back its tile has the focus.
    page.keyboard.press("Enter")
    page.wait_for_selector(".bars")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tile")
    assert page.evaluate("document.activeElement.title") == keys[0]
    assert chosen(page) == 0
    page.keyboard.press("u")
    page.wait_for_selector("text=3 undone")
    assert standing(answers) == {}


def test_answers_that_cannot_be_saved_are_not_shown(browser, site, answers):
    answers.write_text("no answer\n")
    context = browser.new_context(**DESKTOP)  # which may write an error to its console
    page = context.new_page()
    opened(page, site)
    page.keyboard.press("a")
    page.keyboard.press("y")
    page.wait_for_selector("[role=alert]")
    assert "not saved" in page.text_content("[role=alert]")
    assert "Correct the line" in page.text_content("[role=alert]")
    assert shown(page) == {}
    assert page.locator("text=undo").count() == 0
    assert answers.read_text() == "no answer\n"
    context.close()


def test_without_the_token_tiles_cannot_be_answered(page, site, answers):
    page.goto(at(site))
    page.wait_for_selector(".tile")
    page.keyboard.press("a")
    page.wait_for_selector(".bulk >> text=open the address that bigscl view printed")
    page.keyboard.press("y")
    assert page.locator(".bulk .yes, .said").count() == 0
    assert not answers.exists()


def test_the_list_is_downloaded(page, site, tmp_path):
    opened(page, site, "expected=yes&annotated=no&sort=row")
    with page.expect_download() as download:
        page.click("text=download CSV")
    download.value.save_as(tmp_path / "samples.csv")
    with (tmp_path / "samples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = keys_of(page)
    assert [row["key"] for row in rows][: len(keys)] == keys
    assert f"{len(rows)} of 30 samples" in page.text_content(".summary")
    assert {(row["annotated"], row["expected"]) for row in rows} == {("False", "True")}


# What is shown


def test_legend_has_what_is_on_the_page_and_tiles_the_given_labels(page, site):
    opened(page, site, "annotated=yes&class=3&sort=score")
    legend = page.locator(".summary .legend > span").all_text_contents()
    assert legend[0] == "annotated"
    assert legend[-1] == "heat 01"
    assert not {"not there", "there, not annotated", "not annotated"} & set(legend)
    assert set(page.locator(".tile .given").all_text_contents()) == {"given: 3"}
    opened(page, site, "annotated=no&sort=row&class=3")
    assert "annotated" not in page.locator(".summary .legend > span").all_text_contents()


def test_words_are_explained(page, site):
    opened(page, site)
    page.keyboard.press("?")
    words = page.locator("dialog dt").all_text_contents()
    assert {"expected", "cut", "surprise"} <= set(words)
    page.keyboard.press("a")  # is not meant for the tiles behind
    assert chosen(page) == 0


def test_a_question_is_clear_until_a_key_shows_the_heat(page, site, answers):
    page.goto(at(site, f"?page=ask&token={TOKEN}"))
    page.wait_for_selector(".answer.yes")
    canvas = page.locator(".picture canvas")
    assert not canvas.is_visible()
    page.keyboard.press("h")
    assert canvas.is_visible()
    assert page.locator(".heat-bar").count() == 1
    page.keyboard.press("s")
    page.wait_for_selector("text=skipped")
    assert not canvas.is_visible()


def test_images_of_two_runs_are_zoomed_together(page, site):
    page.goto(at(site, "?page=sample&row=4&against=1"))
    page.wait_for_selector(".side + .side")
    width = "Math.round(100 * one.clientWidth / one.parentElement.clientWidth)"
    sizes = f"all => all.map(one => {width})"
    page.keyboard.press("+")
    assert page.locator(".layers").evaluate_all(sizes) == [150, 150]
    page.locator(".picture").last.hover()
    page.mouse.down()
    page.mouse.move(0, 0)
    page.mouse.up()
    corner = "all => all.map(one => [one.style.left, one.style.top])"
    offsets = page.locator(".layers").evaluate_all(corner)
    assert offsets == [["-50%", "-50%"]] * 2  # no further than to the corner
    page.keyboard.press("0")
    assert page.locator(".layers").evaluate_all(sizes) == [100, 100]


def test_curves_of_runs_share_a_chart_and_are_smoothed(page, site):
    page.goto(at(site, "?page=run"))
    page.wait_for_selector("path.curve")
    assert page.locator("figure").count() == 1
    assert page.locator("path.curve").count() == 2
    assert page.locator("path.raw").count() == 0
    rough = page.locator("path.curve").first.get_attribute("d")
    page.locator("#smoothing").fill("60")
    assert page.locator("path.raw").first.get_attribute("d") == rough
    assert page.locator("path.curve").first.get_attribute("d") != rough
    page.locator("figure svg").hover()
    assert page.text_content(".values").startswith("step 1")
    page.locator(".runs input").first.uncheck()
    assert page.locator("path.curve").count() == 1
    page.reload()
    page.wait_for_selector("path.curve")
    assert page.locator("path.curve").count() == 2  # that of the chosen run is always there
    assert page.input_value("#smoothing") == "60"


# Room

OVERFLOW = "document.documentElement.scrollWidth > innerWidth"


def test_tiles_fill_the_width_in_full_rows_of_any_size(browser, site):
    with looking(browser, **DESKTOP) as page:
        opened(page, site)
        counts = []
        for key in ("", "-", "-", "+", "+", "+", "+"):
            if key:
                page.keyboard.press(key)
                page.wait_for_timeout(600)
            lefts, rights = (
                tiles(page, f"tile.getBoundingClientRect().{side}") for side in ("left", "right")
            )
            columns = len(set(lefts))
            assert len(lefts) % columns == 0 or len(lefts) == 30  # all there are
            assert max(rights) == pytest.approx(1420, abs=2)
            assert not page.evaluate(OVERFLOW)
            counts.append(columns)
        assert counts[2] > counts[0] > counts[-1]


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_all_of_a_question_is_above_the_fold(browser, site, answers, screen):
    with looking(browser, **screen) as page:
        page.goto(at(site, f"?page=ask&token={TOKEN}"))
        page.wait_for_selector(".answer.yes")
        page.wait_for_load_state("networkidle")
        assert page.evaluate("scrollY") == 0
        for part in (".picture img", "h1", ".answer >> nth=-1", ".look button", ".facts", ".person"):
            box = page.locator(part).bounding_box()
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= screen["viewport"]["height"], part
        assert page.locator(".picture img").bounding_box()["height"] > 250
        assert not page.evaluate(OVERFLOW)


def test_phone_shows_no_keys_and_where_more_is_to_the_side(browser, site):
    with looking(browser, **PHONE) as page:
        opened(page, site)
        edges = "one => [one.classList.contains('more-left'), one.classList.contains('more-right')]"
        until(page, "document.querySelector('.filters').classList.contains('more-right')")
        assert page.locator(".filters").evaluate(edges) == [False, True]
        page.locator(".filters").evaluate("one => one.scrollTo(9999, 0)")
        until(page, "document.querySelector('.filters').classList.contains('more-left')")
        assert page.locator(".filters").evaluate(edges) == [True, False]
        page.locator(".pick").first.tap()
        assert page.locator(".bulk .yes").is_visible()
        assert not page.locator("kbd").first.is_visible()
        page.tap("#help-button")
        assert page.locator("dialog dt").first.is_visible()
        assert not page.locator("dialog .keys").is_visible()
        page.goto(at(site, "?page=classes"))
        until(page, "document.querySelector('.table')?.classList.contains('more-right')")
        assert not page.evaluate(OVERFLOW)


# Accessibility

PAGES = (
    "",
    "page=sample&row=0&against=1",
    "page=sample&row=0",
    "page=classes&class=1",
    "page=run",
    "page=ask",
)


@pytest.mark.parametrize(
    "screen", [DESKTOP, {**PHONE, "color_scheme": "dark"}], ids=["desktop in light", "phone in dark"]
)
def test_pages_have_no_serious_fault_of_accessibility(browser, site, answers, screen):
    """By axe-core, whose rules are those of WCAG 2 and its own of good practice."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    with looking(browser, **screen) as page:
        for query in PAGES:
            page.goto(at(site, f"?token={TOKEN}&{query}"))
            page.wait_for_selector("main > section")
            page.wait_for_load_state("networkidle")
            check(axe, page, query)
            if not query:
                page.keyboard.press("a")
                page.keyboard.press("y")
                page.wait_for_selector(".said")
                page.keyboard.press("a")
                check(axe, page, "selected tiles")
                page.keyboard.press("?")
                check(axe, page, "help")


def check(axe, page, name):
    result = axe.Axe().run(page).response
    assert {"color-contrast", "button-name"} <= {rule["id"] for rule in result["passes"]}
    serious = [
        (fault["id"], node["html"][:200])
        for fault in result["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
    assert not serious, name
