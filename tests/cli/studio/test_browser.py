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
import time

import pytest

from chipsparse import load_profile
from tests.cli.studio.test_studio import contrast
from tests.tiny_models import PROMPT

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
PACKAGES = importlib.util.find_spec("gradio") and importlib.util.find_spec("selenium")
HERE = PACKAGES and CHROMIUM and DRIVER
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HERE, reason="no browser, or no gradio")]

SECONDS = 120
STEM = PROMPT.replace(" ", "-")
PLAYING = "return [...document.querySelectorAll('video')].map(video => video.paused)"
# Of hints and of what empty fields show: the text, its colour and that of its ground.
COLOURS = """
const ground = element => {
  const colour = getComputedStyle(element).backgroundColor;
  return /, 0\\)$/.test(colour) ? ground(element.parentElement) : colour;
};
const places = '.cs-hint, [data-testid=block-info] + div, input, textarea';
const hints = document.querySelectorAll(places);
return [...hints].filter(element => element.offsetParent && !element.value).map(element => [
  element.placeholder || element.innerText,
  getComputedStyle(element, element.placeholder ? '::placeholder' : null).color,
  ground(element),
]);
"""
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
def address(model_folder, tmp_path_factory):
    """The address of a studio with a tiny model of videos, which must leave nothing."""
    temporary = tmp_path_factory.mktemp("temporary")
    log = tmp_path_factory.mktemp("log") / "log"
    words = [sys.executable, "-c", GUARDED, "studio", "--model", str(model_folder), "--port"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with log.open("w") as stderr:
        process = subprocess.Popen([*words, "0"], stderr=stderr, env=environment)
    try:
        address = until(lambda: re.search(r"http://\S+", log.read_text()), log.read_text)[0]
        yield address
        port = address.rpartition(":")[2]
        other = subprocess.run(
            [*words, port],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert other.returncode == 2
        assert other.stderr.startswith(f"chipsparse: error: --port {port} could not be opened: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert log.read_text().endswith("chipsparse: interrupted, nothing was written\n")
        assert not re.search("connects to|Traceback", log.read_text())
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()


EXAMPLES = {
    "tiny-wan": "a red circle moves left over a blue gradient",
    "tiny-flux": "a red circle to the left of a blue square over a gray gradient",
}


def until(ask, shown):
    """The first true answer; an error while the page changes is none."""
    from selenium.common.exceptions import WebDriverException

    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(WebDriverException, ValueError):
            if result := ask():
                return result
        time.sleep(0.05)
    raise AssertionError(f"there is:\n{shown()}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    folder = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.downloads = folder
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, address):
    """The page, fresh, with a prompt."""
    page = Driven(browser)
    page.resize(1280, 900)
    browser.get(f"{address}/theme.css")  # where nothing else writes into the storage
    page.run("localStorage.clear()")
    browser.get(address)
    page.wait(lambda: page.one("#generate").is_enabled() or page.one("#stop").is_enabled())
    page.write("#prompt textarea", PROMPT)
    return page


class Driven:
    """A page, driven as a person would."""

    def __init__(self, browser):
        self.browser = browser
        self.run = browser.execute_script

    def resize(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def all(self, selector):
        return [e for e in self.browser.find_elements("css selector", selector) if e.is_displayed()]

    def one(self, selector):
        (element,) = self.all(selector)
        return element

    def texts(self, selector):
        return [element.text for element in self.all(selector)]

    def wait(self, ask):
        return until(ask, lambda: self.run("return document.body.innerText"))

    def write(self, selector, text):
        from selenium.webdriver.common.keys import Keys

        self.wait(lambda: self.one(selector)).send_keys(Keys.CONTROL, "a")
        self.one(selector).send_keys(text)

    def generate(self, **fields):
        """Generates, with these values of fields."""
        if fields and not self.all("#height input"):
            self.open_more()
        for name, value in fields.items():
            self.write(f"#{name} input", value)
        self.wait(lambda: self.one("#generate").is_enabled())
        self.one("#generate").click()
        self.wait(lambda: not self.one("#generate").is_enabled() or self.all(".cs-alert"))

    def open_more(self):
        self.one("button.label-wrap").click()
        self.wait(lambda: self.all("#height input"))

    def value(self, selector):
        return self.one(selector).get_attribute("value")

    def shows(self, selector, text):
        self.wait(lambda: self.value(selector) == text)

    def downloads(self):
        names = "return [...document.querySelectorAll('.cs-pictures a')].map(a => a.download)"
        return self.run(names)

    def result(self):
        """Returns the numbers of the result, by their names."""
        self.wait(lambda: self.all(".cs-result") and self.one("#generate").is_enabled())
        tiles = (tile.text.splitlines() for tile in self.all(".cs-tiles div"))
        return {name: value for value, name in tiles}

    def steps_done(self):
        return self.all(".cs-strip li:not(.cs-planned)")

    def pixels(self, selector="#beside img", kind="natural"):
        """Returns width, height and address of pictures."""
        shapes = f"e => [e.{kind}Width, e.{kind}Height, e.src]"
        return self.run(f"return [...document.querySelectorAll('{selector}')].map({shapes})")


def test_a_video_from_the_prompt_to_the_saved_profile(page, address, model_folder):
    page.generate()
    tiles = page.result()
    assert {"sparse, all steps", "dense, all steps", "as fast as dense", "SSIM"} < set(tiles)
    assert re.fullmatch(r"[\d.]+ dB", tiles["PSNR"])
    assert page.texts(".cs-strip li") == [*"DRSS", *"DDDD"]
    assert page.texts(".cs-asked h2") == [PROMPT]
    assert page.texts(".cs-asked p")[0].startswith("seed 0, 48x32 pixels, 5 frames, 4 steps")
    assert page.downloads() == [f"{STEM}-0-dense.mp4", f"{STEM}-0-profile.mp4"]
    page.one(".cs-both").click()
    page.wait(lambda: page.run(PLAYING) == [False, False])
    # Both players play the same size; the slider shows the frame that is asked for.
    page.wait(lambda: [p[:2] for p in page.pixels("video", "video")] == [[48, 32]] * 2)
    both = page.wait(lambda: [p for p in page.pixels() if p[:2] == [48, 32]][:2])
    assert len({source for *_, source in both}) == 2
    page.write("#frame input[type=number]", "4\t")
    page.wait(lambda: not {source for *_, source in both} & {p[2] for p in page.pixels()})
    # The profile, and the command.
    page.one("#profile").click()
    folder = page.browser.downloads
    (saved,) = page.wait(lambda: [p for p in folder.iterdir() if p.suffix == ".yaml"])
    assert load_profile(saved).sparsity == load_profile(model_folder / "chipsparse.yaml").sparsity
    command = page.one("#command textarea").get_attribute("value")
    assert command.startswith("chipsparse generate")
    assert PROMPT in command
    # Nothing came from elsewhere.
    sources = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert len(sources) > 10
    assert [s for s in sources if not s.startswith((address, "data:", "blob:"))] == []
    # A phone shows all of it in one column.
    page.resize(390, 844)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    assert page.one("#result").rect["y"] > page.one("#generate").rect["y"]


def test_a_model_of_images_is_chosen_and_what_does_not_fit_is_said(page, flux_folder):
    page.write("#model input", f"{flux_folder}\n")
    page.wait(lambda: "FluxTransformer2DModel" in page.one("#model").text)
    page.shows("#prompt textarea", "")  # the example was for another model
    page.write("#prompt textarea", PROMPT)
    page.generate(height="33")
    fitting = "Height: 33 does not fit this model, which needs a multiple of 16; use 32 or 48"
    page.wait(lambda: page.texts(".cs-alert") == [fitting])
    page.generate(seed="-1")
    page.wait(lambda: page.texts(".cs-alert") == ["Seed: -1 must be greater than or equal to 0"])
    page.generate(seed="1.5")
    page.wait(lambda: page.texts(".cs-alert") == ["Seed: 1.5 must be a valid integer"])
    # Loaded anew, the page has the fields and no error.
    page.browser.refresh()
    page.wait(lambda: page.all("#seed input") and page.value("#seed input") == "1.5")
    page.wait(lambda: "FluxTransformer2DModel" in page.one("#model").text)
    assert page.value("#prompt textarea") == PROMPT
    assert not page.all(".cs-alert")
    page.write("#seed input", "2")
    page.open_more()
    assert page.value("#height input") == "33"
    assert not page.all("#frames input")
    page.generate(height="48")
    assert "PSNR" in page.result()
    page.wait(lambda: [p[:2] for p in page.pixels()].count([48, 48]) == 2)
    page.wait(lambda: [p[:2] for p in page.pixels(".cs-pictures img")] == [[48, 48]] * 2)
    assert not page.all(".cs-alert")
    assert page.downloads() == [f"{STEM}-2-dense.png", f"{STEM}-2-profile.png"]
    page.one("#compare input").click()
    page.generate()
    assert set(page.result()) == {"sparse, all steps", "of dense's operations"}
    page.wait(lambda: [p[:2] for p in page.pixels(".cs-pictures img")] == [[48, 48]])
    assert not page.all("#beside, video")


def test_a_generation_is_watched_and_stopped_also_from_a_page_that_is_loaded_anew(page):
    page.generate(steps="400")
    page.wait(page.steps_done)
    (stage,) = page.texts(".cs-stage strong")
    assert re.fullmatch(r"sparse: step \d+ of 400", stage)
    # Two frames of latents, which have an eighth of the pixels.
    page.wait(lambda: [p[:2] for p in page.pixels(".cs-pictures img")] == [[6, 4]] * 2)
    page.browser.refresh()
    page.wait(lambda: page.steps_done() and page.one("#stop").is_enabled())
    page.one("#stop").click()
    page.wait(lambda: page.texts(".cs-stage strong") == ["stopped"])
    assert 0 < len(page.steps_done()) < 400
    page.wait(lambda: page.one("#generate").is_enabled() and not page.one("#stop").is_enabled())
    page.generate(steps="4")
    made = page.result()
    page.browser.refresh()
    assert page.result() == made


def test_the_first_screen_has_an_example_and_says_what_the_model_is(page):
    from selenium.webdriver.common.keys import Keys

    page.open_more()
    defaults = {"height": "32", "width": "48", "frames": "5", "steps": "4", "seed": "0"}
    for name, default in defaults.items():
        assert page.value(f"#{name} input") in ("", "0")
        assert page.one(f"#{name} input").get_attribute("placeholder") == default
    assert "Takes no image to start from." in page.one("#model").text
    assert not page.all("#image")
    page.write("#prompt textarea", Keys.BACKSPACE)
    for name, steps in (("tiny-flux", "50"), ("tiny-wan", "50")):
        page.write("#model input", f"{name} (bundled)\n")
        page.shows("#prompt textarea", EXAMPLES[name])
        assert "A toy that was trained on simple shapes" in page.one("#model").text
        assert page.one("#steps input").get_attribute("placeholder") == steps
        assert bool(page.all("#image")) == (name == "tiny-flux")
    hint = "chipmunk is the schedule that was published first, to compare with."
    assert hint in page.one("#quality").text
    page.one("#dice").click()
    page.wait(lambda: page.value("#seed input") != "0")
    assert 0 <= int(page.value("#seed input")) < 2**32


def test_a_result_of_the_session_is_shown_again(page):
    page.generate(seed="31")
    page.result()
    page.wait(lambda: page.texts("#estimate")[0].startswith("About "))
    page.one("#compare input").click()
    page.generate(seed="32")
    page.wait(lambda: page.texts(".cs-results small")[:2][0].startswith("seed 32"))
    page.result()
    assert not page.all("#beside")
    page.all(".cs-results button")[1].click()
    page.wait(lambda: page.texts(".cs-asked p")[0].startswith("seed 31, "))
    page.wait(lambda: page.all("#beside"))
    assert len(page.all("video")) == 2


def test_hints_are_readable_in_both_schemes(page):
    page.open_more()
    for scheme in ("light", "dark"):
        page.run("document.body.classList.toggle('dark', arguments[0])", scheme == "dark")
        seen = page.wait(lambda: page.run(COLOURS))
        assert len(seen) > 5
        for text, colour, ground in seen:
            assert contrast(as_hex(colour), as_hex(ground)) >= 4.5, (scheme, text)


def as_hex(colour):
    return "#" + "".join(f"{int(n):02x}" for n in re.findall(r"\d+", colour)[:3])
