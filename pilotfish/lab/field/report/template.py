"""The text of the report's page: a Jinja template for `lab.page`.

`field.report.report_page` fills it in.
"""

TEMPLATE = """\
{% extends "page" %}
{% from "parts" import table, pictures %}
{% macro show(shown) %}
{% if shown.pictures %}
{{ pictures(shown.pictures) }}
{% endif %}
{% for words in shown.few %}
<p class="soft">{{ words }}</p>
{% endfor %}
{% endmacro %}
{% block title %}
Pilotfish field report: {{ runs | map(attribute="name") | join(", ") }}
{% endblock %}
{% block heading %}Pilotfish field report{% endblock %}
{% block origin %}
{{ runs | length }} run{{ "s" if runs | length > 1 }},
made {{ made }} by {{ software }}
{% endblock %}
{% block content %}

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

<h2>The link over time</h2>
{% if gallery.rtt or gallery.link %}
<p>The time is UTC, as the device's clock told it; a device does not tell its time zone. Lines are
medians; the band reaches from the least to the most. Orange: the edge was away. Grey: nothing was
measured. Lines break there.</p>
{% endif %}
{% for run in runs if clock[run.name] %}
<p>{{ run.name }}: {{ clock[run.name] }}</p>
{% endfor %}
{{ show(gallery.rtt) }}
{% for run in runs if away[run.name] %}
<h3>{{ run.name }}: outages</h3>
<p>{{ away[run.name] }}</p>
{% if run.history.outages %}
<div class="reasons">{{ table(outages[run.name]) }}</div>
{% endif %}
{% endfor %}
{% if rtts.rows %}
<h3>Percentiles of the RTT</h3>
<p>Pings are small messages between answers. A percentile needs enough samples to expect one above
it: p99 needs 100, p99.9 needs 1,000. The picture's axis ends at the percentile 99.5 of the widest
line.</p>
{{ table(rtts) }}
{{ show(gallery.rtt_distribution) }}
{% endif %}
{% if gallery.link %}
<h3>Goodput, jitter, retransmissions, signal</h3>
<p>Goodput is that of a probe's transfer, where there is one. A hollow triangle is a lower bound:
the transfer ended before its rate was steady. Other values are the device's estimates when each
answer or probe began.</p>
{{ show(gallery.link) }}
{% endif %}
{% for run in runs if run.history.unmeasured %}
<p class="soft">{{ run.name }}: not measured: {{ run.history.unmeasured | join(", ") }}.</p>
{% endfor %}
<h3>Bytes</h3>
<p>Bytes of the frames that ZeroMQ gets; probes include the messages that measure the link for an
answer.</p>
{{ table(traffic) }}

{% if measured %}
<h2>Time per token and per round, bytes, energy</h2>
<p>Times per token and per round cover the <em>steady</em> rounds: the first round of an answer
reads the prompt, and counts only in the first token's time.
Under stream, each token counts as a round. Bytes are the sizes of the frames that ZeroMQ gets. The
fixed choice with the lowest median is marked. Protocol local cannot be marked, since its text is
the drafter's and not the target's.</p>
{% for run in runs if run.figures %}
<h3>{{ run.name }}</h3>
{{ table(latencies[run.name]) }}
{% endfor %}

{{ show(gallery.compared) }}

<h2>Distributions over answers</h2>
<p>Each protocol at its window with the lowest median; the table has all of them. The axes end at
the percentile 99.5 of the widest line.</p>
{{ show(gallery.distribution_compared) }}
{{ show(gallery.distribution) }}
{{ table(answer_percentiles) }}
{% endif %}

{% if gallery.latency %}
<h2>Latency against window</h2>
<p>Medians over answers, with 95 % intervals. Dotted lines: protocols with a single setting.</p>
{{ show(gallery.latency) }}
{% endif %}

{% if gallery.stages %}
<h2>Where the time goes</h2>
<p>Means over the steady rounds, so that the stages add up. Queue is the time that a round
spends at the edge outside of the target's pass. The split between uplink and downlink relies on the
edge's clock; the sum of uplink and downlink does not. Under stream, the wait for a token is split
into the target's pass and the rest.</p>
{{ show(gallery.stages) }}
{% endif %}

{% if gallery.depths %}
<h2>Acceptance by position</h2>
<p>A round reaches a depth if it accepted every drafted token before it. All windows of a protocol
with its varied options are pooled; each depth counts the rounds that drafted it. Lines at the
points are 95 % intervals of a share.</p>
{{ show(gallery.depths) }}
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
{{ show(gallery.bytes_per_token) }}
{% endif %}

<h2>The choices of auto, and the cost of the alternatives</h2>
{% if auto %}
<p>A forecast is the time that auto predicted for a choice before an answer (median over answers).
Fixed choices are the answers of the same run that requested a protocol and window by name.</p>
{{ show(gallery.choices) }}
{{ show(gallery.alternatives) }}
{{ show(gallery.predictions) }}
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
link. Each line, bar, median, mean and share in the pictures rests on {{ few }} answers, rounds or
samples at least. p95 is the 95th
percentile over answers, or over rounds for a round's time. Intervals of shares are Wilson's. α is
the share of verified positions that were accepted. n counts answers unless another unit is
named.</p>
{% endblock %}
"""
