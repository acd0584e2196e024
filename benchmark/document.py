"""A report as a list of blocks, written as Markdown and as one HTML file that needs nothing else.

Blocks: ("heading", level, text), ("text", text), ("warning", text), ("list", [text]), ("picture", file name, caption),
("table", [[cell]]), whose first line is the header. Text, lists and captions may hold `code` and **bold**, so that a
name enters them as literal(name). Headings and cells are plain text.
"""

import base64
import html
import re

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1.5rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb; }
h3 { margin-top: 1.8rem; margin-bottom: .4rem; } p, li { max-width: 52rem; }
nav a { margin-right: 1.2rem; white-space: nowrap; } a { color: #0b5394; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td { white-space: nowrap; } th { border-bottom: 2px solid #555; vertical-align: bottom; }
tbody tr:hover { background: #f4f4f4; } th.text, td.text { text-align: left; }
th, td.text { overflow-wrap: anywhere; min-width: 4rem; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #444; max-width: 52rem; }
code { background: #f1f1f1; padding: .1rem .25rem; border-radius: 3px; overflow-wrap: anywhere; }
.warning { border-left: 5px solid #D55E00; padding: .4rem 1rem; background: #fff6ef; max-width: 52rem; }
@page { margin: 12mm; }
@media print {
  html, body { font-size: 11px; margin: 0; padding: 0; max-width: none; } p, li, figcaption { max-width: none; }
  nav { display: none; } h1, h2, h3, h3 + p { break-after: avoid; } figure, tr { break-inside: avoid; }
  figure img { max-height: 200mm; }
  .wide { overflow: visible; } table { font-size: 9px; } td { white-space: normal; } th, td { padding: 1px 4px; }
  td.text { min-width: 7em; }
  .many table { font-size: 6px; } .many th, .many td { padding: 1px; min-width: 2em; overflow-wrap: anywhere; }
}
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""
NUMERIC = re.compile(r"[-+]?[\d.].*|-|")
MANY = 18  # columns; more are printed on paper in smaller type, and broken anywhere
ESCAPED, CODE = r"\\[\\`*_~\]<&]", r"`[^`]+`"
TOKEN = re.compile(rf"({ESCAPED})|({CODE})|\*\*((?:{ESCAPED}|.)+?)\*\*", re.DOTALL)


def literal(name):
    """A name as text without markup: "a*b" -> "a\\*b". An underscore within a word is no markup."""
    return re.sub(r"[\\`*~]|\](?=\()|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", name)


def no_tags(text):
    """Text of which Markdown makes no HTML; in `code` it makes none anyway."""
    tag = r"<(?=[A-Za-z/!?])|&(?=#?\w+;)"
    return re.sub(rf"{ESCAPED}|{CODE}|({tag})", lambda m: f"\\{m[0]}" if m[1] else m[0], text)


def markdown_table(lines):
    """A Markdown table of rows of text, padded so that it also reads well on a terminal."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines = [lines[0], ["-" * (width - 1) + ":" for width in widths], *lines[1:]]
    return "\n".join(f"| {' | '.join(c.rjust(w) for c, w in zip(line, widths, strict=True))} |" for line in lines)


def to_markdown(blocks):
    parts = []
    for kind, *content in blocks:
        if kind == "heading":
            parts.append(f"{'#' * content[0]} {no_tags(literal(content[1]))}")
        elif kind == "list":
            parts.append("\n".join(f"- {no_tags(item)}" for item in content[0]))
        elif kind == "table":
            parts.append(markdown_table([[no_tags(literal(cell)) for cell in line] for line in content[0]]))
        elif kind == "picture":
            parts.append(f"![{no_tags(content[1])}]({content[0]})\n\n{no_tags(content[1])}")
        else:
            parts.append(no_tags(content[0]))
    return "\n\n".join(parts) + "\n"


def to_html(blocks, folder):
    """One page; pictures are read from the folder and embedded."""
    title = next((content[1] for kind, *content in blocks if kind == "heading"), "report")
    sections = [content[1] for kind, *content in blocks if kind == "heading" and content[0] == 2]
    contents = "".join(f'<a href="#{anchor(name)}">{html.escape(name)}</a>' for name in sections)
    parts = []
    for kind, *content in blocks:
        if kind == "heading":
            level, text = content
            parts.append(f'<h{level} id="{anchor(text)}">{html.escape(text)}</h{level}>')
            if level == 1:
                parts.append(f"<nav>{contents}</nav>")
        elif kind == "list":
            parts.append("<ul>" + "".join(f"<li>{inline(item)}</li>" for item in content[0]) + "</ul>")
        elif kind == "table":
            parts.append(html_table(content[0]))
        elif kind == "picture":
            name, caption = content
            data = base64.b64encode((folder / name).read_bytes()).decode()
            image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(caption, quote=True)}">'
            parts.append(f"<figure>{image}<figcaption>{inline(caption)}</figcaption></figure>")
        else:
            parts.append(f"<p class={kind}>{inline(content[0])}</p>")
    return PAGE.format(title=html.escape(title), style=STYLE, body="\n".join(parts))


def html_table(lines):
    text = [not all(NUMERIC.fullmatch(line[column]) for line in lines[1:]) for column in range(len(lines[0]))]

    def row(line, tag):
        cells = zip(line, text, strict=True)
        cells = [f"<{tag}{' class=text' if is_text else ''}>{html.escape(cell)}</{tag}>" for cell, is_text in cells]
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(row(line, "td") for line in lines[1:])
    size = "wide many" if len(lines[0]) > MANY else "wide"
    return f'<div class="{size}"><table><thead>{row(lines[0], "th")}</thead><tbody>\n{body}\n</tbody></table></div>'


def inline(text):
    """`code`, **bold** and escaped characters as HTML"""

    def markup(match):
        escaped, code, bold = match.groups()
        return escaped[1:] if escaped else f"<code>{code[1:-1]}</code>" if code else f"<strong>{convert(bold)}</strong>"

    def convert(text):
        return TOKEN.sub(markup, text)

    return convert(html.escape(text, quote=False)).replace("\n", "<br>")


def anchor(text):
    return re.sub(r"\W+", "-", text.lower()).strip("-")
