"""What the page of a report looks like, and the little that it does."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

# The colours of kinds of operations, by their numbers in the core: reductions are blue, what moves data to or from one
# rank or all is green, all_to_all violet, messages orange, barrier grey. Awaited ranks and open operations are red.
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #5d6670; --line: #d5dae0; --box: #f4f6f8;
  --alert: #c4232b; --alert-box: #fdeeee; --row: #eceff2;
  --k0: #8b949e; --k1: #2f6fde; --k2: #1a8f5a; --k3: #4aa3a0; --k4: #7d8590; --k5: #7fa9f5; --k6: #123f9c;
  --k7: #74b816; --k8: #2b6b4f; --k9: #8a4fd0; --k10: #d9730d; --k11: #eda84a;
  --k12: #a0522d; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e4e8ec; --faint: #9aa4af; --line: #333a43;
  --box: #1d2127; --alert: #ff7b7b; --alert-box: #3a1c1f; --row: #22272e;
  --k0: #7d8590; --k1: #5b94f7; --k2: #35b57c; --k3: #5cc4c0; --k4: #98a2ad; --k5: #a9c6ff; --k6: #3d6fd6;
  --k7: #95d63c; --k8: #4d9b78; --k9: #b184ee; --k10: #f2913a; --k11: #f7c57c;
  --k12: #d08a64; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; line-height: 1.4; margin: 0 0 .75rem; padding: .75rem 1rem; background: var(--alert-box);
  border-left: 4px solid var(--alert); border-radius: 4px; }
h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p { margin: .4rem 0; }
.faint { color: var(--faint); font-size: .9rem; }
code, pre, td.code, .who { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
h1 code { padding: 0 .25em; background: var(--page); border-radius: 3px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: .5rem 0; padding: 0;
  font-size: .85rem; }
.legend svg { overflow: visible; width: 1em; height: 1em; margin-right: .35em; vertical-align: -.12em; }
.ranks { display: grid; grid-template-columns: max-content 1fr; gap: 3px .75rem; align-items: center; }
.who { font-size: .85rem; white-space: nowrap; }
.awaited .who, td.awaited { color: var(--alert); font-weight: 600; }
.ranks > div { display: contents; }
.row { display: block; width: 100%; height: 26px; background: var(--row); border-radius: 3px; }
.row rect { cursor: pointer; }
.row rect:hover, .row rect.chosen { stroke: var(--text); stroke-width: 2; vector-effect: non-scaling-stroke; }
rect.open { fill-opacity: .45; stroke: var(--alert); stroke-width: 2; stroke-dasharray: 5 3;
  vector-effect: non-scaling-stroke; }
rect.failed { stroke: var(--alert); stroke-width: 2; vector-effect: non-scaling-stroke; }
.tick { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.nothing { color: var(--faint); font-size: .85rem; }
.axis { display: grid; grid-template-columns: repeat(5, 1fr); font-size: .8rem; color: var(--faint); }
#about.shown { min-height: 9.5em; position: sticky; bottom: 0; }
#about { margin: .6rem 0 0; padding: .5rem .75rem; background: var(--box);
  border: 1px solid var(--line); border-radius: 4px; font-size: .85rem; white-space: pre-wrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 500; white-space: nowrap; }
td { min-width: 9rem; }
table.stacked td { min-width: 0; }
td.short { min-width: 0; white-space: nowrap; overflow-wrap: normal; font-variant-numeric: tabular-nums; }
tr.open td { color: var(--alert); }
details { margin: .4rem 0; border: 1px solid var(--line); border-radius: 4px; background: var(--box); }
summary { padding: .4rem .75rem; cursor: pointer; }
details > pre, details > .wide { margin: 0; padding: .3rem .75rem .6rem; }
pre { overflow-x: auto; font-size: .83rem; line-height: 1.45; overflow-wrap: normal; }
.k0 { fill: var(--k0); } .k1 { fill: var(--k1); } .k2 { fill: var(--k2); } .k3 { fill: var(--k3); }
.k4 { fill: var(--k4); } .k5 { fill: var(--k5); } .k6 { fill: var(--k6); } .k7 { fill: var(--k7); }
.k8 { fill: var(--k8); } .k9 { fill: var(--k9); } .k10 { fill: var(--k10); } .k11 { fill: var(--k11); }
.k12 { fill: var(--k12); }
@media (max-width: 40rem) { body { padding: .6rem; } h1 { font-size: 1.05rem; padding: .6rem .75rem; }
  .ranks { display: block; } .ranks > div { display: block; }
  .who { display: inline-block; margin-top: .45rem; position: sticky; left: 0; }
  table.stacked thead { display: none; } table.stacked tr { display: block; padding: .4rem 0;
  border-bottom: 1px solid var(--line); } table.stacked td { display: flex; gap: .75rem; border: 0; padding: .1rem 0;
  text-align: left; white-space: normal; } table.stacked td::before { content: attr(data-name); flex: 0 0 5.5rem;
  color: var(--faint); font-family: system-ui, sans-serif; } }
@media print { details { break-inside: avoid; } #about { display: none; } }
"""

# A phone has no pointer that rests on a bar to show its title, so the bar that is touched is described below all.
SCRIPT = """
var chosen = null;
document.getElementById("timeline").addEventListener("click", function (event) {
  var title = event.target.querySelector ? event.target.querySelector("title") : null;
  if (!title || event.target.tagName !== "rect") return;
  if (chosen) chosen.classList.remove("chosen");
  chosen = event.target;
  chosen.classList.add("chosen");
  var row = chosen.parentNode.getAttribute("aria-label").replace("operations of ", "");
  var about = document.getElementById("about");
  about.textContent = row + "\\n" + title.textContent;
  about.classList.add("shown");
});
"""
