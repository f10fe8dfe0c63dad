"""The style sheet of the page: light and dark, 320 pixels and wider. Colours are told apart by the colour-blind."""

CSS = """
:root{color-scheme:light dark;--page:#f4f5f7;--card:#fff;--line:#dfe3e8;--grid:#e8ebef;--zero:#8a94a0;--text:#17202a;
--soft:#55606d;--good:#0b62b5;--bad:#b3360b;--note:#6b4e00;--track:#e4edf7;--bar:#2f7fc9;--shade:#1018280d}
@media (prefers-color-scheme:dark){:root{--page:#0e1318;--card:#161d25;--line:#2a343f;--grid:#2a3540;--zero:#7d8a98;
--text:#e9eef4;--soft:#a9b5c2;--good:#7cbcf7;--bad:#ff9a70;--note:#f0c657;--track:#1d2b3a;--bar:#4f9fe6;--shade:#0000}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
"Noto Sans","Liberation Sans",Arial,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main{max-width:1000px;margin:0 auto;padding:28px 16px 48px}
h1{font-size:clamp(1.55rem,1.2rem + 1.7vw,2.2rem);line-height:1.18;letter-spacing:-.015em;margin:0;text-wrap:balance}
h2{font-size:1.15rem;line-height:1.3;margin:0 0 4px}
h3{font-size:1rem;line-height:1.4;margin:0}
p{margin:0}
.unit{color:var(--soft);font-weight:400}
header{padding:0 4px}
.where{color:var(--soft);font-size:.875rem;margin-bottom:14px}
.where code{color:var(--text);font:inherit;font-weight:600}
.verdict{display:flex;gap:12px;align-items:flex-start}
.verdict svg{flex:none;width:34px;height:34px;margin-top:3px}
.verdict .good{fill:var(--good)}.verdict .bad{fill:var(--bad)}.verdict .sign{fill:none;stroke:var(--page);stroke-width:3.2;
stroke-linecap:round;stroke-linejoin:round}
.lead{font-size:1.0625rem;color:var(--soft);margin-top:10px}
.tiles{display:grid;grid-template-columns:repeat(3,1fr);gap:12px;margin:24px 0 0;padding:0}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:12px;box-shadow:0 1px 2px var(--shade)}
.tile{padding:12px 16px 13px;min-width:0}
.tile dt{color:var(--soft);font-size:.875rem}
.tile dd{margin:0}
.tile .figure{font-size:1.5rem;font-weight:650;line-height:1.3;letter-spacing:-.01em}
.tile .more{color:var(--soft);font-size:.875rem;line-height:1.4}
section{padding:18px 20px 20px;margin-top:16px}
section>p,figcaption p,.quiet{color:var(--soft);font-size:.9rem}
figure{margin:18px 0 0}
figcaption{margin-bottom:8px}
.chart{display:flex}
.chart .axis{flex:none}
.chart .plot{flex:1;min-width:0;display:block;overflow:visible}
svg text{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid)}.zero{stroke:var(--zero)}
.plot rect{fill:var(--bar)}
.plot .resumed{stroke:var(--zero);stroke-dasharray:2 3}
.mark path{stroke-linecap:round}
.mark.failed path{stroke:var(--bad);stroke-width:2.4;fill:none}
.mark.halo path{stroke:var(--card);stroke-width:5.5}
.mark.cut path{fill:var(--text)}
.mark.resume path{fill:var(--text);stroke:var(--card);stroke-width:1.5;paint-order:stroke}
.mark.notice path{fill:var(--note);stroke:var(--card);stroke-width:1.5;paint-order:stroke}
.ends{display:flex;justify-content:space-between;gap:16px;color:var(--soft);font-size:.8125rem}
figure .ends{padding-left:62px}
figure .ends.few{justify-content:flex-start;gap:.35em}
.runs{list-style:none;margin:10px 0 0;padding:0}
.runs li{margin-top:8px}
.runs p{font-size:.9rem;line-height:1.4}
.runs p span{color:var(--soft)}
.runs svg{display:block;overflow:visible;min-width:12px}
.track{fill:var(--track)}
.ticks{stroke:var(--bar);stroke-width:1.6;fill:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:12px 0 0;padding:0;color:var(--soft);font-size:.875rem}
.legend li{display:flex;align-items:center;gap:6px}
table{border-collapse:collapse;width:100%;font-size:.9rem;margin-top:12px}
th{text-align:left;color:var(--soft);font-weight:500;font-size:.8125rem;padding:0 14px 6px 0;vertical-align:bottom}
td{border-top:1px solid var(--line);padding:8px 14px 8px 0;vertical-align:top}
th:last-child,td:last-child{padding-right:0}
td.bad span,.bad-text{color:var(--bad);font-weight:600}
th{white-space:nowrap}
details{margin-top:4px}
summary{cursor:pointer;color:var(--good);font-size:.9rem;padding:6px 0}
summary:focus-visible{outline:2px solid var(--good);outline-offset:3px;border-radius:4px}
footer{color:var(--soft);font-size:.8125rem;padding:20px 4px 0}
footer p+p{margin-top:6px}
.scroll{overflow-x:auto}
@media (min-width:681px){td.short{white-space:nowrap}}
@media (max-width:680px){
main{padding:20px 12px 36px}
.tiles{grid-template-columns:1fr 1fr;gap:8px;margin-top:18px}
.tile{padding:10px 12px 11px}.tile .figure{font-size:1.3rem}
section{padding:16px 14px 16px;margin-top:12px}
.verdict svg{width:28px;height:28px;margin-top:2px}
table,tbody{display:block}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{display:block;border-top:1px solid var(--line);padding:9px 0}
tbody tr:last-child{padding-bottom:0}
td{display:grid;grid-template-columns:92px 1fr;gap:10px;border:0;padding:1px 0}
td::before{content:attr(data-label);color:var(--soft);font-size:.8125rem;line-height:1.68}
td:has(span:empty){display:none}
td:first-child{display:block;font-weight:600}
td:first-child::before{content:none}
td:not(.short){display:block}
td:not(.short)::before{display:block}
}
@media print{body{background:#fff}section,.tile{break-inside:avoid;box-shadow:none}}
"""
