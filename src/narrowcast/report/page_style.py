"""The look of pages: what all share, and what the page of an audit has beside it, with its few lines of script."""

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --card: #f6f8fa;
  --error: #b3261e; --warning: #8a5a00; --info: #1f5fa8; --faint: #8c959f; --band: #e3ecf7;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #b5568f; --s4: #b07a00; --s5: #3f8fbf }
@media (prefers-color-scheme: dark) { :root { --bg: #0f1318; --ink: #e3e7eb; --soft: #9aa4af; --line: #2b333c;
  --card: #171d24; --error: #ff8a80; --warning: #ffc66b; --info: #8ec5ff; --faint: #6b7682; --band: #1d2a3a;
  --s0: #56b4e9; --s1: #ff8f4d; --s2: #2fcf9f; --s3: #e59ac8; --s4: #f0c04a; --s5: #9ad0f5 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 3rem }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; color: var(--soft) }
code, li { overflow-wrap: anywhere }
code, .rule li { font-family: ui-monospace, monospace; font-size: .86em }
.verdict { margin: .6rem 0 1rem; display: flex; flex-wrap: wrap; gap: .5rem 1.2rem }
.tally b { font-size: 1.3rem } .tally.none { color: var(--soft) }
.tally.error { color: var(--error) } .tally.warning { color: var(--warning) } .tally.info { color: var(--info) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
input { width: 100%; max-width: 26rem; padding: .45rem .7rem; font: inherit; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: .4rem }
details.rule { background: var(--card); border: 1px solid var(--line); border-left: .3rem solid var(--info);
  border-radius: .3rem; margin: .5rem 0; padding: .5rem .8rem }
details.error { border-left-color: var(--error) } details.warning { border-left-color: var(--warning) }
summary { cursor: pointer; font-weight: 600 }
.badge { font: 600 .8em ui-monospace, monospace; color: var(--soft); margin-right: .3rem }
.count { font-weight: 400; color: var(--soft) } .count::before { content: "×\\00a0" }
.brief { display: block; font-weight: 400; color: var(--soft); font-size: .92em; overflow-wrap: anywhere }
details[open] .brief { display: none }
.rule p { margin: .5rem 0 } .rule ul { margin: .4rem 0; padding-left: 1.2rem; max-height: 20rem; overflow: auto }
.remedy::before { content: "Remedy: "; font-weight: 600 } .about { color: var(--soft); font-size: .92em }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .92em }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 600 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr));
  gap: 1rem; align-items: start }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .8rem }
figure svg { display: block; width: 100%; height: auto; font-family: inherit }
figure p { margin: .4rem 0 0; color: var(--soft); font-size: .88em }
footer { margin-top: 3rem; color: var(--soft); font-size: .88em }
"""

AUDIT = """
td:nth-child(4), th:nth-child(4) { text-align: right }
tr.refused td:nth-child(n+5) { color: var(--error) }
@media (max-width: 40rem) { thead { display: none } table, tbody, tr { display: block } td { display: inline-block }
  tr { border-bottom: 1px solid var(--line); padding: .4rem 0 } td { border: 0; padding: 0 .8rem 0 0 }
  td:first-child, td:last-child { display: block } td:first-child { font-weight: 600 }
  td:nth-child(4)::after { content: " layers" } }
@media print { input { display: none } details.rule ul { max-height: none } }
"""

SCRIPT = """
const field = document.querySelector('input[type=search]');
field?.addEventListener('input', () => {
  const words = field.value.toLowerCase().split(/\\s+/);
  const fits = text => words.every(word => text.toLowerCase().includes(word));
  for (const rule of document.querySelectorAll('details.rule')) {
    const title = rule.querySelector('summary').textContent;
    let any = fits(rule.textContent);
    for (const item of rule.querySelectorAll('li')) item.hidden = !fits(title + ' ' + item.textContent) && !fits(title);
    rule.hidden = !any;
  }
});
"""
