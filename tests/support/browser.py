"""Headless Chromium, driven through a pipe via the DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip


def find():
    """Return the path to Chromium or Chrome, or None if neither is found."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Browser:
    """A browser with one page. Use it as a context manager.

    Args:
      folder: directory for the browser profile.
      seconds: timeout for each answer.
    """

    def __init__(self, folder, *, seconds=60):
        self.seconds, self.events, self._received, self._number = seconds, [], b"", 0
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The browser reads commands from file 3 and writes answers to file 4.
        shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        arguments = [*FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, find(), *arguments],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._session = None

    def __enter__(self):
        try:
            self._attach()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def _attach(self):
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        target = (
            pages[0]["targetId"]
            if pages
            else self.call("Target.createTarget", url="about:blank")["targetId"]
        )
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __exit__(self, *error):
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, **parameters):
        """Call a protocol method and return its result; keep events received before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self):
        end = time.monotonic() + self.seconds
        while b"\0" not in self._received:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"no answer from the browser in {self.seconds} s")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise OSError("the browser has ended")
            self._received += data
        answer, self._received = self._received.split(b"\0", 1)
        return json.loads(answer)

    def open(self, path):
        """Load a file and wait until its scripts have run."""
        self.events.clear()
        self.call("Page.navigate", url=Path(path).as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, expression):
        """Return a JavaScript expression's value; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for_frame(self):
        """Wait until the page has been redrawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector):
        """Return the visible text in an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def box(self, selector):
        """Scroll an element into view and return its left, top, width and height in the window."""
        return self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )

    def _places(self, selector, points):
        left, top, width, height = self.box(selector)
        return [{"x": left + x * width, "y": top + y * height} for x, y in points]

    def stroke(self, selector, points, *, modifiers=0, press=True, release=True):
        """Press the mouse at the first point, move it through the remaining points, and release it.

        Args:
          points: x and y from 0 to 1 in the element's box.
          modifiers: held keys; 8 is Shift.
          press, release: if False, the stroke continues the previous one, or leaves the button pressed for the next one.
        """
        places, mouse = self._places(selector, points), {"button": "left", "modifiers": modifiers}
        if press:
            self.call(
                "Input.dispatchMouseEvent",
                type="mousePressed",
                buttons=1,
                clickCount=1,
                **places[0],
                **mouse,
            )
        for place in places[1:] if press else places:
            self.call("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, **place, **mouse)
        if release:
            self.call(
                "Input.dispatchMouseEvent",
                type="mouseReleased",
                clickCount=1,
                **places[-1],
                **mouse,
            )
        self.wait_for_frame()

    def touch(self, selector, points):
        """Put a finger down at the first point, move it through the remaining points, and lift it."""
        for number, place in enumerate(self._places(selector, points)):
            self.call(
                "Input.dispatchTouchEvent",
                type="touchMove" if number else "touchStart",
                touchPoints=[place],
            )
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.wait_for_frame()

    def click(self, selector):
        """Click the middle of an element."""
        self.stroke(selector, [(0.5, 0.5)])

    def press(self, key, times=1):
        """Press a key on the focused element."""
        names = {" ": ("Space", 32), "Enter": ("Enter", 13), "Delete": ("Delete", 46), "Tab": ("Tab", 9),
                 "ArrowLeft": ("ArrowLeft", 37), "ArrowUp": ("ArrowUp", 38), "ArrowRight": ("ArrowRight", 39),
                 "ArrowDown": ("ArrowDown", 40)}  # fmt: skip
        code, number = names[key]
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=code,
                    windowsVirtualKeyCode=number,
                )
        self.wait_for_frame()

    def control_names(self):
        """Return the names of the page's controls, as read by assistive technology."""
        controls = {
            "button",
            "checkbox",
            "slider",
            "radio",
            "combobox",
            "spinbutton",
            "application",
        }
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        result = [node for node in nodes if node.get("role", {}).get("value") in controls]
        return [node.get("name", {}).get("value") for node in result]

    def resize(self, width, height, *, dark=False, mobile=False):
        """Set the window size in pixels and the preferred color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def problems(self):
        """Return the page's errors and warnings, and its external network requests."""
        self.run("0")  # what came until now
        result = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                result.append(parameters["exceptionDetails"])
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in (
                "error",
                "warning",
            ):
                result.append(parameters["entry"])
            elif method == "Network.requestWillBeSent" and parameters.get("type") != "Document":
                result.append(parameters["request"]["url"])
        return result
