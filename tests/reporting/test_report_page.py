"""The report in a real browser: drawn without an error at desk and phone width, text shown as text, fresh by itself.

Needs playwright (requirements-dev.txt) and a Chromium on the PATH (apt-get install chromium); skips itself without.
"""

import csv
import json
import shutil

import numpy as np
import pytest

from pretraining.reporting.page import page_payload, page_text, write_page
from pretraining.runtime.durable_files import append_row, write_json
from pretraining.runtime.run_folder import RunFolder
from tests.gear.ladders import small_ladder
from tests.reporting.test_reporting import SCRIPT, made_run, noisy_law, payload_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRAWN = "html[data-drawn]"
INK = """() => [...document.querySelectorAll("canvas")].map((canvas) =>
  canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((byte) => byte > 0))"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    with playwright.sync_playwright() as running:
        yield running.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def new_page(browser):
    """`new_page(address, width, **options)` -> the page that is drawn there; nothing may go wrong in it."""
    pages, errors = [], []

    def new_page(address: str, width: int = 1280, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        pages.append(page)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append("a dialog opened"))
        page.goto(address)
        page.wait_for_selector(DRAWN)
        return page

    yield new_page
    for page in pages:
        page.close()
    assert errors == []


@pytest.fixture
def opened(new_page, tmp_path):
    """`opened(*runs, width=, **options)` -> the page of these run folders or payloads."""

    def opened(*runs: RunFolder | dict, every_seconds: float | None = None, **options):
        payloads = [run if isinstance(run, dict) else payload_of(run) for run in runs]
        write_page(tmp_path / "report.html", page_text(page_payload(payloads, every_seconds), SCRIPT))
        return new_page((tmp_path / "report.html").as_uri(), offline=True, **options)

    return opened


def card_of(page, heading: str):
    """The one card with this heading."""
    return page.locator(".card", has=page.get_by_role("heading", name=heading, exact=True))


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run with everything that a page can show, markup in all its texts."""
    losses = noisy_law(3000)
    losses[2000] = 20.0
    run = made_run(tmp_path / "run", losses, events=[{"event": SCRIPT, "step": 9}], description=SCRIPT)
    append_row(run.samples, {"step": 1500, "prompt": SCRIPT, "text": SCRIPT})
    run.console_log.write_text(SCRIPT, encoding="utf-8")
    scores = {"eval/loss": 5.0, "eval/bits_per_byte": 1.5, "eval/hellaswag/acc_norm": 0.3125}
    append_row(run.metrics, {"step": 3000, "time": 0, **scores})
    write_json(run.plan, {"world_size": 8, "predicted": {"peak_memory_bytes": 50e9, "mfu": 0.4}})
    for step in (3000, 3001):
        norms = {f"stability/gradient_norm/h.{layer}": layer + step / 1e4 for layer in range(3)}
        append_row(run.metrics, {"step": step, "time": 0, "memory/peak_bytes": 40e9, **norms})
    return run


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_is_drawn_and_fits(opened, run, width, scheme):
    """No error, no request, ink on every canvas, nothing wider than the screen, markup shown as text."""
    page = opened(run, width=width, color_scheme=scheme)
    ink = page.evaluate(INK)
    assert len(ink) >= 4 and all(ink)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.locator("#samples pre").inner_text() == SCRIPT and page.title() == SCRIPT
    assert page.locator("main script").count() == 0


def test_a_published_curve_is_drawn_with_its_gaps(opened, tmp_path):
    """Beneath the run's own, in every chart of what it has; the rest of it on request."""
    run = made_run(
        tmp_path / "run", noisy_law(300), published={"curve": "gpt2-124m-llmc"}, budget=19560 * 524288
    )
    for step in (200_000, 300_000):  # of 1,000 tokens
        row = {"step": step, "time": 0, "train/tokens": 1000 * step, "train/grad_norm": 1.0, "eval/loss": 5.0}
        append_row(run.metrics, row)
    page = opened(run)
    assert "published: llm.c, 2024-10-13" in page.locator("#loss .legend").inner_text()
    assert all(told in page.locator("#published").inner_text() for told in ("300M", "5.0000", "gap"))
    page.get_by_label("published to its end").check()
    page.get_by_role("button", name="hours", exact=True).click()
    assert "published" not in page.locator("#loss .legend").inner_text()


def test_a_short_run_of_a_published_recipe_is_drawn_by_its_own_values(opened, tmp_path):
    """The axes are those of its losses, though the curve's next point is a thousand times as far; all on request."""
    recipe = {"published": {"curve": "modded-nanogpt-muon"}, "budget": 1_703_936_000}
    run = made_run(tmp_path / "run", np.linspace(6.9, 4.0, 82), **recipe)
    page = opened(run)

    def ranges() -> list[float]:
        return page.evaluate("(({x, y}) => [x.min, x.max, y.min, y.max])([...drawn][0].chart.scales)")

    left, right, low, high = ranges()
    assert 0 <= left <= 1000 and right == 82_000 and 3 < low < 4 and 6.7 < high < 9
    assert "no published point is near" in page.locator("#published").inner_text()
    page.get_by_role("button", name="steps", exact=True).click()
    assert ranges()[1] == 82
    page.get_by_role("button", name="tokens", exact=True).click()
    page.get_by_label("published to its end").check()
    _, right, low, high = ranges()
    assert right == 1_703_936_000 and low < 3.2772 and high > 6.7
    # between two points it ends where its table has it
    append_row(run.metrics, {"step": 100_000, "time": 0, "train/tokens": 100_000_000, "eval/loss": 4.4})
    page = opened(run)
    ends = page.evaluate("publishedLines(data.runs[0], 0, 'eval/loss')[0].series")
    assert ends["tokens"] == [0, 65_536_000, 100_000_000] and ranges()[1] == 100_000_000
    between = np.interp(np.log(1e8), np.log([65_536_000, 131_072_000]), [4.5862, 4.0985])
    assert ends["value"][2] == pytest.approx(between)
    label = "(data.runs[0].published.is_comparable = false, publishedLines(data.runs[0], 0, 'eval/loss')[0].label)"
    assert page.evaluate(label) == "published: modded-nanogpt, track 3, result 36 (not comparable)"


def test_the_page_of_a_ladder_is_drawn(new_page, workshop):
    """Points, laws, forecast and residuals by compute, and the answers in words; on a phone too."""
    page = new_page((small_ladder(workshop) / "ladder.html").as_uri(), 390, offline=True)
    assert page.evaluate(INK) == [True, True]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "of small: 9 runs" in page.locator("#answers").inner_text()
    assert page.locator("#runs tbody tr").count() == 9


def test_the_plan_and_the_scores_stand_beside_what_was_measured(opened, run):
    """Memory as planned and as it was, in the chart and in the table; every score of every validation."""
    page = opened(run)
    told = {
        "Peak memory of the fullest rank: GPU, allocated": ("planned peak",),
        "Plan beside measured": ("50 GB", "40 GB", "0.8 ", "40 %", "world size 8"),
        "Evaluation scores": ("hellaswag/acc norm", "0.3125", "5.0000"),
    }
    for heading, words in told.items():
        assert all(each in card_of(page, heading).inner_text() for each in words), heading


def test_eighty_layers_fit_one_chart(opened, tmp_path):
    """Few points each, named and in their order; the legend scrolls and the pointer is told of the nearest alone."""
    run = made_run(tmp_path / "deep", noisy_law(2000))
    for step in range(1, 2001, 4):
        norms = {f"stability/gradient_norm/h.{layer}": 1 + layer / 80 + step % 9 / 1e4 for layer in range(80)}
        append_row(run.metrics, {"step": step, "time": 0, **norms})
    payload = payload_of(run)
    sizes = [len(payload["series"][f"stability/gradient_norm/h.{layer}"]["value"]) for layer in range(80)]
    assert max(sizes) <= 150 and len(payload["series"]["train/loss"]["value"]) == 2000
    page = opened(payload, width=390)
    card = card_of(page, "Gradient norm by layer")
    names = card.locator(".legend").inner_text().split()
    assert names == [f"h.{layer}" for layer in range(80)] and card.bounding_box()["height"] < 450
    card.locator(".u-over").hover(position={"x": 150, "y": 60})
    assert card.locator(".tip div").count() == 9  # the place, and eight layers
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert all(page.evaluate(INK))


def test_charts_have_plain_titles_with_their_unit_and_say_something(opened, tmp_path):
    """Of all ranks together and of each rank. What was zero throughout has no chart; one that was not once has."""
    run = made_run(tmp_path / "run", noisy_law(50))
    for step in (51, 52):
        row = {"throughput/evaluation_seconds": 0.0, "throughput/saving_seconds": 0.0}
        row |= {"stability/refused_steps": step - 51, "train/save_blocked_seconds": 0.5}
        row |= {"train/save_snapshot_bytes": 2e6, "throughput/samples_per_second": 3.0}
        row |= {"hardware/gpu_power_watts": 900.0 + step, "hardware/gpu_temperature_celsius": 71.0}
        row |= {f"hardware/gpu_power_watts/{rank}": 450.0 + step + rank for rank in range(2)}
        append_row(run.metrics, {"step": step, "time": 0, **row})
    page = opened(run)
    titles = page.locator("h3").all_inner_texts()
    assert {"Time for which a save held up training", "Host memory for the copy that is saved"} <= set(titles)
    assert "Steps refused so far" in titles and not any("validations and saves" in title for title in titles)
    shown = page.locator("#memory-and-hardware").inner_text()
    assert "GPU power, all ranks together\nW" in shown
    assert "GPU temperature, the hottest of all ranks\n°C" in shown
    assert "GPU power of each rank\nW" in shown and "rank 0" in shown and "rank 1" in shown
    assert "Samples per second, all ranks together\nsamples/s" in page.locator("#speed").inner_text()
    assert all(page.evaluate(INK))


def test_how_a_run_stands_is_told_by_the_readers_clock(opened, tmp_path):
    """Nobody writes the page of a killed run: running when it is opened at once, silent an hour later."""
    run = made_run(tmp_path / "run", noisy_law(300))
    page = opened(run)
    page.clock.install()
    page.reload()
    assert page.locator("header .pill").inner_text() == "running"
    page.clock.fast_forward(3_600_000)
    assert page.locator("header .pill").inner_text() == "silent"
    assert "nothing written since" in page.locator("header").inner_text()
    run.add_event("stopped", step=280, reason="a stop file")
    page = opened(run)
    head = page.locator("header").inner_text()
    assert page.locator("header .pill").inner_text() == "stopped" and "at step 280, since" in head, head


def test_every_chart_of_two_runs_says_what_its_lines_are(opened, tmp_path):
    """A source's two losses share a chart under its own name; runs are told by colour and parts by dashes, whole."""
    runs = []
    for name in ("one", "two"):
        run = made_run(tmp_path / name, noisy_law(50))
        parts = ("forward_backward", "optimizer", "data_wait")
        row = {f"throughput/{part}_seconds": k / 100 for k, part in enumerate(parts, 1)}
        row |= {"train/my_text_loss": 4.0, "eval/my_text_loss": 4.1, "eval/my_text_bits_per_byte": 2.0}
        row |= {"eval/loss": 4.0, "eval/hellaswag/acc": 0.2, "eval/hellaswag/acc_norm": 0.3}
        for step in (30, 60):
            append_row(run.metrics, {"step": step, "time": 0, **row})
        runs.append(run)
    page = opened(*runs)

    def legend_of(heading: str) -> list[str]:
        box = card_of(page, heading).locator(".legend")
        assert box.evaluate("box => box.scrollHeight <= box.clientHeight"), "nothing of it is cut off"
        return box.locator("button").all_inner_texts()

    for heading in ("Loss, training and validation", "Loss of my_text"):
        assert legend_of(heading) == ["one", "two", "training", "validation"]
    parts = ["whole step", "forward backward", "optimizer", "data wait"]
    assert legend_of("Time of a step and its parts, mean") == ["one", "two", *parts]
    assert legend_of("HellaSwag") == ["one", "two", "acc", "acc norm"]
    titles = page.locator("h3").all_inner_texts()
    assert len(titles) == len(set(titles)) and "Bits per byte of my_text, validation" in titles
    dashed = page.locator("#loss .legend button", has_text="validation").locator(".swatch")
    assert "repeating" in dashed.evaluate("swatch => swatch.style.background")
    page.locator("#loss .legend button", has_text="validation").click()
    page.locator("#loss .u-over").hover(position={"x": 700, "y": 150})
    assert "validation" not in page.locator("#loss .tip").inner_text()


def test_charts_are_grouped_and_named_with_their_unit(opened, run):
    """A closed group stays closed; no title is there twice; sources, scores and memory are where one looks for them."""
    page = opened(run)
    groups = page.locator(".group")
    names = [name.split()[0] for name in groups.locator("summary").all_inner_texts()]
    assert names == ["Training", "Validation", "Scores", "Speed", "Memory", "Stability"]
    titles = page.locator("h3").all_inner_texts()
    assert len(titles) == len(set(titles))
    assert "Tokens per second, all ranks together\ntokens/s" in groups.nth(3).inner_text()
    assert "HellaSwag" in groups.nth(2).inner_text()
    groups.nth(3).locator("summary").click()
    page.get_by_role("button", name="steps", exact=True).click()  # draws the page anew
    assert not page.locator("#speed canvas").count()
    page.locator("#speed summary").click()
    page.wait_for_selector("#speed canvas")
    assert all(page.evaluate(INK))


def test_curves_are_downloaded_as_csv(opened, run):
    """Of one chart and of all, the points that are drawn, also those that are not finite."""
    page = opened(payload_of(run, name='a "b"'))
    with page.expect_download() as chart:
        page.locator("#loss").get_by_role("button", name="CSV", exact=True).click()
    with chart.value.path().open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert chart.value.suggested_filename == "loss.csv" and {row["run"] for row in rows} == {'a "b"'}
    assert {row["metric"] for row in rows} == {"train/loss", "eval/loss"}
    assert [float(row["value"]) for row in rows if row["step"] == "2001"] == [20.0]
    with page.expect_download() as whole:
        page.get_by_role("button", name="All curves as CSV").click()
    assert "stability/gradient_norm/h.2,3001," in whole.value.path().read_text()


def test_samples_are_chosen_by_step_and_by_prompt(opened, run):
    """The newest first; what was chosen stays when the page is drawn anew."""
    for step in (2000, 2500):
        for prompt in ("one", "two"):
            append_row(run.samples, {"step": step, "prompt": prompt, "text": f"{prompt} at {step}"})
    page = opened(run)
    card, text = page.locator("#samples"), page.locator("#samples pre")
    assert text.inner_text() == "No sample of this prompt at this step." and "step 2,500" in card.inner_text()
    page.get_by_label("which prompt").fill("2")
    assert text.inner_text() == "two at 2500" and "prompt 3 of 3" in card.inner_text()
    page.get_by_label("which step").fill("1")
    page.get_by_role("button", name="steps", exact=True).click()
    assert text.inner_text() == "two at 2000"


def test_overlaid_runs_show_what_differs_and_the_console_of_each(opened, run):
    """In a table of dotted keys and in the legends; the best validation loss is bold.

    They share the charts, which every axis and switch draws anew without an error.
    """
    other = payload_of(run, name="other") | {"best_validation": 4.0, "console": "of the other"}
    other["recipe"] = {**json.loads(run.recipe.read_text()), "training": {"learning_rate": 0.002}}
    page = opened(run, other)
    assert "training.learning_rate\tleft out\t0.002" in page.locator("#settings tbody").inner_text()
    label = "other: training.learning_rate 0.002"
    assert label in page.locator("#loss .legend").inner_text()
    assert page.locator("td b").all_inner_texts() == ["4.0000"]
    page.locator("#console summary").click()
    assert page.locator("#console pre").inner_text() == SCRIPT
    page.get_by_role("group", name="run").get_by_text("other").click()
    assert page.locator("#console pre").inner_text() == "of the other"
    for name in ("steps", "hours", "tokens"):
        page.get_by_role("button", name=name, exact=True).click()
    for name in ("log x", "log y", "forecast"):
        page.get_by_label(name).check()
    page.locator("#loss .legend button", has_text=label).click()
    page.locator("#loss .u-over").hover(position={"x": 400, "y": 150})
    assert all(page.evaluate(INK)) and label in page.locator("#loss .legend").inner_text()


def test_events_are_told_in_words(opened, tmp_path):
    """Saves are listed when asked for, with their step and their size in bytes; no JSON."""
    run = made_run(tmp_path / "run", noisy_law(300))
    run.add_event("save", checkpoint="checkpoint-250", bytes=9_067_900, write_seconds=0.5, background=True)
    run.add_event("end", eval_loss=3.0, measured={"tokens_per_second": 8500.0, "peak_memory_bytes": 2**28})
    page = opened(run)
    table = page.locator("#events table")
    assert "save" not in table.inner_text() and "{" not in table.inner_text()
    assert "tokens per second 8.5k, peak memory bytes 268 MB" in table.inner_text()
    page.get_by_label("saves and uploads (1)").check()
    row = page.locator("#events tr", has_text="save").inner_text()
    assert "250" in row and "9.07 MB" in row and "500 ms" in row


def test_an_open_page_refreshes_itself_and_keeps_what_was_chosen(opened, run, tmp_path):
    """While its run is alive; the axis that the reader chose stays."""
    payload = payload_of(run, live=True)
    page = opened(payload, every_seconds=30.0)
    page.clock.install()
    page.reload()
    page.get_by_role("button", name="steps", exact=True).click()
    fresh = page_payload([{**payload, "name": "fresh"}], None)
    write_page(tmp_path / "report.html", page_text(fresh, "fresh"))
    page.clock.fast_forward(31_000)
    page.wait_for_function("document.title === 'fresh'")
    page.wait_for_selector(DRAWN)
    assert page.get_by_role("button", name="steps", exact=True).get_attribute("aria-pressed") == "true"
