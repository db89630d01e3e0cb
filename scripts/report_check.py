#!/usr/bin/env python3
"""Loads the HTML reports in a real browser, at the width of a phone and of a desk, light and dark,
and as they are printed, and fails on a console message or on an element wider than the page.

    scripts/report_check.py [--shots DIR] [PAGE...]

Without a PAGE it makes the pilot's and verify's report of the quickstart's corpus first, with the
program in $KDSCORE (default: target/debug/kdscore, built if need be). Debian's Chromium and its
driver are installed where they are missing; nothing else is needed.
"""

import base64
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
PORT = 9517
# Width and height in CSS pixels; paper is A4.
WIDTHS = {"phone": (390, 844), "desk": (1280, 900), "paper": (794, 1123)}
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-dev-shm-usage",
]
# Elements whose right edge lies beyond the page, unless something around them hides it.
WIDER = """
const page = document.documentElement.clientWidth, found = [];
for (const e of document.querySelectorAll('body *')) {
  const box = e.getBoundingClientRect();
  if (box.width && (box.right > page + 1 || box.left < -1)) {
    found.push(e.tagName + '.' + (e.getAttribute('class') || '') + ' from ' + box.left.toFixed(0)
      + ' to ' + box.right.toFixed(0) + ': ' + e.textContent.trim().slice(0, 40));
  }
}
if (document.documentElement.scrollWidth > page) found.push('the page itself');
return found;
"""


def install():
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "chromium", "chromium-driver"],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        sys.exit(f"{path}: {error.read().decode()[:500]}")


class Browser:
    """A headless Chromium of one size."""

    def __init__(self, size, profile):
        width, height = size
        options = {
            "args": [*FLAGS, f"--user-data-dir={profile}"],
            "mobileEmulation": {
                "deviceMetrics": {"width": width, "height": height, "pixelRatio": 2, "mobile": width < 600}
            },
        }
        asked = {
            "capabilities": {
                "alwaysMatch": {
                    "browserName": "chrome",
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
            }
        }
        self.session = f"/session/{call('POST', '/session', asked)['sessionId']}"

    def cdp(self, command, **parameters):
        return call("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page, look):
        medium, scheme = ("print", "light") if look == "print" else ("screen", look)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", media=medium, features=features)
        call("POST", f"{self.session}/url", {"url": page.as_uri()})

    def findings(self):
        lines = call("POST", f"{self.session}/se/log", {"type": "browser"})
        logged = [f"console: {line['level']} {line['message']}" for line in lines]
        wider = call("POST", f"{self.session}/execute/sync", {"script": WIDER, "args": []})
        return logged + [f"wider than the page: {what}" for what in wider]

    def shoot(self, path):
        shot = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        call("DELETE", self.session)


def driver():
    process = subprocess.Popen(
        ["chromedriver", f"--port={PORT}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(100):
        try:
            if call("GET", "/status")["ready"]:
                return process
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    process.terminate()
    sys.exit("chromedriver: expected it to answer within 10 s")


def make_pages(folder):
    """The two reports, from the corpus and the teacher that come with the repository."""
    program = os.environ.get("KDSCORE")
    if program is None:
        subprocess.run(["cargo", "build", "--locked", "--quiet"], cwd=ROOT, check=True)
        program = str(ROOT / "target/debug/kdscore")
    teacher = str(ROOT / "tests/fixtures/teacher")
    pages = [folder / "pilot.html", folder / "verify.html"]

    def run(*args, codes=(0,)):
        done = subprocess.run([program, *args], cwd=folder, capture_output=True, text=True)
        if done.returncode not in codes:
            sys.exit(f"{args}: exit {done.returncode}\n{done.stderr}")

    run("prepare", "--data", str(ROOT / "configs/quickstart.jsonl"), "--tokenizer", teacher,
        "--out", "corpus")
    job = ["--teacher", teacher, "--corpus", "corpus", "--out", "out", "--shard-tokens", "3000"]
    run("pilot", *job, "--fraction", "0.25", "--price", "3", "--report", str(pages[0]))
    # Most shards are missing, and that shows on the page.
    run("verify", "out", "--report", str(pages[1]), codes=(0, 1))
    return pages


def check(pages, shots):
    problems = []
    process = driver()
    try:
        for name, size in WIDTHS.items():
            with tempfile.TemporaryDirectory() as profile:
                browser = Browser(size, profile)
                looks = ["print"] if name == "paper" else ["light", "dark"]
                for page, look in itertools.product(pages, looks):
                    browser.open(page, look)
                    found = browser.findings()
                    problems += [f"{page.name}, {name}, {look}: {what}" for what in found]
                    if shots:
                        browser.shoot(shots / f"{page.stem}-{name}-{look}.png")
                browser.close()
    finally:
        process.terminate()
        process.wait()
    return problems


def main():
    args = sys.argv[1:]
    shots = None
    if args[:1] == ["--shots"]:
        shots = pathlib.Path(args[1])
        shots.mkdir(parents=True, exist_ok=True)
        args = args[2:]
    install()
    with tempfile.TemporaryDirectory() as folder:
        pages = [pathlib.Path(page).resolve() for page in args] or make_pages(pathlib.Path(folder))
        problems = check(pages, shots)
        for problem in problems:
            print(problem)
        if problems:
            sys.exit(1)
        print(f"{len(pages)} pages at the width of {', '.join(WIDTHS)}, light, dark and printed: nothing to complain of")


if __name__ == "__main__":
    main()
