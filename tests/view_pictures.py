"""The pictures of the page in docs/pictures, made from a finished quickstart with Chromium.

bigscl quickstart && python -m tests.view_pictures quickstart
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.test_tools.view_site import FLAGS, NAMES, at, looking, serving

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder of the quickstart.")
    folder = parser.parse_args().folder
    with sync_playwright() as driver, serving(folder / "scl_plus", folder / "en") as site:
        chromium = next(path for name in NAMES if (path := shutil.which(name)))
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        with looking(browser, viewport={"width": 1280, "height": 900}) as page:
            page.goto(at(site, "?annotated=no&expected=yes"))
            save(page, "view_samples")
            first = page.locator(".tile a").first.get_attribute("href")
            page.goto(at(site, f"{first}&against=1".lstrip("/")))
            save(page, "view_sample")
        browser.close()


def save(page: Page, name: str) -> None:
    page.wait_for_selector(".picture img")
    page.wait_for_load_state("networkidle")
    image = Image.open(io.BytesIO(page.screenshot()))
    image.convert("RGB").save(PICTURES / f"{name}.jpg", quality=85)


if __name__ == "__main__":
    main()
