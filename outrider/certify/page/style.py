"""How the page looks, on wide and narrow screens, light and dark, and on paper."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2128; --quiet: #57606a;
  --rule: #d5dbe1; --soft: #f4f6f8; --line: #0b62c4; --band: #d8ebdf; --good: #176f37;
  --bad: #b3261e; --open: #805400; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e3e8ed; --quiet: #98a3ae;
  --rule: #343c45; --soft: #1d2329; --line: #6cb0ff; --band: #1d3a29; --good: #58c57e;
  --bad: #ff8f85; --open: #e0b04a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.15rem; font-weight: 600; margin: 0; color: var(--quiet); }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .4rem 0; }
.verdict { font-size: 2.2rem; line-height: 1.2; font-weight: 700; margin: .3rem 0; }
.good { color: var(--good); } .bad { color: var(--bad); } .open { color: var(--open); }
.quiet, figcaption p, dt { color: var(--quiet); }
.said, td, dd, pre, p { overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .45rem .8rem .45rem 0;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; color: var(--quiet); }
td:first-child, td:nth-child(2) { white-space: nowrap; }
td:nth-child(2) { font-weight: 600; }
pre { background: var(--soft); border: 1px solid var(--rule); border-radius: 6px; padding: .7rem;
  margin: .5rem 0; white-space: pre-wrap; font: .85rem/1.45 ui-monospace, "DejaVu Sans Mono",
  monospace; max-height: 24rem; overflow-y: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .2rem 1.5rem;
  margin: .4rem 0 1rem; }
dl div { display: flex; gap: .6rem; justify-content: space-between;
  border-bottom: 1px solid var(--rule); }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 0 0 2.4rem; }
figcaption p, .reading { font-size: .9rem; }
.reading { border-left: 3px solid var(--line); padding-left: .7rem; margin-top: .8rem; }
.wealth { display: grid; grid-template-columns: 3rem 1fr; margin: .8rem .8rem 0 0; }
.up { position: relative; } .plot { position: relative; height: 15rem; }
.plot svg { display: block; width: 100%; height: 100%; border: 1px solid var(--rule);
  overflow: hidden; }
.up span { position: absolute; right: .5rem; transform: translateY(-50%); font-size: .8rem;
  color: var(--quiet); white-space: nowrap; }
.up sup { font-size: .7em; line-height: 0; }
.along { grid-column: 2; position: relative; height: 1.5rem; }
.along span { position: absolute; top: .2rem; transform: translateX(-50%); font-size: .8rem;
  color: var(--quiet); white-space: nowrap; }
.named { position: absolute; left: .4rem; transform: translateY(-105%); font-size: .8rem;
  color: var(--bad); background: var(--paper); padding: 0 .2rem; line-height: 1.2; }
.grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
.bound { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4;
  vector-effect: non-scaling-stroke; }
.curve { fill: none; stroke: var(--line); stroke-width: 2; vector-effect: non-scaling-stroke; }
.looks { display: grid; grid-template-columns: max-content minmax(8rem, 1fr) max-content;
  column-gap: 1rem; align-items: center; margin-top: .8rem; font-size: .85rem; }
.looks svg { width: 100%; height: 1.5rem; display: block; }
.looks .said { color: var(--quiet); font-variant-numeric: tabular-nums; }
.band { fill: var(--band); } .looks .grid { stroke: var(--quiet); }
.bar { stroke: var(--line); stroke-width: 3; } circle.bar { fill: var(--line); stroke: none; }
.beyond { stroke: var(--open); } circle.beyond { fill: var(--open); }
@media (max-width: 44rem) {
  .verdict { font-size: 1.8rem; }
  table, tbody, tr, td { display: block; } thead { display: none; }
  td { border: 0; padding: 0; } tr { border-bottom: 1px solid var(--rule); padding: .5rem 0; }
  td:first-child { color: var(--quiet); }
  .looks { grid-template-columns: minmax(0, 1fr); } .looks .along { grid-column: 1; }
  .looks .said { margin-bottom: .5rem; }
}
@media print { pre { max-height: none; } main { padding: 0; } figure { break-inside: avoid; } }
"""
