"""Accessibility checks for the built site: `python docs/accessibility.py [--axe FILE] [PAGE ...]`.

Each page in ``docs/_build/html`` needs a language, a title, one top-level heading, no skipped
heading level, a text for every picture, a name for every frame, link, button and field, and unique
ids. This takes seconds, without a browser.

With `--axe`, some pages (with `--all`, all pages) also open in headless Chromium or Chrome, at
desktop and phone width, in light and dark colors. The file ``axe.min.js`` is part of axe-core
(``npm install --no-save axe-core``). axe-core reports low contrast, missing names and elements
without keyboard access. The Tab key then walks through each page, and every focused element must
show its focus.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
BUILT = DOCS / "_build" / "html"
LEFT_OUT = ("_static", "_sources", "_modules", ".doctrees")
EMPTY = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
    "wbr",
}  # fmt: skip
NAMED = {"a", "button"}
FOR_PRINT = "jb-print-docs-body"
"""Title and contents that the theme shows on paper alone."""
READ = (
    "index", "start/ten-minutes", "choose", "learn/gates", "learn/index", "do", "circuits",
    "training-large-tables", "reference/index", "reference/api/ops-tables", "reference/equations",
    "reference/api/command-line", "gallery/index", "status", "faq",
    "play/detector", "play/digits", "play/life",
)  # fmt: skip
"""Pages of all kinds, those that a browser opens unless others are named."""
SIZES = {"wide": 1280, "phone": 390}


class _Page(HTMLParser):
    """Parser that collects the problems in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.levels: list[int] = []
        self.ids: Counter[str] = Counter()
        self.title = ""
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._labeled: set[str] = set()
        self._fields: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if attributes.get("id"):
            self.ids[str(attributes["id"])] += 1
        if tag == "html" and not attributes.get("lang"):
            self.problems.append("the page has no language")
        if tag == "img":
            if "alt" not in attributes:
                self.problems.append(f"no alt text: {attributes.get('src', '')[-60:]}")
            elif attributes["alt"]:
                self._said(str(attributes["alt"]))
        if tag in ("iframe", "object", "embed") and not attributes.get("title"):
            self.problems.append(f"no title: {tag} {attributes.get('src', attributes.get('data'))}")
        if tag == "label" and attributes.get("for"):
            self._labeled.add(str(attributes["for"]))
        is_field = tag in ("input", "select", "textarea")
        if is_field and attributes.get("type") not in ("hidden", "submit", "button"):
            inside = any(opened == "label" for opened, _, _ in self._open)
            if not inside:
                self._fields.append(attributes)
        printed = any(attributes.get("id") == FOR_PRINT for _, attributes, _ in self._open)
        if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit() and not printed:
            self.levels.append(int(tag[1]))
        if tag not in EMPTY:
            self._open.append((tag, attributes, []))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self._said(data.strip())

    def _said(self, text: str) -> None:
        for _, _, words in self._open:
            words.append(text)

    def handle_endtag(self, tag: str) -> None:
        # HTML may leave end tags out: an outer one closes everything within.
        while any(opened == tag for opened, _, _ in self._open):
            opened, attributes, words = self._open.pop()
            if opened == "title" and not any(t == "svg" for t, _, _ in self._open):
                self.title = " ".join(words)
            hidden = attributes.get("aria-hidden") == "true" or "hidden" in attributes
            named_by = ("aria-label", "title", "aria-labelledby")
            name = words or any(attributes.get(key) for key in named_by)
            if (
                opened in NAMED
                and not name
                and not hidden
                and (opened != "a" or "href" in attributes)
            ):
                self.problems.append(f"no name: <{opened} {attributes}>")
            if opened == tag:
                break

    def finished(self) -> list[str]:
        problems = list(self.problems)
        if not self.title.strip():
            problems.append("the page has no title")
        if self.levels.count(1) != 1:
            problems.append(f"{self.levels.count(1)} headings of the first level")
        for before, after in zip(self.levels, self.levels[1:], strict=False):
            if after > before + 1:
                problems.append(f"a heading of level {after} follows one of level {before}")
        problems += [f"the id {name} is there {n} times" for name, n in self.ids.items() if n > 1]
        for attributes in self._fields:
            # Only now: a label may follow its field.
            named_by = ("aria-label", "aria-labelledby", "title", "placeholder")
            has_name = any(attributes.get(key) for key in named_by)
            if attributes.get("id") not in self._labeled and not has_name:
                problems.append(f"a field without a name: {attributes}")
        return problems


def pages(built: Path) -> list[Path]:
    """Return the pages in a built site."""
    paths = sorted(built.rglob("*.html"))
    return [path for path in paths if not set(LEFT_OUT) & set(path.relative_to(built).parts)]


def problems(html: str) -> list[str]:
    """Return the problems in a page, without a browser."""
    page = _Page()
    page.feed(html)
    page.close()
    return page.finished()


# ---------------------------------------------------------------------------------- in a browser
AXE = """axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations.map(
  (v) => `${v.id} (${v.impact}), ${v.nodes.length} times: ${v.nodes[0].html.slice(0, 160)}`))"""
FOCUS = """(() => { const e = document.activeElement; if (!e || e === document.body) return null;
  const part = e.closest('.sd-card') || e;
  const shown = [part, ...part.children].some((o) => {
    const s = getComputedStyle(o), b = o.getBoundingClientRect();
    const marked = s.outlineStyle !== 'none' || s.boxShadow !== 'none' || e.matches('iframe');
    return marked && b.width > 0 && b.height > 0; });
  return [e.outerHTML.slice(0, 120), shown]; })()"""


def opened(browser: Any, path: Path, axe: str) -> Iterator[str]:
    """Yield the problems in a page at all browser sizes and colors."""
    for size, width in SIZES.items():
        for dark in (False, True):
            browser.resize(width, 900, dark=dark, mobile=size == "phone")
            browser.open(path)
            browser.run("new Promise((done) => setTimeout(done, 400))")  # scripts of the page
            browser.run(f"{axe};0")
            where = f"{size}, {'dark' if dark else 'light'}"
            yield from (f"{where}: {line}" for line in browser.run(AXE))
            if browser.run("document.documentElement.scrollWidth > innerWidth"):
                yield f"{where}: the page is wider than the window"
    yield from keyboard(browser)


def keyboard(browser: Any, steps: int = 40) -> Iterator[str]:
    """Walk through an open page by Tab; yield elements without a visible focus, and the end."""
    browser.resize(SIZES["wide"], 900)
    browser.run("document.activeElement && document.activeElement.blur()")
    seen = []
    for _ in range(steps):
        browser.press("Tab")
        focus = browser.run(FOCUS)
        if focus is None:
            break
        seen.append(focus[0])
        if not focus[1]:
            yield f"the focus is not shown: {focus[0]}"
    if len(seen) > 2 and seen[-1] == seen[-2] == seen[-3] and not seen[-1].startswith("<iframe"):
        yield f"the Tab key does not leave {seen[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="such as start/ten-minutes; by default all")
    parser.add_argument("--built", type=Path, default=BUILT, help="the folder of the site")
    parser.add_argument("--axe", type=Path, help="axe.min.js: open the pages in a browser, too")
    parser.add_argument(
        "--all", action="store_true", help="open all pages in the browser, which takes ten minutes"
    )
    arguments = parser.parse_args()
    chosen = [arguments.built / f"{name}.html" for name in arguments.pages] or pages(
        arguments.built
    )
    if not chosen:
        sys.exit(f"{arguments.built} has no pages: build the site first")
    count = 0

    def say(path: Path, lines: Iterator[str] | list[str]) -> None:
        nonlocal count
        for line in lines:
            count += 1
            print(f"{path.relative_to(arguments.built)}: {line}", flush=True)

    for path in chosen:
        say(path, problems(path.read_text(encoding="utf-8")))
    if arguments.axe:
        sys.path.insert(0, str(DOCS.parent / "tests" / "support"))
        import browser as browsers

        axe = arguments.axe.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder, browsers.Browser(folder) as browser:
            kinds = [arguments.built / f"{name}.html" for name in READ]
            in_browser = chosen if arguments.pages or arguments.all else kinds
            for path in in_browser:
                say(path, opened(browser, path, axe))
        print(f"{len(in_browser)} pages in a browser")
    print(f"{len(chosen)} pages, {count} problems")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
