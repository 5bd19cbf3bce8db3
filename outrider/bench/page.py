"""A report as one HTML file: no script, nothing from the network, for light and dark grounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from ..errors import LoadError
from ..files import write_json
from .analysis import analyse
from .charts import STYLE
from .folder import Folder
from .sections import environment, headline, markdown, sections

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Outrider: a benchmark's report</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
.wide { overflow-x: auto; }
.loud { font-weight: bold; color: #b91c1c; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; } figcaption span { font-weight: 400; }
{{ style }}
</style>
</head>
<body>
<h1>Outrider: a benchmark's report</h1>
<p>{{ headline }}</p>
{% if interrupted %}<p class="loud">Interrupted: not all was measured.</p>{% endif %}
<div class="wide"><table>
{% for name, text in environment %}<tr><th scope="row">{{ name }}</th><td>{% if name == "command" %}<code>{{ text }}</code>{% else %}{{ text }}{% endif %}</td></tr>
{% endfor %}</table></div>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
<p>{{ section.note }}</p>
{{ section.chart | safe }}
<div class="wide"><table>
<thead><tr>{% for name in section.columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
</section>
{% endfor %}
<p>Every figure but the rooflines is computed from the traces beside this page.</p>
</body>
</html>
"""


def html(report: dict[str, Any]) -> str:
    """The page."""
    return (
        Environment(autoescape=True)
        .from_string(TEMPLATE)
        .render(
            style=Markup(STYLE),
            headline=headline(report),
            interrupted=report["interrupted"],
            environment=environment(report),
            sections=sections(report),
        )
    )


def write_report(folder: Folder) -> Path:
    """Make report.json, report.md and report.html of the folder's traces; returns the page's path."""
    report = analyse(folder)
    page = folder.path / "report.html"
    try:
        write_json(folder.path / "report.json", report)
        (folder.path / "report.md").write_text(markdown(report), encoding="utf-8")
        page.write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot write the report to {folder.path}: {error.strerror}") from error
    return page
