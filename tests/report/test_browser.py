"""The page in a real browser: no error, no request, its figures visible, its timeline drawn and moved."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.report.browser import Page, browser_path, opened_page
from tests.report.made_run import MadeRun, make_run
from thundersync.report.command import write_report

pytestmark = pytest.mark.skipif(
    browser_path() is None,
    reason="NO CHROMIUM: the report is not tested in a browser (as root: python3 tools/setup.py --tests)",
)

HOSTILE = " <script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> \x1b[31mred\x1b[0m &amp; \"'"
PIXELS = """(() => {
  const canvas = document.getElementById("tl-body");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 250) seen.add(data.slice(i, i + 3).join(","));
  return [...seen];
})()"""


@pytest.fixture(scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """One browser for all tests of this file: it takes seconds to start."""
    async with opened_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def rgb(colour: str) -> str:
    return ",".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))


async def test_a_report_opens_without_errors_or_requests_and_shows_its_figures(page: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path, MadeRun(hostile=HOSTILE, engines=2, workers=2))
    await page.open(write_report([folder]))
    await page.until("document.getElementById('tl').dataset.step === '5'")
    text = await page.ask("document.body.innerText")
    for wanted in (
        "Reward on held-out tasks rose from 0.20 to",
        "median step",
        "trainer busy",
        "lazy, forecast",
        "red",
    ):
        assert wanted in text
    assert await page.ask("document.querySelectorAll('svg.chart').length") >= 8
    assert await page.ask("window.hacked") is None
    assert await page.ask("document.querySelectorAll('img').length") == 0
    assert "\x1b" not in text
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


async def test_the_timeline_paints_every_phase_in_its_colour_and_follows_its_controls(
    page: Page, tmp_path: Path
) -> None:
    await page.open(write_report([make_run(tmp_path, MadeRun())]))
    await page.until("document.getElementById('tl').dataset.step === '5'")
    painted = await page.ask(PIXELS)
    for name in ("generate", "tool", "score", "backward"):
        colour = await page.ask(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
        assert rgb(colour) in painted, name
    await page.ask("document.getElementById('tl-previous').click()")
    await page.until("document.getElementById('tl').dataset.step === '4'")
    before = await page.ask("document.getElementById('tl-head').toDataURL()")
    await page.ask("document.getElementById('tl-in').click()")
    assert await page.ask("document.getElementById('tl-head').toDataURL()") != before
    await page.ask("document.getElementById('tl-all').click()")
    assert await page.ask("document.getElementById('tl-head').toDataURL()") == before
    await page.ask("document.getElementById('theme').click()")
    assert await page.ask("document.documentElement.dataset.theme") == "dark"
    assert await page.ask("document.getElementById('tl-head').toDataURL()") != before
    assert page.errors == []


async def test_a_pointer_over_timeline_and_chart_is_told_what_is_there(page: Page, tmp_path: Path) -> None:
    await page.open(write_report([make_run(tmp_path, MadeRun())]), height=2600)
    await page.until("document.getElementById('tl').dataset.step === '5'")
    place = await page.ask("JSON.parse(JSON.stringify(document.getElementById('tl-body').getBoundingClientRect()))")
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 175, y=place["y"] + 12)
    await page.until("!document.getElementById('tl-tip').hidden")
    assert "000005-00-00" in await page.ask("document.getElementById('tl-tip').textContent")
    chart = await page.ask("JSON.parse(JSON.stringify(document.querySelector('svg.chart').getBoundingClientRect()))")
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=chart["x"] + 200, y=chart["y"] + 100)
    await page.until("!document.getElementById('tip').hidden")
    assert "training: " in await page.ask("document.getElementById('tip').textContent")
    assert page.errors == []


async def test_several_runs_are_one_page_without_errors_dark_and_narrow(page: Page, tmp_path: Path) -> None:
    runs = [make_run(tmp_path, MadeRun(name=name, mode=name, seed=3)) for name in ("stream", "lazy")]
    await page.open(write_report(runs), width=420, scheme="dark")
    await page.until("document.getElementById('tl').dataset.step === '5'")
    assert await page.ask("document.documentElement.dataset.theme") == "dark"
    assert await page.ask("document.documentElement.scrollWidth") <= 420
    await page.ask("(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('tl-run'))")
    await page.until("document.getElementById('tl-step').options.length === 6")
    assert "stream.mode" in await page.ask("document.querySelector('.settings').innerText")
    assert page.errors == []
