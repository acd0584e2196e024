"""A report as a list of blocks, written as Markdown and as one HTML file that needs nothing else.

Blocks: ("heading", level, text), ("text", text), ("warning", text), ("list", [text]), ("picture", file name, caption),
("table", [[cell]]), whose first line is the header. Text may hold `code` and **bold**.
"""

import base64
import html
import re

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb; }
h3 { margin-top: 1.8rem; margin-bottom: .4rem; } p, li { max-width: 52rem; }
nav a { margin-right: 1.2rem; white-space: nowrap; } a { color: #0b5394; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #555; } tbody tr:hover { background: #f4f4f4; }
th.text, td.text { text-align: left; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #444; max-width: 52rem; }
code { background: #f1f1f1; padding: .1rem .25rem; border-radius: 3px; overflow-wrap: anywhere; }
.warning { border-left: 5px solid #D55E00; padding: .4rem 1rem; background: #fff6ef; max-width: 52rem; }
@media print { body { font-size: 11px; margin: 0; } nav { display: none; } figure, tr { break-inside: avoid; } }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""
NUMERIC = re.compile(r"[-+]?[\d.].*|-|")


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
            parts.append(f"{'#' * content[0]} {content[1]}")
        elif kind == "list":
            parts.append("\n".join(f"- {item}" for item in content[0]))
        elif kind == "table":
            parts.append(markdown_table(content[0]))
        elif kind == "picture":
            parts.append(f"![{content[1]}]({content[0]})\n\n{content[1]}")
        else:
            parts.append(content[0])
    return "\n\n".join(parts) + "\n"


def to_html(blocks, folder):
    """One page; pictures are read from the folder and embedded."""
    title = next((content[1] for kind, *content in blocks if kind == "heading"), "report")
    sections = [content[1] for kind, *content in blocks if kind == "heading" and content[0] == 2]
    contents = "".join(f'<a href="#{anchor(name)}">{inline(name)}</a>' for name in sections)
    parts = []
    for kind, *content in blocks:
        if kind == "heading":
            level, text = content
            parts.append(f'<h{level} id="{anchor(text)}">{inline(text)}</h{level}>')
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
        cells = [f"<{tag}{' class=text' if is_text else ''}>{inline(cell)}</{tag}>" for cell, is_text in cells]
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(row(line, "td") for line in lines[1:])
    return f'<div class="wide"><table><thead>{row(lines[0], "th")}</thead><tbody>\n{body}\n</tbody></table></div>'


def inline(text):
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text).replace("\n", "<br>")


def anchor(text):
    return re.sub(r"\W+", "-", text.lower()).strip("-")
