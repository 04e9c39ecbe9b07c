"""How long the page of a difference takes from an action to its picture, in Chromium without a window.

    python benchmarks/page_latency.py [--network densenet121] [--repetitions 30]

An action's time ends when the frame that shows it has been handed over. It needs `playwright` and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.diffing.page import diff_page

TIMED = """async (count) => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = done;
    channel.port2.postMessage(0);
  }));
  const times = [];
  for (let i = 0; i < count; i++) {
    await painted();
    const start = performance.now();
    (ACTION)(i);
    await painted();
    times.push(performance.now() - start);
  }
  return times;
}"""
ACTIONS = {
    "click on a node": "(i) => document.querySelectorAll('.node')[7 * i % 40].click()",
    "node far away": "(i) => choose({ side: i % 2, index: 97 * i % 700 })",
    "keystroke of a search": "(i) => { at('search').value = 'block3 norm'.slice(0, 1 + i % 11);"
    " at('search').dispatchEvent(new Event('input')); }",
    "scrolling 900 pixels": "(i) => { scroller.scrollTop += 900; }",
}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="densenet121")
    parser.add_argument("--repetitions", type=int, default=30)
    asked = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    before = build_model(asked.network).model
    after = bnfuse.rewrite(before)
    start = time.perf_counter()
    page = diff_page(before, after)
    print(f"{asked.network}: {len(page.encode()) / 1e6:.2f} MB, made in {time.perf_counter() - start:.2f} s")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, action in ACTIONS.items():
            window = browser.new_page(viewport={"width": 1280, "height": 800})
            window.goto(f"{file.as_uri()}#graphs")
            times = window.evaluate(TIMED.replace("ACTION", action), asked.repetitions)
            print(f"{name:22s} median {statistics.median(times):5.1f} ms, longest {max(times):5.1f} ms")
            window.close()
        browser.close()


if __name__ == "__main__":
    main()
