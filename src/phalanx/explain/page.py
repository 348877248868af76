"""The steps of a collective as one page of HTML that needs nothing else: a slider shows one step after the other."""

from __future__ import annotations

import base64
import hashlib

from phalanx.diagnosis.render import shown
from phalanx.explain.drawn import STYLE, rows_legend, step_svgs
from phalanx.explain.steps import Explained
from phalanx.explain.text import sums, title
from phalanx.topology.placement import DARK, LIGHT

_STYLE = f"""
:root {{ color-scheme: light dark; --page: {LIGHT["page"]}; --text: {LIGHT["text"]}; }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: {DARK["page"]}; --text: {DARK["text"]}; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: .75rem; max-width: 46rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.2rem; line-height: 1.4; margin: 0 0 .5rem; }}
p {{ margin: .25rem 0; }}
.control {{ position: sticky; top: 0; padding: .5rem 0; background: var(--page); }}
input {{ width: 100%; height: 2rem; }}
section {{ margin: 0 -.75rem; }}
section[hidden] {{ display: none; }}
#said {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }}
"""
# The arrow keys move the slider also where it has not the focus.
_SCRIPT = """
var slider = document.getElementById("step"), said = document.getElementById("said");
var steps = document.querySelectorAll("section");
function show() {
  for (var i = 0; i < steps.length; i++) steps[i].hidden = i !== Number(slider.value);
  said.textContent = steps[slider.value].querySelector("title").textContent;
}
document.addEventListener("keydown", function (event) {
  var by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!by || event.target === slider) return;
  slider.value = Number(slider.value) + by;
  show();
});
slider.addEventListener("input", show);
document.getElementById("control").hidden = false;
show();
"""


def explained_page(explained: Explained) -> str:
    """The page. A policy in it forbids every script but its own, and all that would have to be loaded."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    most = len(explained.steps)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{shown(title(explained))}</title><style>{_STYLE}{STYLE}</style></head><body>",
        f"<h1>{shown(title(explained))}</h1>",
        f"<p>{shown(' '.join(rows_legend(explained)), 1000)}</p>",
        '<div class="control" id="control" hidden><label for="step">Step (arrow keys)</label>',
        f'<input type="range" id="step" min="0" max="{most}" value="0">',
        '<p id="said" aria-live="polite"></p></div>',
        *(f"<section>{svg}</section>" for svg in step_svgs(explained)),
        *(f"<p>{shown(line, 1000)}</p>" for line in sums(explained)),
        f"<script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"
