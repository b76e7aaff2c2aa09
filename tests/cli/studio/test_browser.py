"""The page in a real browser: chosen, watched, stopped, compared, saved; and nothing from outside.

Needs gradio, selenium, and Chromium with its driver; is skipped where one is missing.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from chipsparse import load_profile

FOUND = {
    "gradio": importlib.util.find_spec("gradio"),
    "selenium": importlib.util.find_spec("selenium"),
    "chromium": shutil.which("chromium"),
    "chromedriver": shutil.which("chromedriver"),
}
MISSING = [name for name, found in FOUND.items() if found is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}"),
]

PROMPT = "a red circle moves left over a blue gradient"
SECONDS = 120
DESKTOP, PHONE = (1280, 900), (390, 844)
# Runs the command, and tells of each connection that is not within this machine.
GUARDED = """
import sys

def look(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        if arguments[1][0] not in ("127.0.0.1", "::1", "localhost"):
            print("connects to", arguments[1], file=sys.stderr, flush=True)
            raise OSError("nothing may leave this machine")

sys.addaudithook(look)
from chipsparse.cli.main import main
sys.argv[0] = "chipsparse"
main()
"""


@pytest.fixture(scope="module")
def served(model_folder, flux_folder, tmp_path_factory):
    """The address of a studio with a tiny model of videos, and what it printed, line by line."""
    temporary = tmp_path_factory.mktemp("temporary")
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED, "studio", "--model", str(model_folder), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "HF_HUB_CACHE": str(temporary / "none")},
    )
    lines, ready = [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "chipsparse studio: " in line:
                ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(SECONDS), lines
        yield re.search(r"http://\S+", "".join(lines))[0], lines
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        reader.join()
        assert lines[-1] == "chipsparse: interrupted, the page is closed\n"
        assert not [line for line in lines if "connects to" in line]
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        reader.join()


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = FOUND["chromium"]
    options.add_experimental_option(
        "prefs",
        {"download.default_directory": str(downloads), "download.prompt_for_download": False},
    )
    for each in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(each)
    service = Service(FOUND["chromedriver"])
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def resized(browser, width, height):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def page(browser, served):
    """The page, fresh, with all that one does on it."""
    resized(browser, *DESKTOP)
    browser.get(served[0])
    page = Driven(browser)
    page.wait(lambda: page.all("#generate"))
    return page


class Driven:
    """A page, driven as a person would."""

    def __init__(self, browser):
        self.browser = browser

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        (found,) = self.all(selector)
        return found

    def texts(self, selector):
        return [each.text for each in self.all(selector)]

    def wait(self, found, seconds=SECONDS):
        """What a function finds, once it does."""
        from selenium.common.exceptions import WebDriverException

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(WebDriverException, ValueError):
                if result := found():
                    return result
            time.sleep(0.05)
        shown = self.browser.execute_script("return document.body.innerText")
        raise AssertionError(f"did not come within {seconds} s; the page shows:\n{shown}")

    def write(self, selector, text):
        from selenium.webdriver.common.keys import Keys

        field = self.one(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def generate(self):
        self.wait(lambda: self.one("#generate").is_enabled())
        self.one("#generate").click()

    def result(self):
        """The tiles of the next result."""
        self.wait(lambda: self.one("#stop").is_enabled())
        self.wait(lambda: self.all("#result .cs-tiles div") and self.one("#generate").is_enabled())
        tiles = (each.text.splitlines() for each in self.all("#result .cs-tiles div"))
        return {name: value for value, name in tiles}

    def pixels(self):
        """The sizes of the two images that lie beside each other."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('#beside img')].map(e => [e.naturalWidth, "
            "e.naturalHeight, e.src])"
        )


def test_a_video_from_the_prompt_to_the_saved_profile(page, served, downloads, model_folder):
    page.write("#prompt textarea", PROMPT)
    page.generate()
    # Times and differences.
    tiles = page.result()
    assert {"sparse, all steps", "dense, all steps", "as fast as dense", "PSNR", "SSIM"} < set(
        tiles
    )
    assert re.fullmatch(r"[\d.]+ dB", tiles["PSNR"])
    # What each step computed.
    letters = page.texts("#result .cs-strip li")
    assert letters == [*"DRSS", *"DDDD"]
    # Both players play the same size; the slider shows the frame that is asked for.
    sizes = page.wait(
        lambda: page.browser.execute_script(
            "const v = [...document.querySelectorAll('video')].filter(e => e.videoWidth);"
            "return v.length === 2 && v.map(e => [e.videoWidth, e.videoHeight])"
        )
    )
    assert sizes == [[48, 32], [48, 32]]
    both = page.wait(lambda: [p for p in page.pixels() if p[:2] == [48, 32]][:2])
    assert len({source for *_, source in both}) == 2
    page.write("#frame input[type=number]", "4\t")
    page.wait(lambda: not {source for *_, source in both} & {p[2] for p in page.pixels()})
    # The profile, and the command.
    page.one("#profile").click()
    (saved,) = page.wait(lambda: [p for p in downloads.iterdir() if p.suffix == ".yaml"])
    assert load_profile(saved).sparsity == load_profile(model_folder / "chipsparse.yaml").sparsity
    command = page.one("#command").text
    assert "chipsparse generate" in command
    assert PROMPT in command
    # Nothing came from elsewhere.
    sources = page.browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert len(sources) > 10
    assert [s for s in sources if not s.startswith((served[0], "data:", "blob:"))] == []


def test_a_model_of_images_is_chosen_and_what_does_not_fit_is_said(page, flux_folder):
    page.write("#model input", f"{flux_folder}\n")
    page.wait(lambda: "FluxTransformer2DModel" in page.one("#model").text)
    page.write("#prompt textarea", PROMPT)
    page.one("button.label-wrap").click()
    page.wait(lambda: page.one("#height input").is_displayed())
    assert not page.all("#frames input") or not page.one("#frames input").is_displayed()
    assert page.one("#height input").get_attribute("value") == "32"
    page.write("#height input", "33")
    page.generate()
    alert = page.wait(lambda: page.texts("#moment .cs-alert"))
    assert alert == [
        "Height 33 does not fit this model, which needs a multiple of 16; use 32 or 48"
    ]
    page.write("#height input", "48")
    page.generate()
    assert "PSNR" in page.result()
    page.wait(lambda: [p[:2] for p in page.pixels()].count([48, 48]) == 2)
    assert not [each for each in page.all("video") if each.is_displayed()]


def test_a_generation_is_watched_and_stopped(page):
    page.write("#prompt textarea", PROMPT)
    page.one("button.label-wrap").click()
    page.wait(lambda: page.one("#steps input").is_displayed())
    page.write("#steps input", "400")
    page.generate()
    page.wait(lambda: page.all("#moment .cs-strip li:not(.cs-planned)"))
    (stage,) = page.texts("#moment .cs-stage strong")
    assert re.fullmatch(r"sparse run: step \d+ of 400", stage)
    # Two frames of latents, which have an eighth of the pixels.
    page.wait(
        lambda: (
            page.browser.execute_script(
                "return [...document.querySelectorAll('#moment .cs-preview img')].map(e => "
                "[e.naturalWidth, e.naturalHeight])"
            )
            == [[6, 4], [6, 4]]
        )
    )
    page.one("#stop").click()
    page.wait(lambda: page.texts("#moment .cs-stage strong") == ["stopped"])
    done = page.all("#moment .cs-strip li:not(.cs-planned)")
    assert 0 < len(done) < 400
    assert page.one("#generate").is_enabled()
    assert not page.one("#stop").is_enabled()


def test_a_phone_shows_all_of_it_in_one_column(page):
    resized(page.browser, *PHONE)
    page.write("#prompt textarea", PROMPT)
    page.generate()
    page.result()
    width = page.browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= PHONE[0]
    left, right = (page.one(each).rect for each in ("#prompt", "#result"))
    assert right["y"] > left["y"] + left["height"]
    for each in ("#generate", "#result .cs-tiles", "#beside", "#profile"):
        rect = page.one(each).rect
        assert rect["x"] >= 0
        assert rect["x"] + rect["width"] <= PHONE[0]
