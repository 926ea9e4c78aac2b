"""What the page of an evaluation has beside the look that all pages share."""

EVALUATION = """
h1 small { font-size: .65em; font-weight: 400; color: var(--soft) }
p.says { margin: .8rem 0 1rem; padding: .7rem 1rem; font-size: 1.15rem; font-weight: 600; background: var(--card);
  border: 1px solid var(--line); border-left: .3rem solid var(--info); border-radius: .3rem }
p.says.bad { border-left-color: var(--error) } p.says.undecided { border-left-color: var(--warning) }
p.says.good { border-left-color: var(--s2) }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td .about { display: block; overflow-wrap: anywhere }
.numbers { margin: 1rem 0 1.2rem } .numbers .mean { font-weight: 600; font-size: 1.1em }
.numbers td:first-child { width: 100% } .strip { padding-right: 0 } .strip svg { display: block; width: 10rem }
.strip path { fill: none; stroke: var(--faint); stroke-width: 1.5 } .strip circle { fill: var(--s0) }
.strip .range { stroke: var(--s0); stroke-width: 7; opacity: .35 }
.strip .limit { stroke: var(--error); stroke-width: 2; stroke-dasharray: 4 2.5 }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem 1.6rem;
  align-items: start } .beside > * { min-width: 0 } .beside p { margin: 0 0 .6rem }
.beside figure p { margin: .4rem 0 0 } .beside + table { margin-top: .8rem }
td:last-child, th:last-child { padding-right: 0 }
.token { background: var(--band); border-radius: .2rem; padding: 0 .2rem; white-space: pre-wrap }
bdi { unicode-bidi: isolate } .before { overflow-wrap: anywhere }
.worst td:nth-child(3) { min-width: 17rem }
.side { display: grid; grid-template-columns: 3.6rem 1fr; color: var(--soft) }
.side > span { color: var(--ink); overflow-wrap: anywhere }
details.more { margin: 1rem 0 } details.more summary { font-weight: 400; color: var(--soft) }
.pair { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .6rem .9rem;
  margin: .6rem 0; break-inside: avoid } .pair p { margin: 0 0 .4rem; overflow-wrap: anywhere }
.prompt { color: var(--soft) } .sides { display: grid; grid-template-columns: 1fr 1fr; gap: .6rem 1.4rem }
.sides > div { overflow-wrap: anywhere; min-width: 0 } .sides b { display: block; font-size: .88em }
.same { color: var(--soft) }
.grid { width: auto }
.grid td { min-width: 7.5rem; text-align: center; font-variant-numeric: tabular-nums; border: 2px solid var(--bg);
  padding: .5rem .3rem;
  background: color-mix(in srgb, var(--s0) calc(var(--share) * .5), var(--card)) }
.grid thead th { text-align: center } .grid th:first-child { text-align: left; border: 0; padding-right: 1.2rem }
.grid tbody th { vertical-align: middle; white-space: nowrap }
.grid .lost { box-shadow: inset 0 -.25rem var(--error) }
pre { margin: 0; padding: .6rem .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .3rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .86em }
@media (max-width: 40rem) {
  .numbers thead { display: none } .numbers, .numbers tbody, .numbers td { display: block }
  .numbers tr { display: grid; grid-template-columns: 6rem 1fr minmax(0, 7rem); gap: .1rem .6rem; padding: .5rem 0;
    border-bottom: 1px solid var(--line) }
  .numbers td { border: 0; padding: 0 } .numbers td:first-child { grid-column: 1 / -1; width: auto }
  .numbers .n { text-align: left } .strip svg { width: 100% }
  .cards thead { display: none } .cards, .cards tbody, .cards td { display: block }
  .cards tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .1rem 1rem;
    padding: .5rem 0; border-bottom: 1px solid var(--line) }
  .cards td { border: 0; padding: 0; text-align: left }
  .cards td:first-child { grid-column: 1 / -1; font-weight: 600 }
  .cards td::before { content: attr(data-title) " "; color: var(--soft); font-weight: 400 }
  .plain { font-size: .8em } .plain td, .plain th { padding-right: .5rem } .plain td:first-child { white-space: normal }
  .worst thead { display: none } .worst, .worst tbody, .worst tr, .worst td { display: block }
  .worst tr { padding: .5rem 0; border-bottom: 1px solid var(--line) } .worst td { border: 0; padding: 0 }
  .worst td.n { text-align: left; font-weight: 600 } .worst td.n::before { content: "KL " }
  .worst td:nth-child(3) { min-width: 0 }
  .sides { grid-template-columns: 1fr } .grid { width: 100%; font-size: .85em } .grid td { min-width: 0 }
  .grid tbody th { white-space: normal } .grid th:first-child { padding-right: .5rem } }
@media print { figure, tr, .rule { break-inside: avoid } h2, h3 { break-after: avoid }
  .grid td, .strip, .token { print-color-adjust: exact } }
"""
