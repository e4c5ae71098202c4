"""The report page's HTML and style: a Jinja template, which `field.report.report_page` fills in.

The page is legible at a width of 360 CSS pixels. Only tables are wider than a phone; each table
scrolls in a separate box. Colours follow the reader's light or dark scheme. Plots have a white
background.
"""

TEMPLATE = """\
{% macro table(content) %}
<div class="wide" tabindex="0"><table>
<thead>
{% if content.headings | map(attribute=0) | select | list %}
<tr>
{% for name, width in content.headings | groups %}
<th colspan="{{ width }}">{{ name }}</th>
{% endfor %}
</tr>
{% endif %}
<tr>{% for _, heading in content.headings %}<th scope="col">{{ heading }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for row in content.rows %}
<tr{% if loop.index0 == content.best %} class="best"{% endif %}>
<th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endmacro %}
{% macro pictures(found) %}
<div class="pictures">
{% for picture in found %}
<figure><img src="{{ picture | embedded }}" alt="{{ picture.alt }}"></figure>
{% endfor %}
</div>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Pilotfish field report: {{ runs | map(attribute="name") | join(", ") }}</title>
<style>
:root { --ink: #1a1f24; --soft: #5a656f; --line: #d9dee3; --paper: #fbfbfa; --card: #fff;
  --mark: #e3f0e8; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa5af; --line: #343b42; --paper: #14181c; --card: #1c2126;
    --mark: #1e3a2c; --accent: #7cc4f0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: break-word; }
header { border-bottom: 3px solid var(--accent); margin-bottom: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; padding-top: .5rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0 .8rem; max-width: 44rem; }
header p, .soft { color: var(--soft); font-size: .9rem; }
p.soft { margin: .4rem 0; }
dl { margin: .4rem 0; }
dt { font-weight: 600; }
dd { margin: 0 0 .6rem; }
.wide { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card); margin: .4rem 0 1rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; border-bottom-color: var(--soft); }
thead tr:not(:last-child) th { text-align: center; border-bottom-color: var(--line); }
tbody th, thead tr:last-child th:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card); font-weight: 600; border-right: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
tr.best > *, tr.best > th { background: var(--mark); }
.facts td, .facts thead th { text-align: left; white-space: normal; min-width: 11rem; }
.facts tbody th { white-space: normal; max-width: 8.5rem; font-weight: 500; color: var(--soft); }
.reasons td:last-child { text-align: left; white-space: normal; min-width: 18rem; }
.pictures { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.pictures + .pictures { margin-top: 1rem; }
figure { margin: 0; padding: .5rem; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; max-width: 30rem; }
figure img { display: block; width: 100%; height: auto; }
summary { cursor: pointer; color: var(--accent); margin: .6rem 0; }
@media (max-width: 30rem) { body { padding: 1rem .7rem 3rem; } figure { padding: .25rem; } }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --card: #fff; --mark: #eee;
    --accent: #0072b2; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; border: 0; }
  table { font-size: 6.8pt; } th, td { padding: .12rem .25rem; }
  tbody th { position: static; }
  figure, tr, p, h2, h3 { break-inside: avoid; } h2, h3, h2 + p { break-after: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; }
}
</style>
</head>
<body>
<header>
<h1>Pilotfish field report</h1>
<p>{{ runs | length }} run{{ "s" if runs | length > 1 }}, made {{ made }} by {{ software }}</p>
</header>

<dl>
{% for run in runs %}
<dt>{{ run.name }}</dt>
<dd>{{ summaries[run.name] }}</dd>
{% endfor %}
</dl>

<h2>What was measured</h2>
{% if differences.rows %}
<div class="facts">{{ table(differences) }}</div>
{% endif %}
<div class="facts">{{ table(common) }}</div>

<h2>Time per token and per round, bytes, energy</h2>
<p>Times per token and per round cover the <em>steady</em> rounds: the first round of an answer
reads the prompt, and counts only in the first token's time and in the whole answer's tokens/s.
Under stream, each token counts as a round. Bytes are the sizes of the frames that ZeroMQ gets. The
fixed choice with the lowest median is marked. Protocol local cannot be marked, since its text is
the drafter's and not the target's.</p>
{% for run in runs %}
<h3>{{ run.name }}</h3>
{{ table(latencies[run.name]) }}
{% endfor %}

{% if gallery.latency %}
<h2>Latency against window</h2>
<p>Medians over answers, with 95 % intervals. Dotted lines: protocols with a single setting.</p>
{% if gallery.compared %}
{{ pictures(gallery.compared) }}
{% endif %}
{{ pictures(gallery.latency) }}
{% endif %}

{% if gallery.stages %}
<h2>Where the time goes</h2>
<p>Means over the steady rounds, so that the stages add up. Queue is the time that a round
spends at the edge outside of the target's pass. The split between uplink and downlink relies on the
edge's clock; the sum of uplink and downlink does not. Under stream, the wait for a token is split
into the target's pass and the rest.</p>
{{ pictures(gallery.stages) }}
{% endif %}

{% if gallery.depths %}
<h2>Acceptance by position</h2>
<p>A round reaches a depth if it accepted every drafted token before it. All windows of a protocol
are pooled; each depth counts the rounds that drafted it. Lines at the points are 95 % intervals of
a share; shares of fewer than {{ few }} rounds are not drawn.</p>
{{ pictures(gallery.depths) }}
{% for run in runs if positions[run.name].rows %}
<details><summary>{{ run.name }}: the counts</summary>
{{ table(positions[run.name]) }}
</details>
{% endfor %}
{% endif %}

{% if gallery.bytes_per_token %}
<h2>Bytes per token</h2>
<p>Bytes of all rounds, without handshake, prompt and probes, and without the overhead of encryption
and TCP.</p>
{{ pictures(gallery.bytes_per_token) }}
{% endif %}

<h2>The link over time</h2>
<p>The device's estimates of the link when each answer began.</p>
{{ pictures(gallery.link) }}
{% for run in runs if unmeasured[run.name] %}
<p class="soft">{{ run.name }}: not measured: {{ unmeasured[run.name] | join(", ") }}.</p>
{% endfor %}

<h2>The choices of auto, and the cost of the alternatives</h2>
{% if auto %}
<p>A forecast is the time that auto predicted for a choice before an answer (median over answers).
Fixed choices are the answers of the same run that requested a protocol and window by name.</p>
{{ pictures(gallery.alternatives) }}
{{ pictures(gallery.predictions) }}
{% for run in runs if run.name in auto %}
<h3>{{ run.name }}{% if run.hindsight.policies %}, policy {{ run.hindsight.policies | join(", ") }}
{% endif %}</h3>
<p>{{ auto[run.name] }}</p>
<div class="reasons">{{ table(choices[run.name]) }}</div>
{% endfor %}
{% else %}
<p class="soft">Not measured: the run has no answer under protocol auto.</p>
{% endif %}

<h2>How the numbers are computed</h2>
<p>Warm-up answers and unfinished ones are left out; their numbers are above. A median's 95 %
interval is a percentile bootstrap over answers: {{ "{:,}".format(resamples) }} resamples, a fixed
seed. It shows how far the median would move with similar prompts at other times, not over another
link. p95 is the 95th percentile over answers, or over rounds for a round's time. Intervals of
shares are Wilson's. α is the share of verified positions that were accepted. n counts answers
unless another unit is named.</p>
</body>
</html>
"""
