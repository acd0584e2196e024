"""The pictures and the page of a report: readable, whatever the names, the numbers and how many there are."""

import html
import re

import pytest
from benchmark_helpers import cells

from benchmark import document

NAMES = ("<b>", "a*b*c", "**x**", "`x`", "_x_", "a_b", "a|b", "&amp;", "[x](y)", "~~x~~", "a\\b")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_markup(name):
    blocks = [("heading", 1, name), ("table", [[name], [name]]), ("list", [document.literal(name)])]
    blocks += [("text", f"**bold {document.literal(name)}** and `code <b>`")]
    shown = html.escape(name)
    page = document.to_html(blocks, None)
    assert f">{shown}</h1>" in page
    assert page.count(f">{shown}</t") == 3  # the title, and two cells
    assert f"<li>{shown}</li>" in page
    assert f"<p class=text><strong>bold {shown}</strong> and <code>code &lt;b&gt;</code></p>" in page
    markdown = document.to_markdown(blocks)
    assert "`code <b>`" in markdown
    for text in (markdown.splitlines()[0].removeprefix("# "), cells(markdown)[0][0] if name != "a|b" else name):
        assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text) == name  # as Markdown reads it
        assert not re.search(r"(?<!\\)[<*`&]|(?<![\w\\])_", text)


def test_only_what_is_markup_is_escaped():
    text = "1.5 [1.2, 1.8], a < b & c_d, +2.0"
    assert document.to_markdown([("heading", 2, text), ("text", text)]) == f"## {text}\n\n{text}\n"


def test_paper_cuts_nothing_off():
    printed = document.STYLE.split("@media print")[1]
    for rule in (".wide { overflow: visible", "td { white-space: normal", "break-after: avoid", "max-height: 200mm"):
        assert rule in printed
    table = ("table", [[f"name {i}" for i in range(30)], ["1.0"] * 30])
    assert '<div class="wide many">' in document.to_html([table], None)
